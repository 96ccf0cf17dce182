"""Families of models: each computes what it computes in transformers, and what can't run is named."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import Layout, chain_rows
from engine.checkpoint import ModelError, check_checkpoint, context_length
from engine.decode import Speculation, decode
from engine.drafters.ngram import NgramDrafter
from engine.fused import FusedLayer
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.families import FAMILIES, LLAMA, VOCABULARY, WINDOW, save, text
from tests.rows import assert_close, grown, leased, prefill, tree_rows

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return save(name, FAMILIES[name], tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def runners(family: Path) -> dict[bool, ModelRunner]:
    """By whether they are in invariant mode."""
    return {mode: ModelRunner(family, dtype="float32", kv_tokens=512, invariant=mode) for mode in (False, True)}


@pytest.fixture
def audited(runners: dict[bool, ModelRunner]) -> Iterator[dict[bool, ModelRunner]]:
    yield runners
    for runner in runners.values():
        runner.pool.check()
        assert runner.pool.used_pages == 0, "the test left pages behind"


@pytest.fixture(scope="module")
def own(family: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """The model's own logits of a text [tokens, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return result

    return logits


# what runs


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("invariant", [False, True])
def test_logits_of_a_text_and_of_a_tree_behind_it_are_the_models_own(
    audited: dict[bool, ModelRunner],
    own: Callable[[Sequence[int]], torch.Tensor],
    invariant: bool,
    by_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """by_rows: as on CPUs in float32; else with torch's attention, as everywhere else."""
    monkeypatch.setattr("engine.attention.COMPILES", by_rows)
    runner, prompt, tree = audited[invariant], text(40), grown(14, seed=1, vocab_size=VOCABULARY)
    assert own(prompt).std() > 0.03, "flat logits would hide anything"
    with leased(runner, 64, 64) as (lease, other):
        assert_close(prefill(runner, lease, prompt, chunk=12), own(prompt))
        prefill(runner, other, prompt)
        for slots in (lease.slots[40 : 40 + tree.size], lease.slots[40 : 40 + tree.size][::-1].copy()):
            logits = runner.forward([chain_rows(other, 40, [5]), tree_rows(lease, 40, tree, slots)])
            assert_close(logits[0], own([*prompt, 5])[-1])
            alone = runner.forward([tree_rows(lease, 40, tree, slots)])
            for node in range(tree.size):
                expected = own([*prompt, *tree.token[tree.lineage(node)].tolist()])[-1]
                assert_close(logits[1 + node], expected)
                assert_close(alone[node], expected)


def test_greedy_decoding_gives_what_transformers_generates(family: Path, audited: dict[bool, ModelRunner]) -> None:
    prompts = [tuple(text(length, seed=length)) for length in (3, 20)]
    expected = exact.transformers_greedy(family, prompts, 24)
    requests = [GenerationRequest(str(i), prompt, SamplingParams(max_tokens=24)) for i, prompt in enumerate(prompts)]
    for runner in audited.values():
        assert [generation.tokens for generation in decode(runner, requests)] == expected
        speculation = Speculation(NgramDrafter(), FixedTree(7), 1)
        assert [generation.tokens for generation in decode(runner, requests, speculation)] == expected


@pytest.mark.parametrize("by_rows", [True, False])
def test_in_invariant_mode_a_path_has_its_bits_in_a_chain_a_tree_and_a_batch(
    audited: dict[bool, ModelRunner], by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.COMPILES", by_rows)
    runner, prompt, tree = audited[True], text(70), grown(12, seed=2, vocab_size=VOCABULARY)
    with leased(runner, 96, 96, 96) as (lease, other, third):
        whole = prefill(runner, lease, prompt)
        assert torch.equal(prefill(runner, other, prompt, chunk=3), whole)
        slots = np.random.default_rng(0).permutation(lease.slots[70 : 70 + tree.size])
        rows = tree_rows(lease, 70, tree, slots)
        alone = runner.forward([rows])
        beside = chain_rows(third, 0, prompt[:5], wanted=0)
        assert torch.equal(runner.forward([beside, rows]), torch.cat([whole[:5], alone]))
        for node in range(tree.size):
            chain = tree.token[tree.lineage(node)].tolist()
            assert torch.equal(runner.forward([chain_rows(other, 70, chain)])[0], alone[node])


def test_rows_of_a_sliding_window_read_no_more_than_it(tmp_path: Path) -> None:
    runner = ModelRunner(save("gemma2", FAMILIES["gemma2"], tmp_path), dtype="float32", kv_tokens=128)
    assert runner.max_length == 256
    with leased(runner, 48) as (lease,):
        part = Layout(runner.pool, runner._heads, [chain_rows(lease, 40, [1, 2])], invariant=False).part(0, 2, 0)
    assert {window: group.keys.shape[3] for window, group in part.whole.items()} == {WINDOW: WINDOW + 1, None: 42}


def test_fused_layers_run_inside_a_model_whose_rotations_are_its_own(tmp_path: Path) -> None:
    rotation = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    folder, prompt = save("llama", LLAMA | dict(rope_parameters=rotation), tmp_path), text(20)
    runner = ModelRunner(folder, dtype="float32", kv_tokens=64)
    assert runner._decoder is None
    assert all(isinstance(layer, FusedLayer) for layer in runner.model.model.layers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with leased(runner, 32) as (lease,), torch.inference_mode():
        assert_close(prefill(runner, lease, prompt, chunk=7), model(torch.tensor([prompt])).logits[0])


def test_rotations_that_depend_on_the_length_of_a_text_end_its_context(tmp_path: Path) -> None:
    """Beyond the length a model was first trained for, such rotations turn keys that are written already."""
    rotation = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    settings = LLAMA | dict(rope_parameters=rotation, original_max_position_embeddings=32)
    folder = save("phi3", settings, tmp_path)
    assert ModelRunner(folder, dtype="float32", kv_tokens=64).max_length == 32
    assert context_length(check_checkpoint(folder)) == 32, "what clients are told"
    older = {"rope_scaling": {"type": "su"}, "max_position_embeddings": 4096, "original_max_position_embeddings": 64}
    assert context_length(older) == 64


def test_a_context_that_settings_do_not_name_is_the_one_of_their_kind(tmp_path: Path) -> None:
    """As transformers has it, so that clients are told what the target allows."""
    folder = save("llama", LLAMA, tmp_path)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    del settings["max_position_embeddings"]
    file.write_text(json.dumps(settings))
    told = context_length(check_checkpoint(folder))
    assert told == ModelRunner(folder, dtype="float32", kv_tokens=64).max_length < 10_000
    assert context_length({"model_type": "of several", "text_config": settings}) == told


# what does not


def config_only(folder: Path, **settings: Any) -> Path:
    """Nothing but settings: what is found out from them is found out before weights are looked for."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY} | settings))
    return folder


ONLY_SETTINGS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration has an encoder": dict(
        architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True
    ),
    "ViTForImageClassification is not a causal": dict(architectures=["ViTForImageClassification"], model_type="vit"),
    "LlavaForConditionalGeneration is not a causal": dict(architectures=["LlavaForConditionalGeneration"]),
    "MambaForCausalLM keeps a recurrent state": dict(architectures=["MambaForCausalLM"], model_type="mamba"),
    "RwkvForCausalLM keeps a recurrent state": dict(architectures=["RwkvForCausalLM"], model_type="rwkv"),
    "DeepseekV3ForCausalLM compresses": dict(architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=16),
    "Qwen3NextForCausalLM has layers of other kinds than attention: linear_attention": dict(
        architectures=["Qwen3NextForCausalLM"], layer_types=["linear_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("message", ONLY_SETTINGS)
def test_settings_that_name_a_model_that_cannot_run_are_enough(tmp_path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        ModelRunner(config_only(tmp_path, **ONLY_SETTINGS[message]))
    assert "\n" not in str(error.value)


UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "FalconForCausalLM: it does not use transformers' attention interface": (
        "falcon",
        dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    ),
    "BloomForCausalLM can't run through": (
        "bloom",
        dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2),
    ),
    "OpenAIGPTLMHeadModel asks for attention in 0 of 2 layers": (
        "openai-gpt",
        dict(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2),
    ),
    "BertLMHeadModel has a mask that is neither causal": (
        "bert",
        LLAMA | dict(num_hidden_layers=2, is_decoder=False),
    ),
    "RobertaForCausalLM does not count positions from 0": (
        "roberta",
        LLAMA | dict(num_hidden_layers=2, is_decoder=True),
    ),
    "DiffLlamaForCausalLM has attention that is not one per layer": ("diffllama", LLAMA),
    "Gemma4ForCausalLM has keys and values of several sizes": (
        "gemma4_text",
        LLAMA | dict(head_dim=16, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8),
    ),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")  # libraries comment on some of these models
def test_a_model_that_cannot_run_is_named(tmp_path: Path, message: str) -> None:
    name, settings = UNSUPPORTED[message]
    with pytest.raises(ModelError, match=message) as error:
        ModelRunner(save(name, settings, tmp_path), dtype="float32", kv_tokens=64)
    assert "\n" not in str(error.value)


# options


@needs_compiler
def test_layers_that_are_alike_are_compiled_once_for_any_rows(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    folder = save("llama", LLAMA | dict(num_hidden_layers=3), tmp_path)
    compiled = ModelRunner(folder, dtype="float32", kv_tokens=128, compile=True)
    with leased(compiled, 32) as (lease,):
        for rows in (8, 16, 24):
            compiled.forward([chain_rows(lease, 0, text(rows))])
    assert all(isinstance(layer, FusedLayer) for layer in compiled.model.model.layers)
    assert counted["unique_graphs"] - before == 2, "before and behind the attention"


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # layers that are fused, and others
def test_a_compiled_model_gives_nearly_the_same_logits_and_the_same_bits_in_every_batch(
    name: str, tmp_path: Path
) -> None:
    folder, prompt = save(name, FAMILIES[name] | dict(num_hidden_layers=1), tmp_path), text(20)
    plain = ModelRunner(folder, dtype="float32", kv_tokens=128)
    compiled = ModelRunner(folder, dtype="float32", kv_tokens=128, invariant=True, compile=True)
    with leased(plain, 32) as (lease,), leased(compiled, 32, 32) as (first, second):
        whole = prefill(compiled, first, prompt)
        assert_close(whole, prefill(plain, lease, prompt))
        assert torch.equal(prefill(compiled, second, prompt, chunk=3), whole)
        rows = [chain_rows(first, 20, [5]), chain_rows(second, 20, [6, 7])]
        alone = [compiled.forward([row]) for row in rows]
        assert torch.equal(compiled.forward(rows), torch.cat(alone))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # what was compiled for another model could serve this one too
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/no/such/compiler",))
    folder = save("llama", LLAMA | dict(num_hidden_layers=1), tmp_path)
    with pytest.raises(ModelError, match=r"can't be compiled: LlamaForCausalLM: .*compiler"):
        ModelRunner(folder, dtype="float32", kv_tokens=64, compile=True)


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    folder = save("llama", LLAMA, tmp_path)
    with pytest.raises(ModelError, match="device 'cuda:77' can't be used"):
        ModelRunner(folder, device="cuda:77")
