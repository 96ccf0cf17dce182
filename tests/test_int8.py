"""8-bit weights for drafts: nearly the same model, and the very same output."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.attention import chain_rows
from engine.checkpoint import ModelError
from engine.cpu import Int8Linear, make_linear
from engine.decode import Speculation
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.windows import FixedTree
from tests import exact
from tests.exact import Tokens, differences, make_requests, run

needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM")


def logits(runner: ModelRunner, tokens: Tokens) -> torch.Tensor:
    lease = runner.pool.lease(len(tokens))
    out = runner.forward([chain_rows(lease, 0, tokens, 0)])
    runner.pool.release(lease)
    return out


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_layers_are_rounded_and_compute_nearly_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(2048, 384, generator=generator)
    bias = torch.randn(2048, generator=generator)
    x = torch.randn(8, 384, generator=generator).to(dtype)
    layer = make_linear(weight.to(dtype), bias.to(dtype), "int8")
    assert type(layer) is Int8Linear
    expected = F.linear(x.float(), weight, bias)
    out = layer(x)
    assert out.dtype == dtype
    assert float((out.float() - expected).norm() / expected.norm()) < 0.03
    assert type(make_linear(weight[:64], None, "int8")) is not Int8Linear


@needs_fbgemm
def test_a_recorded_pass_uses_the_rounded_layers(fast_target: ModelRunner, prompts: list[Tokens]) -> None:
    rounded = ModelRunner(exact.TARGET, dtype="float32", kv_tokens=256, weights="int8")
    assert sum(isinstance(module, Int8Linear) for module in rounded.model.modules()) > 2
    expected, out = logits(fast_target, prompts[2]), logits(rounded, prompts[2])
    distance = float((out - expected).norm() / expected.norm())
    assert 0 < distance < 0.1
    assert float((out.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.8


@needs_fbgemm
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rounded_draft_is_invisible_and_guesses_well(
    target: ModelRunner, prompts: list[Tokens], temperature: float
) -> None:
    rounded = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=2048, weights="int8")
    requests = make_requests(prompts[:2], temperature, 16)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    generations = run(target, requests, Speculation(ModelDrafter(rounded), FixedTree(15), 3))
    assert not list(differences(generations, plain))
    assert sum(generation.accepted for generation in generations) > 4


@pytest.mark.parametrize(("options", "reason"), [({"invariant": True}, "invariant"), ({"compile": True}, "compiled")])
def test_where_8_bits_are_not_to_be_had_that_is_said(options: dict[str, bool], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelRunner(Path(exact.DRAFT), weights="int8", invariant="invariant" in options, compile="compile" in options)
