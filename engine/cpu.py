"""Linear layers for speed on CPUs: which kind suits a weight and this machine.

It depends on the weight's shape and values and the number of threads alone: equal software gives equal bits.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine import torch_calls
from engine.choice import Weights
from engine.quantized import WORTH_ROUNDING, PlainLinear, outline
from engine.types import FloatArray

_WORTH_PACKING = 300_000  # weights of a float32 layer; below, oneDNN's overhead per call is more than packing saves
# Weights of a bfloat16 model, times threads; below, one thread with BlockedLinear is faster than those with PackedLinear.
_WORTH_THREADS = 400_000_000
_CACHED = (
    25_000_000  # bytes of a model's weights: more may come from memory for every pass (python -m benchmarks.weights)
)

_MOST_INPUTS = 1 << 16  # of a ByteLinear: more could add up to what int32 doesn't hold

# In TorchScript, since a recording can't call the operation with an empty list from Python.
_ONEDNN: Any = torch.jit.CompilationUnit("""
def linear(x: Tensor, packed: Tensor, bias: Optional[Tensor]) -> Tensor:
    nothing: List[Optional[Union[int, float, complex]]] = []
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", nothing, "")
""")


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is laid out once for oneDNN; `F.linear` does so on every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = outline(weight), bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        out: torch.Tensor = _ONEDNN.linear(x, self.packed, self.bias)
        return out


class HalfLinear(torch.nn.Module):
    """A linear layer that computes in float32 with weights kept in float16: half the bytes to read, the same weights.

    Small models' steps are spent reading weights, and bfloat16 checkpoints fit: see `fits_half`. FBGEMM's kernels are near a
    core's peak from four rows on. At a fixed number of rows a row's bits don't depend on the others or on its place.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = torch.zeros(len(weight)) if bias is None else bias
        with warnings.catch_warnings():  # deprecated in favour of an operation that takes 20 us more per call
            warnings.simplefilter("ignore", UserWarning)
            self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            self(torch.zeros(2, weight.shape[1]))  # it says so once
        self.weight = outline(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


class BlockedLinear(torch.nn.Module):
    """A linear layer in bfloat16 with sums in float32, by oneDNN's kernels alone: on one thread.

    A quarter to a half of PackedLinear's time with few rows, and near a core's peak from four on. Each output is one sum in
    the order of the inputs: a row's bits don't depend on the other rows (known of AVX-512).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else bias.float()
        self.line = torch_calls.NARROW
        self.blocks = torch_calls.blocks_of(self.kept(), self.line)

    def kept(self) -> torch.Tensor:
        """The weight [out_features, in_features] as it is kept in blocks."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], of any dtype, rounded to bfloat16."""
        rows = x.reshape(-1, x.shape[-1]).float().contiguous().numpy()
        out = torch.empty(len(rows), len(self.weight))
        self._multiply(rows, np.uint64(self.blocks.data_ptr()), out.numpy())
        torch_calls.leave()
        out = out.view(*x.shape[:-1], -1)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)

    def _multiply(self, rows: FloatArray, blocks: np.uint64, out: FloatArray) -> None:
        torch_calls.product(rows, blocks, self.line, out)


