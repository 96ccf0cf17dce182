"""Attention over the KV pool on GPUs. What rows see is read on the device, so that a recorded pass does for any lengths.

Rows of a sequence are computed in blocks, with all query heads that share a KV head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from engine import gpu_kernels
from engine.attention import Heads, Layout, Longs, SequenceRows
from engine.kv import PAGE, SCRATCH_SLOT
from engine.types import FloatArray, IntArray

_KEYS = 64  # that a program reads at once, if a key has 256 bytes at most; else half of it: shared memory is small
_NARROW, _WIDE = 16, 64  # a block's rows times the query heads that share a KV head
_FEW = 16  # rows of a sequence that narrow blocks are for
_FIELDS = 7  # of a block: first row, rows, prefix, the place of its pages, tree slots, their place, that of its mask
_PROGRAMS = 264  # that keep a GPU busy, about


class Places:
    """Where things stand among the numbers, int32, that a pass of so many rows is told; pages, slots and masks follow."""

    def __init__(self, rows: int) -> None:
        self.keys = slice(0, 2 * rows)  # int64
        self.tokens, self.positions, self.write, self.temperatures = (
            slice(i * rows, (i + 1) * rows) for i in range(2, 6)
        )
        self.blocks = slice(6 * rows, (6 + _FIELDS) * rows)
        self.end = self.blocks.stop


def is_wide(layout: Layout) -> bool:
    """Whether large blocks are worth it."""
    return any(len(rows.tokens) > _FEW for rows in layout.batch)


def room(batch: Sequence[SequenceRows], rows: int) -> int:
    """How many numbers `tell` needs at most."""
    pages = sum(-(-each.prefix // PAGE) for each in batch)
    trees = sum(len(each.tree_slots) + -(-each.visible.size // 4) for each in batch)
    return Places(rows).end + pages + trees


def tell(layout: Layout, rows: int, block_rows: int, out: IntArray) -> int:
    """Writes what a pass over a layout is told; returns how many numbers that is.

    rows: those behind the layout's are padding, which sees nothing and writes to the scratch slot. out: of `room`.
    """
    at, count = Places(rows), layout.rows
    for place, values in ((at.tokens, layout.tokens), (at.positions, layout.positions), (at.write, layout.slots)):
        out[place][:count] = values
        out[place][count:] = SCRATCH_SLOT
    blocks = out[at.blocks].reshape(rows, _FIELDS)
    used, end = 0, at.end
    for each, first in zip(layout.batch, layout.starts, strict=True):
        tree, n = len(each.tree_slots), len(each.tokens)
        pages = each.lease.slots[: each.prefix : PAGE] // PAGE
        slots = end + len(pages)
        visible = slots + tree
        out[end:slots], out[slots:visible] = pages, each.tree_slots
        end = visible + -(-n * tree // 4)
        out[visible:end].view(np.uint8)[: n * tree] = each.visible.reshape(-1)
        firsts = np.arange(0, n, block_rows, dtype=np.int32)
        own = blocks[used : used + len(firsts)]
        own[:] = (0, 0, each.prefix, slots - len(pages), tree, slots, 4 * visible)
        own[:, 0], own[:, 1], own[:, 6] = first + firsts, np.minimum(block_rows, n - firsts), own[:, 6] + firsts * tree
        used += len(firsts)
    padding = np.arange(0, rows - count, block_rows, dtype=np.int32)
    own = blocks[used : used + len(padding)]
    own[:] = 0
    own[:, 0], own[:, 1] = count + padding, np.minimum(block_rows, rows - count - padding)
    blocks[used + len(padding) :, 1] = 0
    return end


def tell_choices(rows: int, wanted: Longs, temperatures: FloatArray, keys: Longs, out: IntArray) -> None:
    """Writes the temperatures of the wanted rows, 0 for others, and the keys of their noise, if there are any."""
    at = Places(rows)
    divisors = out[at.temperatures].view(np.float32)
    divisors[:] = 0.0
    divisors[wanted] = temperatures
    if len(keys):
        out[at.keys].view(np.int64)[wanted] = keys


@dataclass(frozen=True, slots=True)
class DevicePart:
    """What one call of the model needs of the pool: in place of engine.attention.Part, where numbers are on a GPU."""

    heads: Heads
    data: torch.Tensor  # KVPool.data
    told: torch.Tensor  # int32, from `tell`
    rows: int
    wide: bool

    @property
    def block_rows(self) -> int:
        """Rows of a block at most."""
        return max(1, self._size // self.heads.fold)

    @property
    def _size(self) -> int:
        return max(_WIDE if self.wide else _NARROW, int(triton.next_power_of_2(self.heads.fold)))

    @property
    def _splits(self) -> int:
        """Programs that share the keys of a block."""
        blocks = max(1, self.rows // (4 * self.block_rows)) if self.wide else max(2, self.rows // 4)
        return int(triton.next_power_of_2(max(1, min(32, _PROGRAMS // (blocks * self.heads.kv)))))

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the rows' own keys and values, each [kv_heads, rows, head_dim]."""
        store, dim = self.data[layer], self.heads.dim
        assert key.stride(-1) == value.stride(-1) == 1
        gpu_kernels.store[(self.rows, self.heads.kv)](
            key, value, store, self.told[Places(self.rows).write],
            *key.stride()[:2], *value.stride()[:2], *store.stride()[:2],
            DIM=dim, WIDTH=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See engine.attention.Part.attend; a window is at least as long as a step's trees."""
        kv, fold, dim, windows = self.heads
        at, store, window = Places(self.rows), self.data[layer], windows[layer]
        size, splits, width = self._size, self._splits, int(triton.next_power_of_2(dim))
        assert query.stride(-1) == 1
        parts = query.new_empty((self.rows, kv * fold, splits, dim), dtype=torch.float32)
        sums = query.new_empty((self.rows, kv * fold, splits, 2), dtype=torch.float32)
        out = query.new_empty((self.rows, kv * fold, dim))
        shape: Any = dict(DIM=dim, WIDTH=width, SPLITS=splits)
        gpu_kernels.attend[(self.rows, kv, splits)](
            query, store, self.told, self.told.view(torch.uint8), parts, sums,
            at.blocks.start, at.positions.start, dim**-0.5 if scale is None else scale, cap or 1.0, window or 0,
            *query.stride()[:2], *store.stride()[:2],
            **shape, FOLD=fold, SIZE=size, FIELDS=_FIELDS, PAGE=PAGE,
            KEYS=_KEYS if width * query.element_size() <= 256 else _KEYS // 2,
            CAPPED=bool(cap), WINDOWED=window is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
        gpu_kernels.join[(self.rows, kv * fold)](
            parts, sums, out, query if sinks is None else sinks, **shape, SINKS=sinks is not None, num_warps=1
        )  # fmt: skip
        return out
