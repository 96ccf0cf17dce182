"""Attention over the KV pool: where the rows of a forward pass write their keys and values, and what each of them sees.

Every row sees its own path: the committed prefix, then its ancestors in the tree (tree attention: Miao et al. 2024,
https://arxiv.org/abs/2305.09781).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.compiled import COMPILES, compiled
from engine.kv import SCRATCH_SLOT, KVPool, Lease
from engine.page_plan import plan
from engine.row_attention import Paths
from engine.types import BoolArray, FloatArray, IntArray

_ITSELF = np.ones((1, 1), np.bool_)  # what a single row sees behind the prefix
Longs = npt.NDArray[np.int64]
_KEY_BUCKET = 64  # invariant mode with torch's attention: each row's keys are rounded up to this
_FEW = 1600  # rows times keys of a sequence that attend one by one sooner than in a call of torch's attention


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a forward pass: n rows, parents before children.

    Row i sees the first `prefix` slots of the lease in position order, then the `tree_slots` its row of `visible` names.
    """

    lease: Lease
    prefix: int  # committed tokens whose KV is in the pool, seen by every row
    tokens: Sequence[int]  # [n]
    positions: Sequence[int]  # [n]
    slots: IntArray  # [n]: where the rows' own KV goes
    tree_slots: IntArray  # [m]: slots behind the prefix that any row sees, its own included; ancestors come first
    visible: BoolArray  # [n, m]
    wanted: int = 0  # logits are returned for rows from this one on
    in_place: bool = False  # guesses, whose bits may depend on where slots are: see page_plan.plan


def chain_rows(
    lease: Lease, start: int, tokens: Sequence[int], wanted: int | None = None, in_place: bool = False
) -> SequenceRows:
    """Rows of consecutive committed tokens at positions `start`...; by default logits of the last one only."""
    n = len(tokens)
    slots = lease.slots[start : start + n]
    return SequenceRows(
        lease=lease,
        prefix=start,
        tokens=tokens,
        positions=range(start, start + n),
        slots=slots,
        tree_slots=slots,
        visible=_ITSELF if n == 1 else np.tri(n, dtype=np.bool_),
        wanted=n - 1 if wanted is None else wanted,
        in_place=in_place,
    )


