"""A transformers model made faster by replacing modules, not by rewriting models.

Projections of the same input become one matrix, norms one operation or a few, decoder layers of the Llama family some
twenty. Which modules are replaced depends on their shapes and classes, the device and the number of threads alone: equal
software gives equal bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine import torch_calls
from engine.attention import Part
from engine.checkpoint import architecture
from engine.choice import Weights
from engine.cpu import make_linear, threads_for
from engine.kv import KVPool
from engine.probe import Unsupported
from engine.quantized import Rounded, make_device_linear

_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # projections that read the same input
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}  # x / rms(x) * weight
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone
_PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}  # no norms on queries and keys
_PLAIN_ACTIVATIONS = {"SiLU", "SiLUActivation"}
_MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], torch.nn.Module]  # of a weight and a bias


class _Joined(torch.nn.Module):
    """One matrix for projections that read the same input, computed when the first is called."""

    def __init__(self, linears: Sequence[Any], make: _MakeLinear) -> None:
        """linears: torch.nn.Linear, whose bias is never None for mypy."""
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.linear = make(weight, torch.cat(biases) if biases else None)
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
        query, key, value = self.project(x, rotation)
        part.write_kv(self._index, key, value)
        return query

    def project(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, rotation: see compute. Returns queries, keys and values, each [its heads, rows, head_dim]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(self.before_attention(x)).view(-1, heads + 2 * kv_heads, self.dim)
        turned = _rotate(qkv[:, : heads + kv_heads], *rotation, self.dim // 2)
        query, key, value = turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :]
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

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


def speed_up(
    model: torch.nn.Module, fuse: bool, weights: Weights = "full", for_cpu: bool = True, join: bool = True
) -> None:
    """Replaces what can be replaced in a loaded model, in place. Modules it doesn't know stay as they are.

    fuse: whether layers may be replaced as a whole; not where they differ, as with sliding windows in some. for_cpu: by what
    CPUs are fast with, else by torch's own operations. join: whether projections of the same input become one; fused layers
    need it, and no compiler sees through it elsewhere. Raises Unsupported where no layer suits such weights.
    """
    numbers = sum(module.weight.numel() for module in model.modules() if type(module) is torch.nn.Linear)
    threads = threads_for(numbers)
    linears = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
        linears.append(
            make_linear(weight, bias, weights, threads) if for_cpu else make_device_linear(weight, bias, weights)
        )
        return linears[-1]

    for module in [each for each in model.modules() if type(each) is not torch.nn.Linear]:  # old ones can go
        for names in _PARALLEL if join else ():
            _join(module, names, make)
        for name, child in list(module.named_children()):
            setattr(module, name, _faster(child, make, FusedNorm if for_cpu else _device_norm))
        if not for_cpu and torch.cuda.is_available():
            torch.cuda.empty_cache()  # else most weights would be there twice
    if weights != "full" and not for_cpu and not any(isinstance(linear, Rounded) for linear in linears):
        raise Unsupported(f"has no layers that {weights} weights suit")
    if not fuse:
        return
    config = getattr(model, "config", None)
    for parent in list(model.modules()):
        layers = getattr(parent, "layers", None)
        if isinstance(layers, torch.nn.ModuleList):
            for index, layer in enumerate(layers):
                if _is_plain(layer) and _is_joined(layer):
                    layers[index] = FusedLayer(layer, config)


def compile_layers(base: Any) -> None:
    """Has torch compile what FusedLayers do before and behind the attention: once for all of them, and any rows."""
    project, finish = torch.compile(FusedLayer.project), torch.compile(FusedLayer.finish)

    def project_any(layer: FusedLayer, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> Any:
        _of_any_rows(x, *rotation)
        return project(layer, x, rotation)

    def finish_any(layer: FusedLayer, x: torch.Tensor, attended: torch.Tensor) -> Any:
        _of_any_rows(x, attended)
        return finish(layer, x, attended)

    for layer in base.layers:
        layer.project, layer.finish = partial(project_any, layer), partial(finish_any, layer)


def _of_any_rows(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def is_fused(base: Any) -> bool:
    """Whether all layers of a model without its output layer are FusedLayers."""
    layers = getattr(base, "layers", None)
    return isinstance(layers, torch.nn.ModuleList) and all(isinstance(layer, FusedLayer) for layer in layers)


def is_plain_decoder(base: Any) -> bool:
    """Whether a model without its output layer is embeddings, FusedLayers and a norm, with rotations by position alone."""
    return (
        is_fused(base)
        and type(getattr(base, "embed_tokens", None)) is torch.nn.Embedding
        and getattr(base.rotary_emb, "rope_type", None) in _FIXED_ROTATIONS
    )


def positions_of(model: Any, pool: KVPool) -> int:
    """How many positions a model and its pool have at most."""
    return min(int(model.config.max_position_embeddings), pool.pages * pool.page_size)


def is_fusable(base: Any) -> bool:
    """Whether all layers of a model without its output layer could be FusedLayers."""
    layers = getattr(base, "layers", None)
    return isinstance(layers, torch.nn.ModuleList) and all(map(_is_plain, layers))


def _is_plain(layer: Any) -> bool:
    """Whether a decoder layer is what FusedLayer computes, where its projections can be joined."""
    return (
        type(layer).__name__ in _PLAIN_LAYERS
        and type(getattr(layer.mlp, "act_fn", None)).__name__ in _PLAIN_ACTIVATIONS
    )


def _is_joined(layer: Any) -> bool:
    return all(isinstance(part, JoinedPart) for part in (layer.self_attn.q_proj, layer.mlp.gate_proj))


def _device_norm(weight: torch.Tensor, eps: float) -> torch.nn.RMSNorm:
    """RMSNorm as torch has it: one operation on a GPU."""
    norm = torch.nn.RMSNorm(weight.shape, eps, elementwise_affine=False)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def _faster(
    module: Any, make: _MakeLinear, make_norm: Callable[[torch.Tensor, float], torch.nn.Module]
) -> torch.nn.Module:
    """What to put in a module's place; itself where nothing is known to be faster."""
    kind = type(module)
    if kind is torch.nn.Linear:
        bias: Any = module.bias
        return make(module.weight.detach(), None if bias is None else bias.detach())
    if kind.__name__ in _PLAIN_NORMS:
        return make_norm(module.weight.detach(), module.variance_epsilon)
    kept: torch.nn.Module = module
    return kept


def _join(module: torch.nn.Module, names: Sequence[str], make: _MakeLinear) -> None:
    """Joins the projections of these names, if the module has them all as ordinary linear layers of the same kind."""
    linears = [getattr(module, name, None) for name in names]
    plain = [linear for linear in linears if linear.__class__ is torch.nn.Linear]
    if len(plain) < len(names) or len({linear.bias is None for linear in plain}) > 1:
        return
    joined = _Joined(plain, make)
    for index, name in enumerate(names):
        setattr(module, name, JoinedPart(joined, index))
