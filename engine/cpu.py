"""A transformers model made faster on CPUs by replacing modules, not by rewriting models.

Weights are packed once for oneDNN, projections of the same input become one matrix, and norms one kernel. Which modules
are replaced depends on their shapes and classes alone: equal software gives equal bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

_WORTH_PACKING = 300_000  # weights of a float32 layer; below, oneDNN's overhead per call is more than packing saves
_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # projections that read the same input
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}  # x / rms(x) * weight


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is laid out once for oneDNN; `F.linear` does so on every call.

    A single row goes through `F.linear`: a matrix-vector product gains nothing from packing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        if x.numel() == x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class _Joined:
    """One matrix for projections that read the same input, computed when the first is called."""

    def __init__(self, linears: Sequence[Any]) -> None:  # torch.nn.Linear; its bias is typed as never None
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.linear = make_linear(weight, torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self.parts: list[torch.Tensor] = []

    def compute(self, x: torch.Tensor) -> None:
        self.parts = list(self.linear(x).split(self._sizes, -1))


class JoinedPart(torch.nn.Module):
    """One of the joined projections. The model calls them one after the other on the same input; the first computes."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self._joined = joined
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], the same for all parts."""
        if self._index == 0:
            self._joined.compute(x)
        return self._joined.parts[self._index]


class FusedNorm(torch.nn.Module):
    """RMSNorm in one call."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class PlainLinear(torch.nn.Module):
    """A linear layer as torch computes it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        return F.linear(x, self.weight, self.bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """The faster kind of linear layer for this weight [out_features, in_features] on this machine."""
    if weight.dtype == torch.float32:
        packs = weight.numel() >= _WORTH_PACKING
    else:
        packs = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)


def speed_up(model: torch.nn.Module) -> None:
    """Replaces what can be replaced in a loaded model, in place. Modules it doesn't know stay as they are."""
    for module in list(model.modules()):
        for names in _PARALLEL:
            _join(module, names)
        for name, child in list(module.named_children()):
            setattr(module, name, _faster(child))


def _faster(module: Any) -> torch.nn.Module:
    """What to put in a module's place; itself where nothing is known to be faster."""
    kind = type(module)
    if kind is torch.nn.Linear:
        bias: Any = module.bias
        return make_linear(module.weight.detach(), None if bias is None else bias.detach())
    if kind.__name__ in _PLAIN_NORMS and module.weight.dtype == torch.float32:
        return FusedNorm(module.weight.detach(), module.variance_epsilon)
    kept: torch.nn.Module = module
    return kept


def _join(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Joins the projections of these names, if the module has them all as ordinary linear layers of the same kind."""
    linears = [getattr(module, name, None) for name in names]
    plain = [linear for linear in linears if linear.__class__ is torch.nn.Linear]
    if len(plain) < len(names) or len({linear.bias is None for linear in plain}) > 1:
        return
    joined = _Joined(plain)
    for index, name in enumerate(names):
        setattr(module, name, JoinedPart(joined, index))
