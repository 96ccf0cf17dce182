"""Kinds of linear layers for GPUs. Weights of fewer bits are for drafts: nearly the same model, in less memory, and with
fewer bytes to read in each step.

The kernels are torch's own; on CPUs, in float32, FBGEMM is many times as fast: see engine.cpu.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from engine.choice import Weights

WORTH_ROUNDING = 300_000  # weights of a layer; below, little is saved, on CPUs less than rounding the inputs takes
_AT_ONCE = 4096  # outputs of a layer that are rounded together: in between they take several times the memory
_GROUP = 64  # 4-bit weights that share a scale; inputs come in multiples of it
_OUTPUTS = 16  # and outputs in multiples of this
_TENSOR_CORES = (8, 0)  # the compute capability that the kernel for 4-bit weights needs


def why_not(weights: Weights, device: str, invariant: bool) -> str:
    """Why this machine can't have such weights, as the end of a sentence; empty where it can."""
    if weights == "full":
        return ""
    if invariant:
        return "in invariant mode: a row's bits depend on the rows beside it"
    if device == "cpu":
        fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        return "" if fbgemm else "with this torch, which was built without FBGEMM"
    if not device.startswith("cuda"):
        return f"on device {device!r}, only on CPUs and CUDA"
    if weights == "int4" and torch.cuda.get_device_capability(device) < _TENSOR_CORES:
        return f"on device {device!r}, whose compute capability is below {_TENSOR_CORES[0]}.{_TENSOR_CORES[1]}"
    return ""


class PlainLinear(torch.nn.Module):
    """A linear layer as torch computes it. Buffers, as below: a compiler takes their sizes for constant."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        return F.linear(x, self.weight, self.bias)


def outline(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight that a layer keeps in a layout of its own: others ask for its shape, dtype and device.

    It takes no memory; who computes with it gets nothing.
    """
    return weight.new_full((1,), torch.nan).expand(weight.shape)


class Rounded(torch.nn.Module, ABC):
    """What both kinds of rounded layers have."""

    bias: torch.Tensor | None
    levels: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        parts = [self._round(part.float(), weight.dtype) for part in weight.split(_AT_ONCE)]
        levels, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        levels, scales = self._lay_out(levels, scales)
        for name, value in (("levels", levels), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, value, persistent=False)
        self.weight = outline(weight)

    @abstractmethod
    def _round(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels and scales of some outputs; dtype: of the scales."""

    def _lay_out(self, levels: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the kernel wants them."""
        return levels, scales

    @abstractmethod
    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, in_features], contiguous; returns [n, out_features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        out = self._product(x.reshape(-1, x.shape[-1]).contiguous())
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


class Int8Weights(Rounded):
    """A linear layer with 8-bit weights, one scale for each output; inputs stay as they are.

    It saves memory, and time at most where a compiler joins the conversion to the product. Torch's own kernel for such
    weights on GPUs had one thread for each output when this was written, so all weights are converted. Neither was measured.
    """

    def _round(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scales = weight.abs().amax(1).clamp_min(1e-12) / 127
        return (weight / scales[:, None]).round().to(torch.int8), scales.to(dtype)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.levels.to(rows.dtype)) * self.scales


class Int4Weights(Rounded):
    """A linear layer with 4-bit weights, of which 64 of one output share a scale and a middle; inputs stay as they are."""

    def _round(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        groups = weight.view(len(weight), -1, _GROUP)
        least, most = groups.amin(-1), groups.amax(-1)
        # As they are kept, or the levels would lie elsewhere than the weights were rounded to.
        scales = ((most - least) / 15).clamp_min(1e-6).to(dtype).float()
        middles = (least + 8 * scales).to(dtype).float()
        levels = ((groups - middles[..., None]) / scales[..., None] + 8).round().clamp(0, 15)
        return levels.view_as(weight).to(torch.uint8), torch.stack([scales, middles], -1).to(dtype)

    def _lay_out(self, levels: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = 8 if levels.shape[1] % 128 == 0 else 4  # of 16 inputs each
        if levels.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32), tiles)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack(in_pairs(levels), tiles)
        return packed, scales.transpose(0, 1).contiguous()

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        cpu = rows.device.type == "cpu"
        kernel: Any = torch.ops.aten._weight_int4pack_mm_for_cpu if cpu else torch.ops.aten._weight_int4pack_mm
        out: torch.Tensor = kernel(rows, self.levels, _GROUP, self.scales)
        return out


def in_pairs(levels: torch.Tensor) -> torch.Tensor:
    """Levels of 4 bits, two to a byte [n, k / 2]: the first is in the upper half."""
    return levels[:, ::2] << 4 | levels[:, 1::2]


def make_device_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights) -> torch.nn.Module:
    """A linear layer for this weight [out_features, in_features]; a small one is not rounded.

    Neither is one whose sizes the kernel for 4-bit weights can't take.
    """
    if weights == "full" or not _suits(weight, weights):
        return PlainLinear(weight, bias)
    return Int8Weights(weight, bias) if weights == "int8" else Int4Weights(weight, bias)


def _suits(weight: torch.Tensor, weights: Weights) -> bool:
    tiled = weight.shape[1] % _GROUP == 0 and weight.shape[0] % _OUTPUTS == 0
    return weight.numel() >= WORTH_ROUNDING and (weights == "int8" or tiled)
