"""Linear layers on CPUs: which kind a weight gets, and that it computes what the layer did."""

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from engine import cpu, torch_calls
from engine.attention import chain_rows
from engine.cpu import (
    BlockedLinear,
    ByteLinear,
    HalfLinear,
    PackedLinear,
    fits_half,
    make_linear,
    read_in_order,
)
from engine.fused import FusedNorm
from engine.quantized import PlainLinear
from engine.runner import ModelRunner
from engine.torch_calls import NARROW, PAGE_BYTES, WIDE
from tests import exact

HALF = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not HALF, reason="needs FBGEMM")
needs_bytes = pytest.mark.skipif(
    not torch_calls.bytes_available(), reason="needs a processor that multiplies bytes, and computes in bfloat16"
)
needs_bf16 = pytest.mark.skipif(
    not torch_calls.narrow_available(),
    reason="needs a processor that computes in bfloat16",
)


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_fbgemm
def test_weights_of_bfloat16_checkpoints_fit_and_others_do_not() -> None:
    assert fits_half(weight(64, 64).bfloat16().float())
    assert not fits_half(weight(64, 64))
    assert not fits_half(torch.full((2, 2), 1e6))
    assert fits_half(torch.tensor([[1.0, 2.0**-30]])), "too small to matter"
    assert not fits_half(torch.full((2, 2), 2.0**-30)), "a row of such numbers says something"


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("shape", [(640, 384), (2048, 384), (48, 32)])
@pytest.mark.parametrize("biased", [True, False])
def test_every_kind_of_layer_computes_the_same(rounded: bool, shape: tuple[int, int], biased: bool) -> None:
    given = weight(*shape).bfloat16().float() if rounded else weight(*shape)
    bias = weight(shape[0], seed=1) if biased else None
    layer = make_linear(given, bias)
    expected: type[torch.nn.Module] = PackedLinear if given.numel() >= 300_000 else PlainLinear
    assert type(layer) is (HalfLinear if rounded and HALF else expected)
    for rows in (2, 3, 8, 17):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(layer(x), F.linear(x, given, bias), rtol=1e-4, atol=1e-4)


@needs_fbgemm
def test_at_a_fixed_number_of_rows_neither_place_nor_neighbours_change_a_bit() -> None:
    layer = make_linear(weight(2048, 384).bfloat16().float(), None)
    row = torch.randn(384, generator=torch.Generator().manual_seed(1))
    for rows in (2, 8, 16):
        seen = []
        for place in range(rows):
            x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(place))
            x[place] = row
            seen.append(layer(x)[place])
        assert all(torch.equal(each, seen[0]) for each in seen)


