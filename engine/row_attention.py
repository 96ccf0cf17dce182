"""Attention of single rows on CPUs: each over the slots of its own path, all rows of a layer in one compiled call.

One call of torch's attention for every sequence costs more than the arithmetic of a few rows, and one call for all
sequences copies their keys. A row's bits depend on its own path alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from engine.compiled import compiled, exponential, read_row_ahead, widened
from engine.kv import numbers_of
from engine.types import BoolArray, FloatArray, IntArray

_NOTHING = np.zeros(0, np.int32)
_AT_ONCE = 8  # values
# Keys or values; with 8 to 32 many sequences take a quarter less time than with none (benchmarks/README.md).
_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Paths:
    """What some rows of a pass see: `rows[i]` sees slots[starts[i] : starts[i + 1]], its own among them."""

    rows: IntArray  # [n]
    slots: IntArray  # of all paths, one after the other
    starts: IntArray  # [n + 1]

    @classmethod
    def of(cls, paths: Sequence[tuple[int, IntArray]]) -> "Paths":
        """paths: rows of the pass, each with the slots that it sees, in position order."""
        rows = np.array([row for row, _ in paths], np.int32)
        starts = np.array(list(accumulate((len(path) for _, path in paths), initial=0)), np.int32)
        return cls(rows, np.concatenate([_NOTHING, *(path for _, path in paths)]), starts)

    @classmethod
    def below(cls, prefix: IntArray, tree_slots: IntArray, visible: BoolArray, first: int) -> "Paths":
        """Rows first, first + 1 and so on, which see all of `prefix` and the `tree_slots` that theirs of `visible` names."""
        return cls(*_below(prefix, tree_slots, visible, first))

    @classmethod
    def joined(cls, parts: Sequence["Paths"]) -> "Paths":
        """All paths of several."""
        if len(parts) == 1:
            return parts[0]
        return cls.of([path for part in parts for path in part])

    def __iter__(self) -> Iterator[tuple[int, IntArray]]:
        """Each row with the slots that it sees."""
        for i, row in enumerate(self.rows.tolist()):
            yield row, self.slots[self.starts[i] : self.starts[i + 1]]

    def attend(
        self,
        query: torch.Tensor,
        store: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Writes these rows of `out` [rows of the pass, heads, head_dim], float32 or bfloat16 as everything.

        query: [heads, rows of the pass, head_dim]; store: a layer's keys and values [2, kv_heads, slots, head_dim].
        scale, cap, sinks: as for Part.attend.
        """
        keys, values = numbers_of(store)
        heads = np.full(len(query), -np.inf, np.float32) if sinks is None else sinks.float().numpy()
        queries = query.transpose(0, 1).contiguous().float().numpy()
        answers = out.float()
        paths = self.rows, self.slots, self.starts
        attend_rows(queries, keys, values, *paths, scale, float(cap or 0.0), heads, answers.numpy())
        if answers is not out:
            out.copy_(answers)


