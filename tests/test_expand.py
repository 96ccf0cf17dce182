"""A larger model with the same outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import chain_rows
from engine.checkpoint import ModelError
from engine.decode import decode
from engine.expand import expand
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams
from tests import exact
from tests.families import FAMILIES, save


def logits(model: Path, tokens: list[int]) -> torch.Tensor:
    runner = ModelRunner(model, dtype="float32", kv_tokens=128)
    return runner.forward([chain_rows(runner.pool.lease(len(tokens)), 0, tokens, wanted=0)])


def test_an_expanded_model_is_larger_and_gives_the_same_logits(tmp_path: Path, prompts: list[exact.Tokens]) -> None:
    parameters = expand(exact.DRAFT, 6, tmp_path)
    small = AutoModelForCausalLM.from_pretrained(exact.DRAFT)
    layer = sum(weight.numel() for weight in small.model.layers[0].parameters())
    assert parameters == small.num_parameters() + 3 * layer
    tokens = list(prompts[0][:32])
    assert torch.equal(logits(tmp_path, tokens), logits(exact.DRAFT, tokens))
    assert (tmp_path / "tokenizer.json").read_bytes() == (exact.DRAFT / "tokenizer.json").read_bytes()


def test_a_model_can_be_written_as_it_is(tmp_path: Path) -> None:
    assert expand(exact.DRAFT, 3, tmp_path) == AutoModelForCausalLM.from_pretrained(exact.DRAFT).num_parameters()


def test_a_model_does_not_get_smaller(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="3 layers already, more than 1"):
        expand(exact.DRAFT, 1, tmp_path)


def test_a_model_is_not_written_over_itself(tmp_path: Path) -> None:
    model = save("llama", FAMILIES["llama"], tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ModelError, match="holds a checkpoint that this is made from"):
        expand(model, 9, tmp_path / "no" / ".." / "model")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt", "phi3", "smollm3"])
def test_families_give_the_same_greedy_text(tmp_path: Path, name: str) -> None:
    small = save(name, FAMILIES[name], tmp_path / "small")
    expand(small, 9, tmp_path / "large")
    prompts = [tuple(range(3, 3 + length)) for length in (1, 12)]
    expected = exact.transformers_greedy(small, prompts, 16)
    assert exact.transformers_greedy(tmp_path / "large", prompts, 16) == expected
    requests = [GenerationRequest(str(i), prompt, SamplingParams(max_tokens=16)) for i, prompt in enumerate(prompts)]
    runner = ModelRunner(tmp_path / "large", dtype="float32", kv_tokens=256)
    assert [generation.tokens for generation in decode(runner, requests)] == expected


def test_a_wider_model_is_larger_and_gives_the_same_logits(tmp_path: Path, prompts: list[exact.Tokens]) -> None:
    expand(exact.DRAFT, 3, tmp_path, hidden_size=576, intermediate_size=1024)
    layer = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[2]
    assert layer.mlp.down_proj.weight.shape == (576, 1024)
    assert layer.self_attn.q_proj.weight.shape == (576, 576)
    assert layer.self_attn.k_proj.weight.shape == (192, 576)
    tokens = list(prompts[0][:32])
    torch.testing.assert_close(logits(tmp_path, tokens), logits(exact.DRAFT, tokens))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_wider_families_give_the_same_greedy_text(tmp_path: Path, name: str) -> None:
    small = save(name, FAMILIES[name], tmp_path / "small")
    wide = dict(intermediate_size=288) if name == "gemma2" else dict(hidden_size=128)  # it scales by the hidden size
    expand(small, 4, tmp_path / "large", **wide)
    prompts = [tuple(range(3, 3 + length)) for length in (1, 12)]
    expected = exact.transformers_greedy(small, prompts, 16)
    assert exact.transformers_greedy(tmp_path / "large", prompts, 16) == expected


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 100, "no multiple of the model's own, 64"),
        ("gemma2", 128, "more width changes the output of Gemma2ForCausalLM"),
        ("phi3", 128, "more width changes the output of Phi3ForCausalLM"),  # queries, keys and values in one
        ("mixtral", 128, "MixtralForCausalLM has weights that are widened in another way"),
    ],
)
def test_a_width_that_cannot_be_had_is_named(tmp_path: Path, name: str, size: int, reason: str) -> None:
    small = save(name, FAMILIES[name], tmp_path / "small")
    with pytest.raises(ModelError, match=reason):
        expand(small, 4, tmp_path / "large", hidden_size=size)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral", {}, "MixtralForCausalLM has no layers"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "change the output of GPT2LMHeadModel"),
        ("opt", {"do_layer_norm_before": False}, "change the output of OPTForCausalLM"),
    ],
)
def test_a_model_that_cannot_be_expanded_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    small = save(name, FAMILIES[name] | changes, tmp_path / "small")
    with pytest.raises(ModelError, match=reason):
        expand(small, 6, tmp_path / "large")
    assert not (tmp_path / "large").exists()
