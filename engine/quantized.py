"""Weights of fewer bits for drafts: nearly the same model, in less memory, and with fewer bytes to read in each step.

The layers here are for GPUs and torch's own kernels; on CPUs, in float32, FBGEMM is many times as fast: see engine.cpu.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from engine.choice import Weights
from engine.probe import Unsupported

WORTH_ROUNDING = 300_000  # weights of a layer; below, little is saved, on CPUs less than rounding the inputs takes
_AT_ONCE = 4096  # outputs of a layer that are rounded together: in between they take several times the memory
_GROUP = 64  # 4-bit weights that share a scale; inputs come in multiples of it
_OUTPUTS = 16  # and outputs in multiples of this
_TENSOR_CORES = (8, 0)  # the compute capability that the kernel for 4-bit weights needs


def why_not(weights: Weights, device: str, invariant: bool) -> str:
    """Why this machine can't have such weights, as the end of a sentence; empty where it can."""
    if weights == "auto":
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


class _Rounded(torch.nn.Module, ABC):
    """What both kinds of layers have. Buffers, since a compiler takes their sizes for constant."""

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
        # Others ask a layer's weight for its shape, dtype and device. It takes no memory; who computes with it gets nothing.
        self.weight = weight.new_full((1,), torch.nan).expand(weight.shape)

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


class Int8Weights(_Rounded):
    """A linear layer with 8-bit weights, one scale for each output; inputs stay as they are.

    It saves memory, and time at most where a compiler joins the conversion to the product. Torch's own kernel for such
    weights on GPUs had one thread for each output when this was written, so all weights are converted. Neither was measured.
    """

    def _round(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scales = weight.abs().amax(1).clamp_min(1e-12) / 127
        return (weight / scales[:, None]).round().to(torch.int8), scales.to(dtype)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.levels.to(rows.dtype)) * self.scales


class Int4Weights(_Rounded):
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


def quantize(model: torch.nn.Module, weights: Weights) -> None:
    """Replaces a loaded model's large linear layers in place, the output layer too. Others stay as they are.

    So do those whose sizes the kernel for 4-bit weights can't take. Raises Unsupported where none is left.
    """
    kind = Int8Weights if weights == "int8" else Int4Weights
    replaced = 0
    parents = [module for module in model.modules() if type(module) is not torch.nn.Linear]  # old layers can go
    for module in parents:
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and _suits(child, weights):
                bias: torch.Tensor | None = child.bias  # None without one, which torch's types don't say
                setattr(module, name, kind(child.weight.detach(), None if bias is None else bias.detach()))
                replaced += 1
    if not replaced:
        raise Unsupported(f"has no layers that {weights} weights suit")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # others may share the GPU


def _suits(linear: torch.nn.Linear, weights: Weights) -> bool:
    tiled = linear.in_features % _GROUP == 0 and linear.out_features % _OUTPUTS == 0
    return linear.weight.numel() >= WORTH_ROUNDING and (weights == "int8" or tiled)
