"""Weights of 8 and 4 bits for drafts: nearly the same model, and the very same output."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from engine.attention import chain_rows
from engine.checkpoint import ModelError
from engine.choice import Weights
from engine.cpu import Int8Linear, make_linear
from engine.decode import Speculation
from engine.drafters.model import ModelDrafter
from engine.fused import speed_up
from engine.probe import Unsupported
from engine.quantized import Int4Weights, Int8Weights, PlainLinear, in_pairs, why_not
from engine.runner import ModelRunner
from engine.windows import FixedTree
from tests import exact
from tests.exact import Tokens, differences, make_requests, run
from tests.rows import leased

needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM")


def logits(runner: ModelRunner, tokens: Tokens) -> torch.Tensor:
    lease = runner.pool.lease(len(tokens))
    out = runner.forward([chain_rows(lease, 0, tokens, 0)])
    runner.pool.release(lease)
    return out


def near(out: torch.Tensor, expected: torch.Tensor, distance: float) -> None:
    """Nearly the same logits, but not the same ones."""
    assert 0 < float((out - expected).norm() / expected.norm()) < distance
    assert float((out.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.8


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_layers_are_rounded_and_compute_nearly_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(2048, 384, generator=generator)
    bias = torch.randn(2048, generator=generator)
    x = torch.randn(8, 384, generator=generator).to(dtype)
    layer = Int8Linear(weight.to(dtype), bias.to(dtype))
    expected = F.linear(x.float(), weight, bias)
    out = layer(x)
    assert out.dtype == dtype
    assert float((out.float() - expected).norm() / expected.norm()) < 0.03
    assert type(make_linear(weight, None, "int8")) is Int8Linear
    assert type(make_linear(weight[:64], None, "int8")) is not Int8Linear


@needs_fbgemm
def test_a_recorded_pass_uses_the_rounded_layers(fast_target: ModelRunner, prompts: list[Tokens]) -> None:
    rounded = ModelRunner(exact.TARGET, dtype="float32", kv_tokens=256, weights="int8")
    assert sum(isinstance(module, Int8Linear) for module in rounded.model.modules()) > 2
    expected, out = logits(fast_target, prompts[2]), logits(rounded, prompts[2])
    near(out, expected, 0.1)
    with leased(rounded, 32, 32) as leases:
        together = rounded.forward([chain_rows(lease, 0, prompts[2][:20], 0) for lease in leases])
    near(together, torch.cat([expected[:20]] * 2), 0.1)


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


@pytest.mark.parametrize("kind", [Int8Weights, Int4Weights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 40])
def test_the_layers_for_gpus_compute_nearly_the_same(
    kind: type[Int8Weights | Int4Weights], dtype: torch.dtype, rows: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(256, 384, generator=generator)
    weight[3], weight[7, :64] = 0, 0.25  # nothing to scale by, and no range
    bias = torch.randn(256, generator=generator)
    x = torch.randn(2, rows // 2, 384, generator=generator).to(dtype)
    layer = kind(weight.to(dtype), bias.to(dtype))
    expected = F.linear(x.float(), weight, bias)
    out = layer(x)
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    assert float((out.float() - expected).norm() / expected.norm()) < (0.02 if kind is Int8Weights else 0.1)
    assert torch.equal(kind(weight.to(dtype), None)(x) + bias.to(dtype), out)
    columns = x.reshape(-1, 384).T.contiguous().T.view_as(x)  # the same values, in another order in memory
    assert torch.equal(layer(columns), out)


def test_two_levels_of_4_bits_make_a_byte() -> None:
    levels = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert in_pairs(levels).tolist() == [[0x12, 0xF0]]


@pytest.mark.parametrize(("weights", "distance"), [("int8", 0.1), ("int4", 0.4)])
def test_large_layers_of_a_model_for_gpus_are_replaced(
    weights: Weights, distance: float, prompts: list[Tokens]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(exact.TARGET, dtype=torch.bfloat16)
    tokens = torch.tensor([prompts[2]])
    with torch.inference_mode():
        expected = model(tokens).logits[0].float()
        speed_up(model, False, weights, for_cpu=False, join=False)
        out = model(tokens).logits[0].float()
    kinds = {type(module).__name__ for module in (model.lm_head, model.model.layers[0].mlp.down_proj)}
    assert kinds == {"Int8Weights" if weights == "int8" else "Int4Weights"}
    assert type(model.model.layers[0].self_attn.o_proj) is PlainLinear
    near(out, expected, distance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("weights", "distance"), [("int8", 0.1), ("int4", 0.5)])
def test_rounded_weights_on_a_gpu(weights: Weights, distance: float, prompts: list[Tokens]) -> None:
    runners = [
        ModelRunner(exact.TARGET, device="cuda", dtype="bfloat16", kv_tokens=256, weights=kind)
        for kind in ("auto", weights)
    ]
    expected, out = (logits(runner, prompts[2]) for runner in runners)
    near(out, expected, distance)


def test_where_rounded_weights_are_not_to_be_had_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="int8 weights in invariant mode"):
        ModelRunner(Path(exact.DRAFT), weights="int8", invariant=True)
    with pytest.raises(ModelError, match="weights int4: only on GPUs"):
        ModelRunner(Path(exact.DRAFT), weights="int4")
    with pytest.raises(ModelError, match="weights int8: not compiled on CPUs"):
        ModelRunner(Path(exact.DRAFT), weights="int8", compile=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not("int4", "cuda", invariant=False) == "on device 'cuda', whose compute capability is below 8.0"
    assert not why_not("int8", "cuda", invariant=False)
    assert why_not("int8", "mps", invariant=False) == "on device 'mps', only on CPUs and CUDA"
    with pytest.raises(Unsupported, match="has no layers that int4 weights suit"):
        speed_up(torch.nn.Sequential(torch.nn.Linear(1000, 1000)), False, "int4", for_cpu=False)