class Heads(NamedTuple):
    """The shape of a model's attention."""

    kv: int  # KV heads
    fold: int  # query heads that share a KV head
    dim: int  # of each
    windows: tuple[int | None, ...]  # of each layer: a row sees the last so many positions, its own included; None: all


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend in one call.

    keys: what the rows share, under `bias` [fold x rows, keys]: a view [layers, 2, kv_heads, keys, head_dim] of the pool
    where the slots are consecutive, else their index [keys]. Or [rows, keys] when each row has its own, under [rows, keys].
    bias: 0 where visible, else -inf; None where everything is.
    """

    rows: slice | list[int]
    keys: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of the model needs of the pool."""

    heads: Heads
    data: torch.Tensor  # KVPool.data
    write: torch.Tensor  # [rows]: slots of the rows' own KV
    whole: dict[int | None, Group]  # by window: a group that has all rows, padding included; empty where there is none
    groups: dict[int | None, list[Group | Paths]]  # by window, where there is no such group

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the rows' own keys and values, each [kv_heads, rows, head_dim]."""
        store = self.data[layer]
        store[0].index_copy_(1, self.write, key)
        store[1].index_copy_(1, self.write, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [heads, rows, head_dim]; returns [rows, heads, head_dim], zeros in rows that are in no group.

        scale: of the scores, by default 1 / sqrt(head_dim). cap: scores s become cap * tanh(s / cap). sinks: [heads], scores
        of a key without a value.
        """
        window = self.heads.windows[layer]
        softmax = Softmax(scale, cap, sinks)
        if self.whole:
            return self._attend(self.whole[window], layer, query, softmax)
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        for group in self.groups[window]:
            if isinstance(group, Paths):
                group.attend(query, self.data[layer], out, softmax.scale_of(query), cap, sinks)
            else:
                out[group.rows] = self._attend(group, layer, query[:, group.rows], softmax)
        return out

    def _attend(self, group: Group, layer: int, query: torch.Tensor, softmax: "Softmax") -> torch.Tensor:
        """Query heads that share a KV head are folded into rows: one pass over the keys. Sizes are constants or -1: this
        is recorded for any number of rows.
        """
        kv, fold, dim = self.heads[:3]
        if group.keys.ndim == 2:
            return self._attend_separately(group, layer, query, softmax)
        if group.keys.ndim == 1:
            store = self.data[layer]
            keys, values = store[0].index_select(1, group.keys), store[1].index_select(1, group.keys)
        else:
            keys, values = group.keys[layer].unbind(0)
        folded = query.reshape(1, kv, -1, dim)
        out = softmax(folded, keys[None], values[None], group.bias)
        return out.view(kv * fold, -1, dim).transpose(0, 1)

    def _attend_separately(self, group: Group, layer: int, query: torch.Tensor, softmax: "Softmax") -> torch.Tensor:
        """Every row is a batch entry with its own keys: the same shape and order of arithmetic whatever else is there."""
        kv, fold, dim = self.heads[:3]
        assert group.bias is not None
        folded = query.transpose(0, 1).reshape(-1, kv, fold, dim)
        keys, values = (side[:, group.keys].transpose(0, 1) for side in self.data[layer])  # [rows, kv_heads, keys, dim]
        bias = group.bias[:, None, None, :]
        if softmax.fused:
            out = softmax(folded, keys, values, bias)
        else:  # matrix products of several entries can choose other kernels than of one
            rows = zip(*(side.contiguous().split(1) for side in (folded, keys, values, bias)), strict=True)
            out = torch.cat([softmax(*row) for row in rows])
        return out.reshape(-1, kv * fold, dim)


class Seen(NamedTuple):
    """What a compiled pass needs: its rows, where they write in the pool, and what they see of it (page_plan.plan)."""

    tokens: Longs  # [rows], as the two below
    positions: Longs
    write: Longs
    plan: IntArray


class Softmax(NamedTuple):
    """How scores become weights in a layer."""

    scale: float | None
    cap: float | None
    sinks: torch.Tensor | None

    @property
    def fused(self) -> bool:
        """Whether torch has one operation for it."""
        return self.cap is None and self.sinks is None

    def scale_of(self, query: torch.Tensor) -> float:
        """What scores are multiplied with; query: [..., head_dim]."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """query: [n, kv_heads, rows, head_dim], keys and values: [n, kv_heads, keys, head_dim]; bias: as their scores."""
        if self.fused:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self.scale)
        scores = (query @ keys.transpose(2, 3)).float() * self.scale_of(query)
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if bias is not None:
            scores = scores + bias
        if self.sinks is not None:
            kv, rows = query.shape[1:3]  # a KV head's rows are its query heads', one after the other
            sinks = self.sinks.float().view(kv, -1).repeat_interleave(rows * kv // len(self.sinks), 1)
            scores = torch.cat([scores, sinks[None, :, :, None].expand(len(scores), -1, -1, -1)], -1)
        weights = scores.softmax(-1).to(values.dtype)
        return weights[..., : keys.shape[2]] @ values


@dataclass(slots=True)
class Current:
    """What the running pass needs. Attention modules hold it: not all models hand arguments on to them."""

    part: Any = None  # a Part, or what is one on a GPU: engine.gpu_attention.DevicePart


class Layout:
    """Where the rows of one forward pass write and what they see; built once, used by every layer."""

    def __init__(
        self, pool: KVPool, heads: Heads, batch: Sequence[SequenceRows], invariant: bool, last: int = sys.maxsize
    ) -> None:
        """last: the position that those beyond it count as."""
        self._pool = pool
        self._heads = heads
        self.batch = batch
        self._invariant = invariant
        self._windows = set(heads.windows)
        self._by_rows = COMPILES and pool.data.is_cpu and pool.data.dtype in (torch.float32, torch.bfloat16)
        *self.starts, self.rows = accumulate((len(rows.tokens) for rows in batch), initial=0)
        self.tokens = np.array([token for rows in batch for token in rows.tokens], np.int64)
        positions = [position for rows in batch for position in rows.positions]
        self.positions = np.minimum(np.array(positions, np.int64), last)
        self.slots = np.concatenate([rows.slots for rows in batch])

    def inputs(self, start: int, stop: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions of rows start..stop and `padding` rows behind them, int64."""
        tokens = self._tensor(_padded(self.tokens, start, stop, padding))
        return tokens, self._tensor(_padded(self.positions, start, stop, padding))

    def part(self, start: int, stop: int, padding: int) -> Part:
        """What the attention needs for rows start..stop and `padding` rows behind them."""
        slots = self._tensor(_padded(self.slots, start, stop, padding))
        if len(self.batch) == 1 and not self._invariant:
            whole = {window: self._shared(self.batch[0], 0, padding, window) for window in self._windows}
            return Part(self._heads, self._pool.data, slots, whole, {})
        groups = {window: self._groups(start, stop, window) for window in self._windows}
        return Part(self._heads, self._pool.data, slots, {}, groups)

    def seen(self, start: int, stop: int, padding: int) -> Seen:
        """The same for a compiled pass, with its inputs; it knows of no windows."""
        tokens = _padded(self.tokens, start, stop, padding)
        positions = _padded(self.positions, start, stop, padding)
        write = _padded(self.slots, start, stop, padding)
        sequences = []
        for rows, first in zip(self.batch, self.starts, strict=True):
            low, high = max(start - first, 0), min(stop - first, len(rows.tokens))
            if low < high:
                seen = rows.visible[low:high]
                sequences.append(
                    (rows.lease.slots, rows.prefix, rows.tree_slots, seen, first + low - start, rows.in_place)
                )
        return Seen(tokens, positions, write, plan(sequences))

    def _groups(self, start: int, stop: int, window: int | None) -> list[Group | Paths]:
        single, together = self._split(start, stop, window)
        groups: list[Group | Paths] = [self._shared(rows, first, 0, window) for rows, first in together]
        if not single:
            return groups
        paths = Paths.joined(single)
        return [*groups, paths] if self._by_rows else [*groups, *self._separate(paths)]

    def _split(self, start: int, stop: int, window: int | None) -> tuple[list[Paths], list[tuple[SequenceRows, int]]]:
        """Rows that attend one by one, by sequence, and sequences that don't, with their first rows."""
        single: list[Paths] = []
        together: list[tuple[SequenceRows, int]] = []
        for rows, first in zip(self.batch, self.starts, strict=True):
            if self._invariant or (self._by_rows and _are_few(rows)):
                single.append(self._paths(rows, first, start, stop, window))
            else:
                together.append((rows, first))
        return single, together

    def _shared(self, rows: SequenceRows, start: int, padding: int, window: int | None) -> Group:
        """The rows of a sequence attend together under a mask: the fast way. Padding rows see everything."""
        n = len(rows.tokens)
        skipped, seen = (0, rows.visible) if window is None else _in_window(rows, window)
        bias = None
        if not seen.all():
            before = rows.prefix + len(rows.tree_slots) - skipped - seen.shape[1]
            bias = self._tensor(_bias(np.ascontiguousarray(seen), self._heads.fold, n + padding, before)).to(
                self._pool.data.dtype
            )
        return Group(slice(start, start + n), self._keys(rows, skipped), bias)

    def _keys(self, rows: SequenceRows, skipped: int) -> torch.Tensor:
        """A sequence's keys but the first few: a view where their slots are consecutive, so that nothing is copied, else
        their index.
        """
        count = rows.prefix + len(rows.tree_slots)
        first = rows.lease.first
        if first is not None and _consecutive(rows.tree_slots, first + rows.prefix):
            return self._pool.data[:, :, :, first + skipped : first + count]
        return self._tensor(np.concatenate([rows.lease.slots[skipped : rows.prefix], rows.tree_slots]))

    def _paths(self, rows: SequenceRows, first: int, start: int, stop: int, window: int | None) -> Paths:
        """Those of a sequence's rows that are among start..stop, counted from there, with the slots that each sees."""
        low, high = max(start - first, 0), max(start - first, 0, min(stop - first, len(rows.tokens)))
        prefix, visible = rows.lease.slots[: rows.prefix], rows.visible[low:high]
        paths = Paths.below(prefix, rows.tree_slots, visible, first + low - start)
        return paths if window is None else Paths.of([(row, path[-window:]) for row, path in paths])

    def _separate(self, paths: Paths) -> list[Group]:
        """Every row by itself: its keys in position order, padded to a length that its position alone decides."""
        alike: dict[int, list[tuple[int, IntArray]]] = {}
        for row, path in paths:
            alike.setdefault(-(-len(path) // _KEY_BUCKET) * _KEY_BUCKET, []).append((row, path))
        return [self._separate_group(length, rows) for length, rows in alike.items()]

    def _separate_group(self, length: int, rows: list[tuple[int, IntArray]]) -> Group:
        index = np.full((len(rows), length), SCRATCH_SLOT, np.int64)
        mask = np.full((len(rows), length), -np.inf, np.float32)
        for i, (_, path) in enumerate(rows):
            index[i, : len(path)] = path
            mask[i, : len(path)] = 0.0
        return Group([row for row, _ in rows], self._tensor(index), self._tensor(mask).to(self._pool.data.dtype))

    def _tensor(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._pool.data.is_cpu else tensor.to(self._pool.data.device)


def _padded(values: "IntArray | Longs", start: int, stop: int, padding: int) -> Longs:
    """Padding rows are token 0 at position 0 and write to the scratch slot. Without any it may be a view, for reading."""
    if padding == 0:
        return values[start:stop].astype(np.int64, copy=False)
    padded = np.full(stop - start + padding, SCRATCH_SLOT, np.int64)
    padded[: stop - start] = values[start:stop]
    return padded


def _are_few(rows: SequenceRows) -> bool:
    """Whether a sequence's rows attend sooner one by one. A single one always does: torch reads its keys no faster."""
    n = len(rows.tokens)
    return n == 1 or n * (rows.prefix + len(rows.tree_slots)) <= _FEW


@compiled
def _bias(seen: BoolArray, fold: int, rows: int, before: int) -> FloatArray:
    """0 where keys are seen, else -inf, for each of `fold` heads [fold x rows, before + columns].

    seen: [n, columns], of the first n rows; the others see everything, and all see the keys before the columns.
    """
    hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
    out = np.zeros((fold * rows, before + seen.shape[1]), np.float32)
    for head in range(fold):
        out[head * rows : head * rows + len(seen), before:] = hidden
    return out


@compiled
def _consecutive(slots: IntArray, first: int) -> bool:
    return bool((slots == np.arange(first, first + len(slots))).all())


def _in_window(rows: SequenceRows, window: int) -> tuple[int, BoolArray]:
    """How many of a sequence's first slots no row sees, and which of the others each row does [n, slots - skipped]."""
    seen = np.pad(rows.visible, ((0, 0), (rows.prefix, 0)), constant_values=True)
    ends = np.cumsum(seen, axis=1)  # a slot on a row's path is at position ends - 1, the row at the last of them
    seen &= ends > ends[:, -1:] - window
    skipped = min(max(int(ends[:, -1].min()) - window, 0), rows.prefix)
    return skipped, seen[:, skipped:]
