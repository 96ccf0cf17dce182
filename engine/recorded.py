"""A decoder of the Llama family in recordings: a small model's step is mostly Python, and a server's other threads want the
interpreter's lock meanwhile.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import Group, Heads, Layout, Part
from engine.cpu import BlockedLinear, HalfLinear, Int8Linear, PackedLinear
from engine.fused import FusedLayer, is_plain_decoder, positions_of
from engine.kv import KVPool


class Recording:
    """A function of tensors, recorded once by TorchScript and replayed without the interpreter and its lock.

    The bits are the same. It has to do for any number of rows, and is recorded with two.
    """

    def __init__(self, function: Callable[..., Any], modules: Sequence[torch.nn.Module], inputs: Sequence[Any]) -> None:
        """modules: those that the function uses; inputs: tensors to record it with, which it may write to."""
        inside = [module for each in modules for module in each.modules()]
        self._packed = [module for module in inside if isinstance(module, PackedLinear | HalfLinear)]
        self._given = tuple(module.packed for module in self._packed)  # what a recording can't hold
        layers = [module for module in inside if isinstance(module, Int8Linear)]

        def run(given: Sequence[torch.Tensor], *inputs: torch.Tensor) -> Any:
            self._use(given)
            return function(*inputs)

        with warnings.catch_warnings():  # torch.compile, recommended in its place, needs a C++ compiler
            warnings.simplefilter("ignore", DeprecationWarning)
            self._recorded = torch.jit.trace(_Recordable(run, layers), (self._given, *inputs), check_trace=False)
        self._use(self._given)
        for _ in range(3):  # the first calls still optimise
            self(*inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What the function returns."""
        return self._recorded(self._given, *inputs)

    def _use(self, weights: Sequence[torch.Tensor]) -> None:
        for module, weight in zip(self._packed, weights, strict=True):
            module.packed = weight


class _Recordable(torch.nn.Module):
    """A function to record, with the layers whose weights are no tensors: a recording finds these in a module alone."""

    def __init__(self, function: Callable[..., Any], layers: Sequence[Int8Linear]) -> None:
        super().__init__()
        self._function = function
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class FusedDecoder:
    """A decoder of the Llama family without transformers' code around its layers.

    A pass of one sequence is one recording; of several, what lies between two attentions is.
    """

    def __init__(self, base: Any, pool: KVPool, heads: Heads, length: int) -> None:
        """base: a model whose layers are all FusedLayer; pool: not a paged one; length: the most positions there can be."""
        assert not pool.paged
        self._embed, self._layers, self._norm = base.embed_tokens, list(base.layers), base.norm
        cosines, sines = base.rotary_emb(base.embed_tokens.weight[:1], torch.arange(length)[None])
        self._cosines, self._sines = cosines[0], sines[0]
        self._heads = heads
        self._whole: dict[tuple[int, bool], Recording] = {}  # by the kind of keys, and whether there is a mask
        self._pieces: list[Recording] = []  # up to the first attention, from there to the second, ..., behind the last
        self._record(pool.data)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: Layout, span: tuple[int, int, int]
    ) -> torch.Tensor:
        """tokens, positions: int64 [rows]; span: of them in the layout, see there.

        Returns the final hidden states [rows, hidden_size].
        """
        states: torch.Tensor
        part = layout.part(*span)
        if part.whole:
            group = part.whole[None]
            bias = () if group.bias is None else (group.bias,)
            recorded = self._whole[group.keys.ndim, group.bias is not None]
            states = recorded(part.data, tokens, positions, part.write, group.keys, *bias)
            return states
        x, rotation = self._embedded(tokens, positions)
        query = self._pieces[0](part.data, part.write, *rotation, x)
        for layer, piece in zip(self._layers[:-1], self._pieces[1:-1], strict=True):
            x, query = piece(part.data, part.write, *rotation, x, layer.attend(query, part))
        states = self._pieces[-1](x, self._layers[-1].attend(query, part))
        return states

    def compute(self, tokens: torch.Tensor, positions: torch.Tensor, part: Part) -> torch.Tensor:
        """The same, not recorded."""
        x, rotation = self._embedded(tokens, positions)
        for layer in self._layers:
            x = layer.compute(x, rotation, part)
        out: torch.Tensor = self._norm(x)
        return out

    def _embedded(
        self, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """x [rows, hidden_size], cosines and sines [rows, 1, head_dim]."""
        rotation = self._cosines.index_select(0, positions)[:, None], self._sines.index_select(0, positions)[:, None]
        return F.embedding(tokens, self._embed.weight), rotation

    @torch.inference_mode()
    def _record(self, data: torch.Tensor) -> None:
        """Records passes of two rows over two keys, of each kind there is; they write to the scratch page only."""

        def whole(data: Any, tokens: Any, positions: Any, write: Any, keys: Any, bias: Any = None) -> torch.Tensor:
            group = Group([], keys, bias)
            return self.compute(tokens, positions, Part(self._heads, data, write, {None: group}, {}))

        rows = torch.zeros(2, dtype=torch.int64)
        bias = torch.zeros(2 * self._heads.fold, 2, dtype=data.dtype)
        for keys in (rows, data[:, :, :, :2]):
            for masked in ((), (bias,)):
                inputs = (data, rows, rows, rows, keys, *masked)
                self._whole[keys.ndim, bool(masked)] = Recording(whole, self._layers, inputs)
        x, rotation = self._embedded(rows, rows)
        attended = x.new_zeros(2, self._heads.kv * self._heads.fold, self._heads.dim)
        first, *others = self._layers
        self._pieces = [Recording(self._first, [first], (data, rows, *rotation, x))]
        for before, layer in zip(self._layers, others, strict=False):
            piece = self._between(before, layer)
            self._pieces.append(Recording(piece, [before, layer], (data, rows, *rotation, x, attended)))
        self._pieces.append(Recording(self._last, [self._layers[-1]], (x, attended)))

    def _first(self, data: Any, write: Any, cosines: Any, sines: Any, x: Any) -> torch.Tensor:
        query: torch.Tensor = self._layers[0].ask(x, (cosines, sines), Part(self._heads, data, write, {}, {}))
        return query

    def _between(self, before: FusedLayer, layer: FusedLayer) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def piece(data: Any, write: Any, cosines: Any, sines: Any, x: Any, attended: Any) -> Any:
            x = before.finish(x, attended)
            return x, layer.ask(x, (cosines, sines), Part(self._heads, data, write, {}, {}))

        return piece

    def _last(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._norm(self._layers[-1].finish(x, attended))
        return out


def fused_decoder(model: Any, pool: KVPool, heads: Heads) -> FusedDecoder | None:
    """The model's decoder in recordings; None where its parts are not all of the kinds known here."""
    base = model.base_model
    if not is_plain_decoder(base) or any(isinstance(module, BlockedLinear) for module in base.modules()):
        return None
    return FusedDecoder(model.base_model, pool, heads, positions_of(model, pool))
