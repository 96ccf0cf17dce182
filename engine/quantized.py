"""Weights of fewer bits for drafts: nearly the same model, and fewer bytes to read in each step.

The layers here are for GPUs and compute by torch's own kernels; on CPUs FBGEMM is several times as fast: see engine.cpu.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F

Weights = Literal["auto", "int8", "int4"]

WORTH_ROUNDING = 300_000  # weights of a layer; below, little is saved, on CPUs less than rounding the inputs takes
_FEW_ROWS = 32  # that torch's kernel for 8-bit weights is made for: it reads them once for each row
_GROUP = 64  # 4-bit weights that share a scale
_TILES = 8  # along the inputs, of the layout of 4-bit weights
_INPUTS, _OUTPUTS = 16 * _TILES, 16  # what a layer's sizes have to be multiples of, for 4-bit weights
_TENSOR_CORES = (8, 0)  # the compute capability that the kernel for them needs


def why_not(weights: Weights, device: str, dtype: torch.dtype, invariant: bool, compile: bool) -> str:
    """The reason why a model can't have such weights, as the end of a sentence; empty where it can."""
    if weights == "auto":
        return ""
    if invariant:
        return "in invariant mode: a row's bits depend on the rows beside it"
    if device == "cpu":
        if weights == "int4":
            return "on CPUs, only on GPUs"
        if compile:
            return "compiled, on CPUs"
        fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        return "" if fbgemm else "with this torch, which was built without FBGEMM"
    if weights == "int4" and dtype != torch.bfloat16:
        return f"in {str(dtype).removeprefix('torch.')}, only in bfloat16"
    if weights == "int4" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _TENSOR_CORES:
        return f"on device {device!r}, whose compute capability is below {_TENSOR_CORES[0]}.{_TENSOR_CORES[1]}"
    return ""


class Int8Weights(torch.nn.Module):
    """A linear layer with 8-bit weights, one scale for each output; inputs stay as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        scales = weight.float().abs().amax(1).clamp_min(1e-12) / 127
        self.rounded = (weight.float() / scales[:, None]).round().to(torch.int8)
        self.scales = scales.to(weight.dtype)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > _FEW_ROWS:
            out = F.linear(rows, self.rounded.to(x.dtype)) * self.scales
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.rounded, self.scales)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


class Int4Weights(torch.nn.Module):
    """A linear layer with 4-bit weights, of which 64 of one output share a scale and a middle; inputs stay as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        groups = weight.float().view(len(weight), -1, _GROUP)
        least, most = groups.amin(-1), groups.amax(-1)
        # As they are kept, or the levels would lie elsewhere than the weights were rounded to.
        scales = ((most - least) / 15).clamp_min(1e-6).to(weight.dtype).float()
        middles = (least + 8 * scales).to(weight.dtype).float()
        levels = ((groups - middles[..., None]) / scales[..., None] + 8).round().clamp(0, 15)
        self.packed = _pack(levels.view_as(weight).to(torch.int32))
        self.scales = torch.stack([scales, middles], -1).transpose(0, 1).contiguous().to(weight.dtype)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        cpu = x.device.type == "cpu"
        product: Any = torch.ops.aten._weight_int4pack_mm_for_cpu if cpu else torch.ops.aten._weight_int4pack_mm
        out: torch.Tensor = product(x.reshape(-1, x.shape[-1]), self.packed, _GROUP, self.scales)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


def _pack(levels: torch.Tensor) -> torch.Tensor:
    """Levels 0 to 15 [out_features, in_features], int32, in the layout of the kernel for their device."""
    if levels.device.type == "cpu":
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, _TILES)
    else:
        pairs = (levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _TILES)
    return packed


def quantize(model: torch.nn.Module, weights: Weights) -> None:
    """Replaces a loaded model's large linear layers in place, the output layer too. Others stay as they are.

    So do those whose sizes the kernel for 4-bit weights can't take: multiples of 128 inputs and 16 outputs.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and _suits(child, weights):
                layer = Int8Weights if weights == "int8" else Int4Weights
                bias: torch.Tensor | None = child.bias  # None without one, which torch's types don't say
                setattr(module, name, layer(child.weight.detach(), None if bias is None else bias.detach()))


def _suits(linear: torch.nn.Linear, weights: Weights) -> bool:
    tiled = linear.in_features % _INPUTS == 0 and linear.out_features % _OUTPUTS == 0
    return linear.weight.numel() >= WORTH_ROUNDING and (weights == "int8" or tiled)