@compiled
def _below(
    prefix: IntArray, tree_slots: IntArray, visible: BoolArray, first: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The fields of Paths; see Paths.below."""
    count, before = len(visible), len(prefix)
    starts = np.zeros(count + 1, np.int32)
    for i in range(count):
        starts[i + 1] = starts[i] + before + visible[i].sum()
    slots = np.empty(starts[count], np.int32)
    for i in range(count):
        at = starts[i]
        slots[at : at + before] = prefix
        at += before
        for column in range(len(tree_slots)):
            if visible[i, column]:
                slots[at] = tree_slots[column]
                at += 1
    return np.arange(first, first + count).astype(np.int32), slots, starts


@partial(compiled, long=True)
def attend_rows(
    query: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    rows: IntArray,
    slots: IntArray,
    starts: IntArray,
    scale: float,
    cap: float,
    sinks: FloatArray,
    out: FloatArray,
) -> None:
    """query: [rows of the pass, heads or more, head_dim]; keys, values: [kv_heads, slots, head_dim], of numbers_of.

    cap: 0 for none.

    sinks: [heads], -inf for none; out: [rows of the pass, heads, head_dim].

    Slots are indices as np.uint32: of a signed one numba would ask whether it counts from the end.
    """
    kv_heads = len(keys)
    fold = len(sinks) // kv_heads  # query heads that share a KV head: they read each key once
    asked, answered = query.reshape(-1, query.shape[2]), out.reshape(-1, out.shape[2])
    for i in range(len(rows)):
        path = slots[starts[i] : starts[i + 1]]
        weights = np.empty((fold, len(path)), np.float32)
        for kv in range(kv_heads):
            first, to = rows[i] * query.shape[1] + kv * fold, rows[i] * out.shape[1] + kv * fold
            _score(asked[first : first + fold], keys[kv], path, weights)
            for head in range(fold):
                _soften(weights[head], np.float32(scale), np.float32(cap), sinks[kv * fold + head])
            _add_up(weights, values[kv], path, answered[to : to + fold])


@partial(compiled, long=True)
def _score(query: FloatArray, keys: FloatArray, path: IntArray, out: FloatArray) -> None:
    """query: [heads, head_dim]; keys: [slots, head_dim]; out: [heads, len(path)]."""
    for at in range(len(path)):
        if at + _AHEAD < len(path):
            read_row_ahead(keys, path[at + _AHEAD])
        key = keys[np.uint32(path[at])]
        for head in range(len(query)):
            score = np.float32(0)
            for d in range(query.shape[1]):
                score += query[head, d] * widened(key[d])
            out[head, at] = score


@partial(compiled, long=True)
def _soften(scores: FloatArray, scale: np.float32, cap: np.float32, sink: np.float32) -> None:
    """Turns scores into weights, in place; the sink takes its share."""
    for i in range(len(scores)):
        scores[i] *= scale
    if cap:
        for i in range(len(scores)):
            scores[i] = cap * np.tanh(scores[i] / cap)
    top = sink
    for i in range(len(scores)):
        top = max(top, scores[i])
    for i in range(len(scores)):
        scores[i] = exponential(scores[i] - top)
    total = exponential(sink - top)
    for i in range(len(scores)):
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@partial(compiled, long=True)
def _add_up(weights: FloatArray, values: FloatArray, path: IntArray, out: FloatArray) -> None:
    """Weighted values: weights [heads, len(path)], values [slots, head_dim], out [heads, head_dim]."""
    whole = len(path) - len(path) % _AT_ONCE
    out[:] = 0
    for at in range(0, whole, _AT_ONCE):  # as many as compilers see not to overlap with `out`
        for later in range(at + _AHEAD, min(at + _AHEAD + _AT_ONCE, len(path))):
            read_row_ahead(values, path[later])
        a, b = values[np.uint32(path[at])], values[np.uint32(path[at + 1])]
        c, d = values[np.uint32(path[at + 2])], values[np.uint32(path[at + 3])]
        e, f = values[np.uint32(path[at + 4])], values[np.uint32(path[at + 5])]
        g, h = values[np.uint32(path[at + 6])], values[np.uint32(path[at + 7])]
        for head in range(len(out)):
            result, own = out[head], weights[head, at : at + _AT_ONCE]
            for i in range(len(result)):
                low = own[0] * widened(a[i]) + own[1] * widened(b[i]) + own[2] * widened(c[i]) + own[3] * widened(d[i])
                high = own[4] * widened(e[i]) + own[5] * widened(f[i]) + own[6] * widened(g[i])
                result[i] += low + high + own[7] * widened(h[i])
    for at in range(whole, len(path)):
        value = values[np.uint32(path[at])]
        for head in range(len(out)):
            for i in range(len(value)):
                out[head, i] += weights[head, at] * widened(value[i])
