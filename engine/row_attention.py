"""Attention of single rows on CPUs: each over the slots of its own path, all rows of a layer in one compiled call.

One call of torch's attention for every sequence costs more than the arithmetic of a few rows, and one call for all
sequences copies their keys. A row's bits depend on its own path alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.compiled import compiled
from engine.types import FloatArray, IntArray


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
        starts = np.cumsum([0, *(len(path) for _, path in paths)], dtype=np.int32)
        return cls(rows, np.concatenate([path for _, path in paths]), starts)

    def attend(
        self,
        query: torch.Tensor,
        store: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Writes these rows of `out` [rows of the pass, heads, head_dim]; everything is float32.

        query: [heads, rows of the pass, head_dim]; store: a layer's keys and values [2, kv_heads, slots, head_dim].
        scale, cap, sinks: as for Part.attend.
        """
        keys, values = store.numpy()
        heads = np.full(len(query), -np.inf, np.float32) if sinks is None else sinks.float().numpy()
        queries = query.transpose(0, 1).contiguous().numpy()
        _attend(queries, keys, values, self.rows, self.slots, self.starts, scale, float(cap or 0.0), heads, out.numpy())


@partial(compiled, long=True)
def _attend(
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
    """query, out: [rows of the pass, heads, head_dim]; keys, values: [kv_heads, slots, head_dim]; cap: 0 for none.

    Slots are indices as np.uint32: of a signed one numba would ask whether it counts from the end.
    """
    kv_heads, dim = len(keys), query.shape[2]
    fold = query.shape[1] // kv_heads  # query heads that share a KV head: they read each key once
    weights = np.empty((fold, np.diff(starts).max()), np.float32)
    for i in range(len(rows)):
        path = slots[starts[i] : starts[i + 1]]
        for kv in range(kv_heads):
            asked = query[rows[i], kv * fold : (kv + 1) * fold]
            for at in range(len(path)):
                key = keys[kv, np.uint32(path[at])]
                for head in range(fold):
                    score = np.float32(0)
                    for d in range(dim):
                        score += asked[head, d] * key[d]
                    weights[head, at] = score
            for head in range(fold):
                _softmax(weights[head, : len(path)], np.float32(scale), np.float32(cap), sinks[kv * fold + head])
            result = out[rows[i], kv * fold : (kv + 1) * fold]
            result[:] = 0
            for at in range(len(path)):
                value = values[kv, np.uint32(path[at])]
                for head in range(fold):
                    weight = weights[head, at]
                    for d in range(dim):
                        result[head, d] += weight * value[d]


@partial(compiled, long=True)
def _softmax(scores: FloatArray, scale: np.float32, cap: np.float32, sink: np.float32) -> None:
    """Turns scores into weights, in place; the sink takes its share."""
    top = sink
    for i in range(len(scores)):
        score = scores[i] * scale
        if cap:
            score = cap * np.tanh(score / cap)
        scores[i] = score
        top = max(top, score)
    total = np.exp(sink - top)
    for i in range(len(scores)):
        scores[i] = np.exp(scores[i] - top)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total
