"""A transformers model made faster on CPUs by replacing modules, not by rewriting models.

Weights are packed once for oneDNN, projections of the same input become one matrix, and norms a few operations. Which
modules are replaced depends on their shapes and classes and the number of threads alone: equal software gives equal bits.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine import torch_calls
from engine.attention import Part
from engine.checkpoint import architecture
from engine.choice import Weights
from engine.kv import KVPool
from engine.quantized import WORTH_ROUNDING

_WORTH_PACKING = 300_000  # weights of a float32 layer; below, oneDNN's overhead per call is more than packing saves
# Weights of a bfloat16 model, times threads; below, one thread with BlockedLinear is faster than those with PackedLinear.
_WORTH_THREADS = 400_000_000
_CACHED = (
    25_000_000  # bytes of a model's weights: more may come from memory for every pass (python -m benchmarks.weights)
)
_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # projections that read the same input
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}  # x / rms(x) * weight
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone
_PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}  # no norms on queries and keys

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
        self.weight, self.bias = weight, bias
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
        self.weight = weight
        self.bias = torch.zeros(len(weight)) if bias is None else bias
        with warnings.catch_warnings():  # deprecated in favour of an operation that takes 20 us more per call
            warnings.simplefilter("ignore", UserWarning)
            self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            self(torch.zeros(2, weight.shape[1]))  # it says so once

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
        self.blocks = torch_calls.blocks_of(weight, self.line)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], of any dtype, rounded to bfloat16."""
        rows = x.reshape(-1, x.shape[-1]).float().contiguous().numpy()
        numbers = np.empty((len(rows), len(self.weight)), np.float32)
        torch_calls.product(rows, np.uint64(self.blocks.data_ptr()), self.line, numbers)
        torch_calls.leave()
        out = torch.from_numpy(numbers).view(*x.shape[:-1], -1)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


def read_in_order(layers: Sequence[BlockedLinear], size: int) -> None:
    """Moves the weights of layers to one piece of memory, laid out as reading them in this order takes the least time.

    size: bytes of all weights that a pass reads. The first of these layers may be given again, alone: they stay.
    """
    starts = [layer.blocks.data_ptr() for layer in layers]
    ends = [start + layer.blocks.nbytes for start, layer in zip(starts, layers, strict=True)]
    line = torch_calls.WIDE if size > _CACHED else torch_calls.NARROW
    if any(layer.line == torch_calls.WIDE for layer in layers) or (
        line == torch_calls.NARROW and starts[1:] == ends[:-1]
    ):
        return
    sizes = [torch_calls.blocks_of(layer.weight.to("meta"), line).numel() for layer in layers]
    whole = torch.empty(sum(sizes) + torch_calls.PAGE_BYTES // 2, dtype=torch.bfloat16)
    first = -whole.data_ptr() % torch_calls.PAGE_BYTES // 2
    for layer, part in zip(layers, whole[first : first + sum(sizes)].split(sizes), strict=True):
        layer.line, layer.blocks = line, part.copy_(torch_calls.blocks_of(layer.weight, line))


class Int8Linear(torch.nn.Module):
    """A linear layer with 8-bit weights, one scale for each output; inputs are rounded to 8 bits as they come, by FBGEMM.

    A quarter of the bytes of float32, at some accuracy: for drafts. A row's bits depend on the rows beside it.
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
        self.weight = weight
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
    return known and set(numbers) == {"BF16"} and _threads(numbers["BF16"]) == 1 and torch_calls.narrow_available()


def _threads(weights: int) -> int:
    """How many threads a model in bfloat16 with so many weights is worth."""
    threads = torch.get_num_threads()
    return threads if weights * threads >= _WORTH_THREADS else 1


def _can_block(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and torch_calls.narrow_available()


def fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds a float32 weight, but for parts of it too small to be seen in float32 sums.

    Those are below 2^-25, and far below the largest number of their row.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    lost = (weight - weight.half().float()).abs().amax(-1)
    return bool((lost <= torch.clamp(2.0**-18 * weight.abs().amax(-1), max=2.0**-25)).all())


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


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights = "auto", threads: int = 1
) -> torch.nn.Module:
    """The faster kind of linear layer for this weight [out_features, in_features] on this machine.

    threads: as many as the model is worth.
    """
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


def speed_up(model: torch.nn.Module, fuse: bool, weights: Weights = "auto") -> None:
    """Replaces what can be replaced in a loaded model, in place. Modules it doesn't know stay as they are.

    fuse: whether layers may be replaced as a whole; not where they differ, as with sliding windows in some.
    """
    numbers = sum(module.weight.numel() for module in model.modules() if type(module) is torch.nn.Linear)
    threads = _threads(numbers)
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