@needs_bf16
@pytest.mark.parametrize("shape", [(640, 384), (2048, 384), (384, 1024), (97, 34), (1100, 96), (70, 4096)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("cached", [0, 10**9])
def test_a_layer_in_bfloat16_rounds_its_input_alone(
    shape: tuple[int, int], biased: bool, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CACHED", cached)
    given, bias = weight(*shape).bfloat16(), weight(shape[0], seed=1).bfloat16() if biased else None
    layer = make_linear(given, bias)
    assert isinstance(layer, BlockedLinear)
    read_in_order([layer], layer.weight.nbytes)
    x = torch.randn(210, shape[1], generator=torch.Generator().manual_seed(2))
    whole = layer(x)
    expected = F.linear(x.bfloat16().double(), given.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for rows in (1, 2, 5, 32, 33, 48, 64, 65, 80, 81, 130, 192, 193, 209):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    assert torch.equal(layer(x.view(7, 30, -1)).view(210, -1), whole)
    assert torch.equal(layer(x.bfloat16()), whole.bfloat16())


@needs_bytes
@pytest.mark.parametrize("shape", [(640, 384), (2048, 384), (384, 1024), (97, 36), (1100, 96), (70, 4096)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("cached", [0, 10**9])
def test_a_layer_of_bytes_rounds_its_weights_and_inputs_alone(
    shape: tuple[int, int], biased: bool, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CACHED", cached)
    given, bias = weight(*shape).bfloat16(), weight(shape[0], seed=1).bfloat16() if biased else None
    given[3] = 0  # nothing to scale by
    layer = make_linear(given, bias, "int8")
    assert type(layer) is ByteLinear
    read_in_order([layer], layer.blocks.nbytes)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-127, 128, (210, shape[1]), generator=generator) / 16
    x[:, 7], x[5] = 127 / 16, 0  # so that they are levels already
    whole = layer(x)
    scales = given.float().abs().amax(1).clamp_min(1e-12) / 127
    rounded = (given / scales[:, None]).round().double() * scales[:, None]
    torch.testing.assert_close(whole.double(), F.linear(x.double(), rounded, None if bias is None else bias.double()))
    x = torch.randn(210, shape[1], generator=generator)
    whole, exact = layer(x), F.linear(x, given.float(), None if bias is None else bias.float())
    assert 0 < (whole - exact).norm() < 0.02 * exact.norm()
    for rows in (1, 2, 5, 32, 33, 48, 64, 65, 80, 81, 130, 192, 193, 209):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    assert torch.equal(layer(x.view(7, 30, -1)).view(210, -1), whole)


@needs_bytes
@pytest.mark.parametrize("rows", [1, 3])
def test_the_bits_of_a_layer_of_bytes_are_those_of_its_formula(rows: int) -> None:
    """So that they are the same wherever compilers make it part of something else."""
    layer, x = make_linear(weight(4096, 256).bfloat16(), None, "int8"), torch.randn(rows, 256)
    assert isinstance(layer, ByteLinear)
    most = x.abs().amax(1, keepdim=True)
    levels = (x * (127 / most) + 128.5).to(torch.int32)
    sums = (levels - torch_calls.MIDDLE) @ layer.kept().int().T
    torch.testing.assert_close(layer(x), sums.float() * (most / 127 * layer.scales), rtol=0, atol=0)


@needs_bytes
def test_a_layer_of_bytes_says_what_is_no_number() -> None:
    layer, x = make_linear(weight(64, 32).bfloat16(), None, "int8"), torch.randn(3, 32)
    expected = layer(x)
    for nan in (torch.nan, -torch.nan, torch.inf):
        x[1, 7] = nan
        out = layer(x)
        assert not out[1].isfinite().any()
        assert torch.equal(out[::2], expected[::2])
    broken = weight(64, 32).bfloat16()
    broken[5, 3] = torch.nan
    out = make_linear(broken, None, "int8")(torch.randn(3, 32))
    assert out.isfinite().all(0).tolist() == [output != 5 for output in range(64)]


@needs_bf16
@pytest.mark.parametrize(("worth", "kind"), [(0, PackedLinear), (10**9, BlockedLinear)])
def test_layers_of_large_models_in_bfloat16_use_several_threads(
    worth: int, kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "_WORTH_THREADS", worth)
    runner = ModelRunner(exact.DRAFT, dtype="bfloat16", kv_tokens=64)
    assert any(type(module) is kind for module in runner.model.modules())


@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_where_onednn_has_no_kernels_for_bfloat16_others_compute(limit: str) -> None:
    """Asked for them, it would end the process."""
    code = (
        "from engine.attention import chain_rows; from engine.runner import ModelRunner; from tests import exact;"
        "runner = ModelRunner(exact.DRAFT, dtype='bfloat16', kv_tokens=64); lease = runner.pool.lease(3);"
        "print(runner.forward([chain_rows(lease, 0, [5, 6, 7])]).shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit}, stdout=PIPE)
    assert (run.returncode, run.stdout) == (0, b"torch.Size([1, 4096])\n")


@needs_bf16
@pytest.mark.parametrize("cached", [0, 10**9])
@pytest.mark.parametrize("kind", [BlockedLinear, pytest.param(ByteLinear, marks=needs_bytes)])
def test_weights_that_are_read_in_order_lie_in_order(
    kind: type[BlockedLinear], cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CACHED", cached)
    layers = [kind(weight(*shape).bfloat16(), None) for shape in ((64, 32), (97, 64), (1100, 96))]
    x = [torch.randn(3, layer.weight.shape[1]) for layer in layers]
    before = [layer(each) for layer, each in zip(layers, x, strict=True)]
    for count in (3, 3, 2):  # the last two times they are in order already
        read_in_order(layers[:count], 1)
        first, *others = [layer.blocks.data_ptr() for layer in layers]
        sizes = [layer.blocks.nbytes for layer in layers]
        assert first % PAGE_BYTES == 0
        assert others == [first + sizes[0], first + sizes[0] + sizes[1]]
        assert {layer.line for layer in layers} == {NARROW if cached else WIDE}
        assert not any(layer.weight.stride(0) for layer in layers[:count]), "a weight is there twice"
    for layer, each, out in zip(layers, x, before, strict=True):
        torch.testing.assert_close(layer(each), out, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_that_does_not_fit_half_runs_too(tmp_path: Path) -> None:
    """Its layers are packed by oneDNN, and recorded like the others."""
    model = AutoModelForCausalLM.from_pretrained(exact.TARGET, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", kv_tokens=128)
    assert any(isinstance(module, PackedLinear) for module in runner.model.modules())
    assert not any(isinstance(module, HalfLinear) for module in runner.model.modules())
    tokens = list(range(5, 45))
    lease = runner.pool.lease(len(tokens))
    logits = runner.forward([chain_rows(lease, 0, tokens, 0)])
    runner.pool.release(lease)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("features", [192, 384, 100])
def test_a_norm_is_that_of_the_model_and_a_row_has_the_same_bits_wherever_it_stands(features: int) -> None:
    generator = torch.Generator().manual_seed(features)
    scale = torch.rand(features, generator=generator)
    norm = FusedNorm(scale, 1e-5)
    for size in (1e-6, 1e-3, 1.0, 1e3):  # with the smallest, most of the divisor is what is added to it
        row = size * torch.randn(features, generator=generator)
        out = norm(row.expand(41, -1))
        torch.testing.assert_close(out[0], F.rms_norm(row, [features], scale, 1e-5), rtol=1e-6, atol=1e-9)
        assert all(torch.equal(other, out[0]) for other in out[1:])
        assert torch.equal(norm(row.expand(2, -1))[0], out[0])
