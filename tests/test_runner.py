"""ModelRunner: what cannot be loaded says so, rows see their own path, and in invariant mode nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import checkpoint, runner, torch_calls
from engine.attention import Layout, chain_rows
from engine.checkpoint import ModelError
from engine.cpu import ByteLinear, PackedLinear
from engine.fused import is_one_call
from engine.kv import KVPool
from engine.recorded import fused_decoder
from engine.runner import ModelRunner, pick_dtype
from tests import exact
from tests.exact import Tokens
from tests.rows import assert_close, grown, kv_of, leased, prefill, tree_rows

# checkpoints that are none


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add_a_bias(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.bias"] = torch.ones(len(weights["model.layers.1.mlp.up_proj.weight"]))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "it has no config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "cut config": (lambda folder: (folder / "config.json").write_text('{"vocab_size":'), "can't be read"),
    "binary config": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "can't be read"),
    "a number as config": (lambda folder: (folder / "config.json").write_text("5"), "holds no settings"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "no vocabulary": (lambda folder: (folder / "config.json").write_text("{}"), "names no vocab_size"),
    "no model type": (lambda folder: (folder / "config.json").write_text('{"vocab_size": 5}'), "model_type"),
    "unknown model type": (lambda folder: edit(folder, model_type="paceline"), "paceline"),
    "a word as size": (lambda folder: edit(folder, hidden_size="big"), "hidden_size"),
    "odd size": (lambda folder: edit(folder, hidden_size=200), "hidden size"),
    "other vocabulary": (lambda folder: edit(folder, vocab_size=5), "can't be loaded"),
    "more layers than weights": (lambda folder: edit(folder, num_hidden_layers=4), "weights are missing"),
    "a weight is missing": (drop_a_weight, "1 weights are missing, model.layers.1.mlp.up_proj.weight"),
    "a weight is for nothing": (add_a_bias, "1 of its weights are for nothing, model.layers.1.mlp.up_proj.bias"),
    "needs a library": (lambda folder: edit(folder, quantization_config={"quant_method": "gptq", "bits": 4}), "loaded"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "can't be loaded"),
    "garbage as weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 999), "can't be loaded"),
    "cut weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (exact.DRAFT / "model.safetensors").read_bytes()[:-100_000]
        ),
        "can't be loaded",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.filterwarnings("ignore")  # libraries comment on broken files in their own ways
def test_a_broken_checkpoint_is_explained_in_one_line(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exact.DRAFT, folder)
    break_it, reason = BREAKAGES[name]
    break_it(folder)
    with pytest.raises(ModelError, match=reason) as error:
        ModelRunner(folder, dtype="float32", kv_tokens=64)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


# against the model as transformers runs it


@pytest.mark.parametrize("name", ["target", "fast_target"])
def test_logits_are_those_of_transformers(name: str, prompts: list[Tokens], request: pytest.FixtureRequest) -> None:
    runner: ModelRunner = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(runner.path, dtype=torch.float32, local_files_only=True).eval()
    for prompt in prompts[:3]:
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt])).logits[0]
        with leased(runner, len(prompt)) as (lease,):
            assert_close(prefill(runner, lease, prompt), expected)


def test_only_wanted_rows_have_logits(target: ModelRunner) -> None:
    tokens = list(range(5, 15))
    with leased(target, 16, 16, 16) as (first, second, third):
        whole = target.forward([chain_rows(first, 0, tokens, wanted=0)])
        some = target.forward([chain_rows(second, 0, tokens, wanted=8), chain_rows(third, 0, tokens, wanted=10)])
    assert whole.shape == (10, target.vocab_size)
    assert torch.equal(some, whole[8:])


# invariant mode: the same bits


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 64, 100])
def test_decoding_and_prefilling_give_the_same_bits(target: ModelRunner, prompts: list[Tokens], chunk: int) -> None:
    tokens = prompts[0][:70]  # past the first bucket of keys
    with leased(target, 70, 70) as (first, second):
        assert torch.equal(prefill(target, first, tokens, chunk), prefill(target, second, tokens))
        assert torch.equal(kv_of(target.pool, first.slots[:70]), kv_of(target.pool, second.slots[:70]))


@pytest.mark.parametrize("batch", range(2, 9))
def test_the_batch_does_not_change_a_bit(target: ModelRunner, prompts: list[Tokens], batch: int) -> None:
    """Sequences of different lengths, each with a few rows, in any order."""
    lengths = [1, 62, 13, 64, 40, 66, 7, 20][:batch]
    sequences = [prompts[0][i : i + length] for i, length in enumerate(lengths)]
    counts = [1 + i % 3 for i in range(batch)]
    with leased(target, *(length + 4 for length in lengths)) as leases:
        for lease, tokens in zip(leases, sequences, strict=True):
            prefill(target, lease, tokens)
        rows = [
            chain_rows(lease, length, [11, 12, 13][:count], wanted=0)
            for lease, length, count in zip(leases, lengths, counts, strict=True)
        ]
        alone = [target.forward([part]) for part in rows]
        assert torch.equal(target.forward(rows), torch.cat(alone))
        assert torch.equal(target.forward(rows[::-1]), torch.cat(alone[::-1]))


@pytest.mark.parametrize("start", [0, 5, 60])
def test_a_tree_gives_every_path_the_bits_it_has_as_a_chain(
    target: ModelRunner, prompts: list[Tokens], start: int
) -> None:
    tree, prefix = grown(12, seed=start), prompts[0][:start]
    with leased(target, 96, 96) as (lease, other):
        for held in (lease, other):
            if start:
                prefill(target, held, prefix)
        slots = np.random.default_rng(0).permutation(lease.slots[start : start + tree.size])
        logits = target.forward([tree_rows(lease, start, tree, slots)])
        for node in range(tree.size):
            chain = tree.token[tree.lineage(node)].tolist()
            expected = target.forward([chain_rows(other, start, chain)])
            assert torch.equal(logits[node], expected[0])


def test_scattered_pages_give_the_same_bits(target: ModelRunner, prompts: list[Tokens]) -> None:
    tokens = prompts[0][:70]
    with leased(target, 70) as (whole,):
        expected = prefill(target, whole, tokens)
    blocks = [target.pool.lease(32) for _ in range(target.pool.pages - 1)]
    blocks.sort(key=lambda block: block.pages)
    for block in blocks[::2]:
        target.pool.release(block)
    with leased(target, 70) as (scattered,):
        assert scattered.first is None
        assert torch.equal(prefill(target, scattered, tokens), expected)
    for block in blocks[1::2]:
        target.pool.release(block)


def test_what_freed_slots_hold_does_not_change_a_bit(target: ModelRunner, prompts: list[Tokens]) -> None:
    tokens = prompts[0][:40]
    results = []
    for value in (0.0, 1e4):
        target.pool.data.fill_(value)
        with leased(target, 40) as (lease,):
            results.append(prefill(target, lease, tokens))
    target.pool.data.zero_()
    assert torch.equal(*results)


# the fast mode: nearly the same numbers


@pytest.mark.parametrize("name", ["fast_target", "draft"])
def test_recorded_passes_have_the_bits_of_the_model_they_were_recorded_from(
    name: str, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    runner: ModelRunner = request.getfixturevalue(name)
    pool = KVPool(runner.layers, runner._heads.kv, runner._heads.dim, 256, runner.dtype)
    decoder = fused_decoder(runner.model, pool, runner._heads)
    assert decoder is not None
    monkeypatch.setattr(runner, "_decoder", decoder)
    monkeypatch.setattr(runner, "pool", pool)
    recorded = decoder._whole
    calls: list[tuple[int, bool]] = []

    def counted(kind: tuple[int, bool]) -> Callable[..., torch.Tensor]:
        def call(*inputs: torch.Tensor) -> torch.Tensor:
            calls.append(kind)
            states: torch.Tensor = recorded[kind](*inputs)
            return states

        return call

    tree = grown(9, seed=3)
    with leased(runner, 64, 64, 64) as (lease, other, third):
        prefill(runner, lease, prompts[0][:40])
        batches = [  # keys in place or gathered, under a mask or all visible
            [tree_rows(lease, 40, tree, lease.slots[40 : 40 + tree.size])],
            [tree_rows(lease, 40, tree, other.slots[: tree.size])],
            [chain_rows(lease, 40, [5])],
            [tree_rows(lease, 40, grown(0, seed=0), other.slots[:1])],
            [chain_rows(lease, 40, [5]), tree_rows(third, 0, tree, third.slots[: tree.size])],
        ]
        monkeypatch.setattr(decoder, "_whole", {kind: counted(kind) for kind in recorded})
        replayed = [runner.forward(batch) for batch in batches]
        assert calls == [(5, True), (1, True), (5, False), (1, False)]

        def compute(tokens: torch.Tensor, positions: torch.Tensor, layout: Layout, span: tuple[int, int, int]) -> Any:
            return decoder.compute(tokens, positions, layout.part(*span))

        monkeypatch.setattr(runner, "_decoder", compute)
        for batch, logits in zip(batches, replayed, strict=True):
            assert torch.equal(runner.forward(batch), logits)


def test_fast_and_invariant_logits_are_close(
    target: ModelRunner, fast_target: ModelRunner, prompts: list[Tokens]
) -> None:
    tokens = prompts[0][:70]
    with leased(target, 70) as (lease,), leased(fast_target, 70) as (fast_lease,):
        expected = prefill(target, lease, tokens)
        assert_close(prefill(fast_target, fast_lease, tokens), expected)


def test_a_tree_in_a_batch_is_close_to_its_chains(fast_target: ModelRunner, prompts: list[Tokens]) -> None:
    tree, prefix = grown(20, seed=1), prompts[0][:30]
    with leased(fast_target, 64, 64, 64) as (lease, other, third):
        for held in (lease, other, third):
            prefill(fast_target, held, prefix)
        slots = lease.slots[30 : 30 + tree.size][::-1].copy()
        beside = chain_rows(third, 30, [5, 6, 7], wanted=0)
        logits = fast_target.forward([beside, tree_rows(lease, 30, tree, slots)])
        assert_close(logits[:3], fast_target.forward([beside]))
        for node in range(tree.size):
            chain = tree.token[tree.lineage(node)].tolist()
            expected = fast_target.forward([chain_rows(other, 30, chain)])
            assert_close(logits[3 + node], expected[0])


def test_rows_beyond_the_largest_bucket_are_computed(fast_target: ModelRunner, prompts: list[Tokens]) -> None:
    tokens = [token for prompt in prompts for token in prompt][:260]
    with leased(fast_target, 260, 260) as (first, second):
        whole = prefill(fast_target, first, tokens, chunk=260)
        assert_close(whole, prefill(fast_target, second, tokens, chunk=52))


def test_rows_are_rounded_up_to_buckets_where_a_model_makes_something_of_each_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_calls, "available", lambda: False)
    bfloat16 = ModelRunner(exact.TARGET, dtype="bfloat16", kv_tokens=64)
    rows = [0, 1, 9, 16, 17, 64, 65, 240, 241]
    assert [bfloat16.called_with(count) for count in rows] == [0, 2, 12, 16, 24, 64, 80, 240, 256]


def test_a_compiled_pass_computes_no_rows_in_vain(fast_target: ModelRunner) -> None:
    assert [fast_target.called_with(count) for count in (0, 2, 3, 17, 241)] == [0, 2, 3, 17, 241]
    assert fast_target.called_with(1) in (1, 2)


# smaller things


def test_packed_linears_compute_the_same_for_any_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((640, 512), (640,), (40, 512)))
    packed = PackedLinear(weight, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    for rows in (1, 2, 7, 40):
        torch.testing.assert_close(packed(x[:rows]), expected[:rows], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "device", "hidden_size", "dtype"),
    [
        ("float32", "cpu", 4096, torch.float32),
        ("float32", "cuda", 4096, torch.float32),
        ("bfloat16", "cpu", 64, torch.bfloat16),
        ("auto", "cuda", 64, torch.bfloat16),
        ("auto", "cpu", 64, torch.float32),
    ],
)
def test_the_dtype_is_what_was_asked_for_or_what_pays(
    name: Any, device: str, hidden_size: int, dtype: torch.dtype
) -> None:
    assert pick_dtype(name, device, hidden_size) == dtype


@pytest.mark.parametrize(
    ("hidden_size", "one_call", "dtype"),
    [(1023, False, torch.float32), (1024, False, torch.bfloat16), (64, True, torch.bfloat16)],
)
def test_bfloat16_is_for_large_models_and_compiled_passes_where_cpus_compute_in_it(
    hidden_size: int, one_call: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "has_fast_bf16", lambda device: True)
    assert pick_dtype("auto", "cpu", hidden_size, one_call) == dtype
    monkeypatch.setattr(runner, "has_fast_bf16", lambda device: False)
    assert pick_dtype("auto", "cpu", hidden_size, one_call) == torch.float32


@pytest.mark.parametrize(
    ("changes", "one_call"),
    [
        ({}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, False),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": False}, True),
        ({"architectures": ["Gemma2ForCausalLM"]}, False),
        ({"rope_parameters": {"rope_type": "dynamic"}}, False),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, False),
        ({"rope_parameters": None, "rope_scaling": "linear"}, False),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, True),
        ({"hidden_act": "gelu"}, False),
        ({"quantization_config": {}}, False),
        ({"architectures": None}, False),
    ],
)
def test_which_checkpoints_are_one_compiled_call_in_bfloat16(
    changes: dict[str, Any], one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_calls, "narrow_available", lambda: True)
    values = json.loads((exact.TARGET / "config.json").read_text())
    assert is_one_call(values | changes, {"BF16": 10**6}) == one_call
    assert not is_one_call(values | changes, {"BF16": 10**6, "F32": 1}), "it would be rounded"
    assert not is_one_call(values | changes, {})


def test_large_models_take_all_threads_which_one_compiled_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "narrow_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    values = json.loads((exact.TARGET / "config.json").read_text())
    assert is_one_call(values, {"BF16": 10**8})
    assert not is_one_call(values, {"BF16": 10**9})


def test_the_types_of_weights_are_read_from_their_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3).bfloat16(), "b": torch.zeros(5)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(4)}, tmp_path / "two.safetensors", {"format": "pt"})
    assert checkpoint.stored_numbers(tmp_path) == {"BF16": 6, "F32": 9}
    (tmp_path / "three.safetensors").symlink_to(tmp_path / "nowhere")
    assert checkpoint.stored_numbers(tmp_path) == {}


@pytest.mark.skipif(not torch_calls.narrow_available(), reason="bfloat16 is emulated")
def test_what_is_taken_for_one_compiled_call_is_one() -> None:
    made = ModelRunner(exact.TARGET, kv_tokens=64)
    assert made.dtype == torch.bfloat16
    assert made.choosing is not None


@pytest.mark.parametrize("multiplies_bytes", [True, False])
def test_weights_have_8_bits_by_themselves_where_that_is_faster(
    multiplies_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if multiplies_bytes and not torch_calls.bytes_available():
        pytest.skip("this processor doesn't multiply bytes")
    monkeypatch.setattr(torch_calls, "bytes_available", lambda: multiplies_bytes)

    def made(**options: Any) -> tuple[torch.dtype, bool]:
        model = ModelRunner(exact.DRAFT, kv_tokens=64, **options)
        return model.dtype, any(isinstance(module, ByteLinear) for module in model.model.modules())

    auto = ModelRunner(exact.DRAFT, kv_tokens=64).dtype
    assert made(weights="auto") == (auto, multiplies_bytes)
    assert made(weights="int8") == (torch.bfloat16 if multiplies_bytes else torch.float32, multiplies_bytes)
    assert made(weights="full") == (auto, False)
    assert made(weights="auto", dtype="float32") == made(weights="int8", dtype="float32") == (torch.float32, False)
    assert made(weights="auto", invariant=True) == (auto, False)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({"hidden_size": 384}, 384),
        ({"hidden_size": None, "n_embd": 768}, 768),
        ({"text_config": {"hidden_size": 64}, "hidden_size": 2}, 64),
        ({"hidden_size": "large"}, 0),
        ({}, 0),
    ],
)
def test_the_size_between_layers_is_read_from_the_configuration(values: dict[str, Any], size: int) -> None:
    assert checkpoint.hidden_size(values) == size


def test_a_chain_is_at_consecutive_positions_and_sees_what_came_before(target: ModelRunner) -> None:
    with leased(target, 40) as (lease,):
        rows = chain_rows(lease, 30, [1, 2, 3])
        assert list(rows.positions) == [30, 31, 32]
        assert rows.slots.tolist() == lease.slots[30:33].tolist()
        assert rows.visible.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
        assert (rows.prefix, rows.wanted) == (30, 2)