class ByteLinear(BlockedLinear):
    """A linear layer with weights of 8 bits, one scale for each output, and inputs rounded to 8 bits as they come: half of
    BlockedLinear's bytes, at some accuracy, for drafts.

    Sums are exact: a row's bits don't depend on the other rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.scales = weight.float().abs().amax(1).clamp_min(1e-12) / 127
        super().__init__(weight, bias)
        self.middles = torch_calls.MIDDLE * self.kept().sum(1, dtype=torch.int32)

    def kept(self) -> torch.Tensor:
        """See BlockedLinear; int8."""
        return (self.weight.float() / self.scales[:, None]).round().to(torch.int8)

    def _multiply(self, rows: FloatArray, blocks: np.uint64, out: FloatArray) -> None:
        torch_calls.rounded_product(rows, blocks, self.line, self.scales.numpy(), self.middles.numpy(), out)


def read_in_order(layers: Sequence[BlockedLinear], size: int) -> None:
    """Moves the weights of layers of one kind to one piece of memory, laid out as reading them in this order takes the least
    time; nothing else is kept of them.

    size: bytes of all weights that a pass reads. The first of these layers may be given again, alone: they stay.
    """
    starts = [layer.blocks.data_ptr() for layer in layers]
    ends = [start + layer.blocks.nbytes for start, layer in zip(starts, layers, strict=True)]
    line = torch_calls.WIDE if size > _CACHED else torch_calls.NARROW
    wide = any(layer.line == torch_calls.WIDE for layer in layers)
    if not wide and (line == torch_calls.WIDE or starts[1:] != ends[:-1]):
        _move(layers, line)
    for layer in layers:
        layer.weight = outline(layer.weight)


def _move(layers: Sequence[BlockedLinear], line: int) -> None:
    kind = layers[0].blocks
    sizes = [torch_calls.blocks_of(kind.new_empty(layer.weight.shape, device="meta"), line).numel() for layer in layers]
    whole = kind.new_empty(sum(sizes) + torch_calls.PAGE_BYTES // kind.itemsize)
    first = -whole.data_ptr() % torch_calls.PAGE_BYTES // kind.itemsize
    for layer, part in zip(layers, whole[first : first + sum(sizes)].split(sizes), strict=True):
        layer.line, layer.blocks = line, part.copy_(torch_calls.blocks_of(layer.kept(), line))


class Int8Linear(torch.nn.Module):
    """A linear layer with 8-bit weights, one scale for each output; inputs are rounded to 8 bits as they come, by FBGEMM.

    A quarter of the bytes of float32, at some accuracy: for drafts, where there is no ByteLinear. A row's bits depend on the
    rows beside it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        values = weight.float()
        scales = values.abs().amax(1).clamp_min(1e-12).double() / 127
        offsets = torch.zeros(len(weight), dtype=torch.int64)
        with (
            warnings.catch_warnings()
        ):  # deprecated in favour of torchao, which takes 3 to 6 times as long per call on CPUs
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(values, scales, offsets, 0, torch.qint8)
        self.weight = outline(weight)
        self.packed: Any = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        # Inputs of 7 bits: sums of products of 8 bits overflow on processors without instructions for them.
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(x.float(), self.packed, True)
        return out.to(x.dtype)


def has_fast_bf16(device: str) -> bool:
    """Whether bfloat16 is arithmetic on this device: oneDNN also takes it, many times slower, where it has to emulate it."""
    if device != "cpu":
        return True
    if torch.cpu._is_avx2_supported():  # x86
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def threads_for(weights: int) -> int:
    """How many threads a model in bfloat16 with so many weights is worth."""
    threads = torch.get_num_threads()
    return threads if weights * threads >= _WORTH_THREADS else 1


def _can_block(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and torch_calls.narrow_available()


def _can_be_bytes(weight: torch.Tensor) -> bool:
    fits = weight.shape[1] % 4 == 0 and weight.shape[1] < _MOST_INPUTS
    return weight.dtype == torch.bfloat16 and fits and torch_calls.bytes_available()


def fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds a float32 weight, but for parts of it too small to be seen in float32 sums.

    Those are below 2^-25, and far below the largest number of their row.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    lost = (weight - weight.half().float()).abs().amax(-1)
    return bool((lost <= torch.clamp(2.0**-18 * weight.abs().amax(-1), max=2.0**-25)).all())


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights = "full", threads: int = 1
) -> torch.nn.Module:
    """The faster kind of linear layer for this weight [out_features, in_features] on this machine.

    threads: as many as the model is worth.
    """
    if weights == "int8" and threads == 1 and _can_be_bytes(weight):
        return ByteLinear(weight, bias)
    if weights == "int8" and weight.numel() >= WORTH_ROUNDING:
        return Int8Linear(weight, bias)
    if weight.dtype == torch.float32 and fits_half(weight):
        return HalfLinear(weight, bias)
    if threads == 1 and _can_block(weight):
        return BlockedLinear(weight, bias)
    if weight.dtype == torch.float32:
        packs = weight.numel() >= _WORTH_PACKING
    else:
        packs = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)
