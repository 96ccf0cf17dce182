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
_PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}  # no norms on queries and keys


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
        self.joined = joined
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], the same for all parts."""
        if self._index == 0:
            self.joined.compute(x)
        return self.joined.parts[self._index]


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


class FusedLayer(torch.nn.Module):
    """A decoder layer of the Llama family in about twenty operations: a small model's step is mostly their overhead."""

    def __init__(self, layer: Any, config: Any) -> None:
        """layer: after its projections were joined and its norms fused."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv, self._out = attention.q_proj.joined.linear, attention.o_proj
        self._gate_up, self._down = mlp.gate_proj.joined.linear, mlp.down_proj
        self._index, self._scale, self._dim = attention.layer_idx, attention.scaling, attention.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any
    ) -> torch.Tensor:
        """hidden_states: [1, rows, hidden_size]; position_embeddings: cosines and sines [1, rows, head_dim].

        kwargs: as transformers passes them to a layer, with `paceline` from the runner.
        """
        x = hidden_states[0]
        x = x + self._attend(self._before_attention(x), position_embeddings, kwargs["paceline"])
        gate, up = self._gate_up(self._before_mlp(x)).chunk(2, -1)
        out: torch.Tensor = x + self._down(F.silu(gate).mul_(up))
        return out[None]

    def _attend(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], part: Any) -> torch.Tensor:
        rows, heads, kv_heads = len(x), self._heads, self._kv_heads
        qkv = self._qkv(x).view(rows, heads + 2 * kv_heads, self._dim)
        turned = _rotate(qkv[:, : heads + kv_heads], *rotation)
        part.write_kv(self._index, turned[:, heads:].transpose(0, 1), qkv[:, heads + kv_heads :].transpose(0, 1))
        out = part.attend(self._index, turned[:, :heads].transpose(0, 1), self._scale)
        result: torch.Tensor = self._out(out.reshape(rows, heads * self._dim))
        return result


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [rows, heads, head_dim], by halves (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    half = x.shape[-1] // 2
    cosines, sines = cosines[0, :, None], sines[0, :, None]
    out = x * cosines
    out[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sines[..., half:])
    return out


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

    config = getattr(model, "config", None)
    for parent in list(model.modules()):
        layers = getattr(parent, "layers", None)
        if isinstance(layers, torch.nn.ModuleList):
            for index, layer in enumerate(layers):
                if _is_plain(layer):
                    layers[index] = FusedLayer(layer, config)


def _is_plain(layer: Any) -> bool:
    """Whether a decoder layer is exactly what FusedLayer computes."""
    if type(layer).__name__ not in _PLAIN_LAYERS:
        return False
    projections = (layer.self_attn.q_proj, layer.mlp.gate_proj)
    return all(isinstance(part, JoinedPart) for part in projections) and type(layer.mlp.act_fn).__name__ in (
        "SiLU",
        "SiLUActivation",
    )


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
