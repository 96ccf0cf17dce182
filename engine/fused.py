"""A transformers model made faster by replacing modules, not by rewriting models.

Projections of the same input become one matrix, norms a few operations, decoder layers of the Llama family some twenty.
Which modules are replaced depends on their shapes and classes and the number of threads alone: equal software gives equal
bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine import torch_calls
from engine.attention import Part
from engine.checkpoint import architecture
from engine.choice import Weights
from engine.cpu import make_linear, threads_for
from engine.kv import KVPool

_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # projections that read the same input
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}  # x / rms(x) * weight
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone
_PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}  # no norms on queries and keys


class _Joined:
    """One matrix for projections that read the same input, computed when the first is called."""

    def __init__(
        self, linears: Sequence[Any], weights: Weights, threads: int
    ) -> None:  # torch.nn.Linear; its bias is never None for mypy
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.linear = make_linear(weight, torch.cat(biases) if biases else None, weights, threads)
        self._sizes = [linear.out_features for linear in linears]
        self.x: torch.Tensor | None = None  # what the parts were computed of
        self.parts: list[torch.Tensor] = []

    def compute(self, x: torch.Tensor) -> None:
        self.x = x
        self.parts = list(self.linear(x).split(self._sizes, -1))


class JoinedPart(torch.nn.Module):
    """One of the joined projections. The model calls them one after the other on the same input; the first computes."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self.joined = joined
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], the same for all parts."""
        if self._index == 0 or x is not self.joined.x:  # not all models call the first first
            self.joined.compute(x)
        return self.joined.parts[self._index]


class FusedNorm(torch.nn.Module):
    """RMSNorm in a few small operations: on CPUs `F.rms_norm` takes more and larger ones.

    Each rounds exactly, so a row's bits don't depend on its place.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        features = weight.shape[-1]
        # x / rms(x) * weight, with norm(x) = rms(x) * features ** 0.5
        self.scaled, self.least = weight.float() * features**0.5, features * eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features]; in bfloat16 it is rounded once, at the end."""
        exact = x.float()
        norm = torch.linalg.vector_norm(exact, 2, -1, keepdim=True)
        out: torch.Tensor = (exact / norm.square_().add_(self.least).sqrt_()).mul_(self.scaled)
        return out.to(x.dtype)


class FusedLayer(torch.nn.Module):
    """A decoder layer of the Llama family in about twenty operations: a small model's step is mostly their overhead."""

    def __init__(self, layer: Any, config: Any) -> None:
        """layer: after its projections were joined and its norms fused."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.out = attention.q_proj.joined.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.joined.linear, mlp.down_proj
        self._index, self.scale, self.dim = attention.layer_idx, attention.scaling, attention.head_dim
        self._current = attention.paceline
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any
    ) -> torch.Tensor:
        """hidden_states: [1, rows, hidden_size]; position_embeddings: cosines and sines [1, rows, head_dim].

        kwargs: as transformers passes them to a layer.
        """
        cosines, sines = position_embeddings
        return self.compute(hidden_states[0], (cosines[0, :, None], sines[0, :, None]), self._current.part)[None]

    def compute(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], part: Part) -> torch.Tensor:
        """x: [rows, hidden_size]; rotation: cosines and sines [rows, 1, head_dim]; part: where KV goes and what is seen."""
        return self.finish(x, self.attend(self.ask(x, rotation, part), part))

    def ask(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], part: Part) -> torch.Tensor:
        """What comes before the attention: writes the rows' KV, returns their queries [heads, rows, head_dim]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(self.before_attention(x)).view(-1, heads + 2 * kv_heads, self.dim)
        turned = _rotate(qkv[:, : heads + kv_heads], *rotation, self.dim // 2)
        part.write_kv(self._index, turned[:, heads:].transpose(0, 1), qkv[:, heads + kv_heads :].transpose(0, 1))
        return turned[:, :heads].transpose(0, 1)

    def attend(self, query: torch.Tensor, part: Part) -> torch.Tensor:
        """query: as `ask` returns it; returns [rows, heads, head_dim]."""
        return part.attend(self._index, query, self.scale)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes behind the attention; x: as `ask` took it."""
        x = x + self.out(attended.reshape(-1, self.heads * self.dim))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        out: torch.Tensor = self.down(F.silu(gate).mul_(up)).add_(x)
        return out


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, half: int) -> torch.Tensor:
    """Rotary embedding of x [rows, heads, head_dim], by halves (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    out = x * cosines
    out[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sines[..., half:])
    return out


def is_one_call(values: dict[str, Any], numbers: dict[str, int]) -> bool:
    """Whether a checkpoint is of the kind whose passes in bfloat16 are one compiled call here, which takes one thread.

    values: its config.json. numbers: of each type, among its weights: all are in bfloat16, or some would be rounded.
    """
    layer = architecture(values).replace("ForCausalLM", "DecoderLayer")
    rotation = values.get("rope_parameters") or values.get("rope_scaling") or {"rope_type": "default"}
    turns = rotation.get("rope_type", rotation.get("type", "default")) if isinstance(rotation, dict) else None
    windows = values.get("sliding_window") and values.get("use_sliding_window", True)
    plain = values.get("hidden_act") == "silu" and not windows and "quantization_config" not in values
    known = layer in _PLAIN_LAYERS and plain and turns in _FIXED_ROTATIONS
    return known and set(numbers) == {"BF16"} and threads_for(numbers["BF16"]) == 1 and torch_calls.narrow_available()


def speed_up(model: torch.nn.Module, fuse: bool, weights: Weights = "auto") -> None:
    """Replaces what can be replaced in a loaded model, in place. Modules it doesn't know stay as they are.

    fuse: whether layers may be replaced as a whole; not where they differ, as with sliding windows in some.
    """
    numbers = sum(module.weight.numel() for module in model.modules() if type(module) is torch.nn.Linear)
    threads = threads_for(numbers)
    for module in list(model.modules()):
        for names in _PARALLEL:
            _join(module, names, weights, threads)
        for name, child in list(module.named_children()):
            setattr(module, name, _faster(child, weights, threads))

    if not fuse:
        return
    config = getattr(model, "config", None)
    for parent in list(model.modules()):
        layers = getattr(parent, "layers", None)
        if isinstance(layers, torch.nn.ModuleList):
            for index, layer in enumerate(layers):
                if _is_plain(layer):
                    layers[index] = FusedLayer(layer, config)


def is_plain_decoder(base: Any) -> bool:
    """Whether a model without its output layer is embeddings, FusedLayers and a norm, with rotations by position alone."""
    layers = getattr(base, "layers", None)
    return (
        isinstance(layers, torch.nn.ModuleList)
        and all(isinstance(layer, FusedLayer) for layer in layers)
        and type(getattr(base, "embed_tokens", None)) is torch.nn.Embedding
        and getattr(base.rotary_emb, "rope_type", None) in _FIXED_ROTATIONS
    )


def positions_of(model: Any, pool: KVPool) -> int:
    """How many positions a model and its pool have at most."""
    return min(int(model.config.max_position_embeddings), pool.pages * pool.page_size)


def _is_plain(layer: Any) -> bool:
    """Whether a decoder layer is exactly what FusedLayer computes."""
    if type(layer).__name__ not in _PLAIN_LAYERS:
        return False
    projections = (layer.self_attn.q_proj, layer.mlp.gate_proj)
    return all(isinstance(part, JoinedPart) for part in projections) and type(layer.mlp.act_fn).__name__ in (
        "SiLU",
        "SiLUActivation",
    )


def _faster(module: Any, weights: Weights, threads: int) -> torch.nn.Module:
    """What to put in a module's place; itself where nothing is known to be faster."""
    kind = type(module)
    if kind is torch.nn.Linear:
        bias: Any = module.bias
        return make_linear(module.weight.detach(), None if bias is None else bias.detach(), weights, threads)
    if kind.__name__ in _PLAIN_NORMS:
        return FusedNorm(module.weight.detach(), module.variance_epsilon)
    kept: torch.nn.Module = module
    return kept


def _join(module: torch.nn.Module, names: Sequence[str], weights: Weights, threads: int) -> None:
    """Joins the projections of these names, if the module has them all as ordinary linear layers of the same kind."""
    linears = [getattr(module, name, None) for name in names]
    plain = [linear for linear in linears if linear.__class__ is torch.nn.Linear]
    if len(plain) < len(names) or len({linear.bias is None for linear in plain}) > 1:
        return
    joined = _Joined(plain, weights, threads)
    for index, name in enumerate(names):
        setattr(module, name, JoinedPart(joined, index))
