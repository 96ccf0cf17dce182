"""A larger model with the same outputs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import chain_rows
from engine.checkpoint import ModelError
from engine.expand import expand
from engine.runner import ModelRunner
from tests import exact


def logits(model: Path, tokens: list[int]) -> torch.Tensor:
    runner = ModelRunner(model, dtype="float32", kv_tokens=128)
    return runner.forward([chain_rows(runner.pool.lease(len(tokens)), 0, tokens, wanted=0)])


def test_an_expanded_model_is_larger_and_gives_the_same_logits(tmp_path: Path, prompts: list[exact.Tokens]) -> None:
    parameters = expand(exact.DRAFT, 5, tmp_path)
    small = AutoModelForCausalLM.from_pretrained(exact.DRAFT)
    layer = sum(weight.numel() for weight in small.model.layers[0].parameters())
    assert parameters == small.num_parameters() + 3 * layer
    tokens = list(prompts[0][:32])
    assert torch.equal(logits(tmp_path, tokens), logits(exact.DRAFT, tokens))
    assert (tmp_path / "tokenizer.json").read_bytes() == (exact.DRAFT / "tokenizer.json").read_bytes()


def test_a_model_can_be_written_as_it_is(tmp_path: Path) -> None:
    assert expand(exact.DRAFT, 2, tmp_path) == AutoModelForCausalLM.from_pretrained(exact.DRAFT).num_parameters()


def test_a_model_does_not_get_smaller(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 layers already, more than 1"):
        expand(exact.DRAFT, 1, tmp_path)
