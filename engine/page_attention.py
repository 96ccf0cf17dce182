"""Attention of a compiled pass: products of queries with whole pages of the KV pool, by the kernels of its linear layers.

A paged pool (KVPool) keeps a page's keys feature by feature and its values slot by slot, so that pages are read where they
are, by all rows of a sequence at once. Position p of a path is always at place p % PAGE of a block: full pages come first;
where a path goes on in slots of other places, blocks are copied. So a row's bits depend on its own path alone,
as long as all numbers there are finite: what a row doesn't see has the weight 0.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from engine.compiled import compiled, exponential, put
from engine.kv import PAGE
from engine.torch_calls import ROWS, leave, multiply
from engine.types import BoolArray, FloatArray, IntArray

_long = partial(compiled, long=True)
_HEADER = 4
_NOTHING = np.zeros(0, np.int32)


@cache
def consistent(narrow: bool, dim: int, fold: int) -> bool:
    """Whether a row of these products has the same bits beside any number of others, as far as a few tell.

    narrow: in bfloat16; dim: of heads; fold: query heads that share a KV head.
    """
    kind, most = torch.bfloat16 if narrow else torch.float32, max(ROWS, fold)
    if narrow and dim % 2:
        return False
    same = True
    for inputs, outputs, add in ((dim, PAGE, False), (PAGE, dim, False), (PAGE, dim, True)):
        x, block = (torch.arange(1.0 * rows * inputs).sin().to(kind) for rows in (most, outputs))
        found = [torch.ones(most, outputs) for _ in range(most)]
        for rows, out in enumerate(found, 1):
            addresses = x.data_ptr(), rows, inputs, block.data_ptr(), outputs, add, out.data_ptr()
            multiply(*addresses, outputs, narrow)
        same = same and all(torch.equal(out[:rows], found[-1][:rows]) for rows, out in enumerate(found, 1))
    leave()
    return same


def plan(sequences: Sequence[tuple[IntArray, int, IntArray, BoolArray, int]]) -> IntArray:
    """What rows of a pass see, for `attend`.

    Of each sequence: its slots in position order, how many of them all rows see, tree slots, which of those each row sees
    [rows, tree slots] (ancestors come first, its own last), and which row of the pass is its first.
    """
    plans = [plan_one(*sequence) for sequence in sequences]
    return plans[0] if len(plans) == 1 else np.concatenate([_NOTHING, *plans])


@compiled
def plan_one(slots: IntArray, prefix: int, tree_slots: IntArray, visible: BoolArray, first: int) -> IntArray:
    """One sequence's, as `_read` reads it. Rows are put in order by branches: paths behind the full pages, of which each row
    sees a beginning.
    """
    rows, full = len(visible), prefix // PAGE
    rest, own = prefix - full * PAGE, slots[full * PAGE :]
    branch_of, lengths = np.empty(rows, np.int32), np.empty(rows, np.int32)
    paths, ends = np.empty((rows, rest + len(tree_slots)), np.int32), np.zeros(rows, np.int32)
    path = np.empty(rest + len(tree_slots), np.int32)
    path[:rest] = own[:rest]
    branches = 0
    for row in range(rows):
        length = rest
        for column in range(len(tree_slots)):
            if visible[row, column]:
                path[length] = tree_slots[column]
                length += 1
        branch = 0
        while branch < branches and not _begin_alike(paths[branch, : ends[branch]], path[:length]):
            branch += 1
        branches = max(branches, branch + 1)
        for at in range(ends[branch], length):
            paths[branch, at] = path[at]
        ends[branch] = max(ends[branch], length)
        branch_of[row], lengths[row] = branch, length
    blocks, copied = 0, 0
    in_place = np.zeros(branches, np.bool_)
    for branch in range(branches):
        in_place[branch] = ends[branch] <= len(own) and _begin_alike(paths[branch, : ends[branch]], own)
        blocks += _pages(ends[branch])
        copied += 0 if in_place[branch] else _pages(ends[branch])
    out = np.empty(_HEADER + full + 2 * rows + 2 * branches + blocks + copied * (1 + PAGE), np.int32)
    out[0], out[1], out[2], out[3] = rows, full, branches, copied
    out[_HEADER : _HEADER + full] = slots[: full * PAGE : PAGE] // PAGE
    ordered = _HEADER + full
    table = ordered + 2 * rows
    block, copy = table + 2 * branches, len(out) - copied * (1 + PAGE)
    out[copy:] = -1
    copied = 0
    for branch in range(branches):
        count = 0
        for row in range(rows):
            if branch_of[row] == branch:
                out[ordered], out[ordered + rows] = first + row, lengths[row]
                ordered += 1
                count += 1
        out[table + 2 * branch], out[table + 2 * branch + 1] = count, _pages(ends[branch])
        for at in range(0, ends[branch], PAGE):
            page = own[at] // PAGE if at < len(own) else -1
            if not in_place[branch]:
                out[copy] = page
                for place in range(at, min(at + PAGE, ends[branch])):
                    if place >= len(own) or paths[branch, place] != own[place]:
                        out[copy + 1 + place - at] = paths[branch, place]
                copy += 1 + PAGE
                copied += 1
                page = -copied
            out[block] = page
            block += 1
    return out


@compiled
def _begin_alike(a: IntArray, b: IntArray) -> bool:
    """Whether one is a beginning of the other."""
    at, end = 0, min(len(a), len(b))
    while at < end and a[at] == b[at]:
        at += 1
    return at == end


@compiled
def _pages(places: int) -> int:
    return (places + PAGE - 1) // PAGE


class _Sequence(NamedTuple):
    """What some rows of one sequence see."""

    pages: IntArray  # that all of them see
    rows: IntArray  # [n], branch by branch
    lengths: IntArray  # [n]: how many places each sees behind these pages
    branches: IntArray  # [m, 2]: how many of the rows each branch has, and how many blocks
    blocks: IntArray  # of the branches, one after the other: a page, or -1 - i for the i-th copied block
    copies: IntArray  # [copied blocks, 1 + PAGE]: a page, and which slots are at its places instead; -1 for none


@_long
def _read(plan: IntArray, at: int) -> tuple[_Sequence, int]:
    """The sequence whose plan begins there, and where that ends."""
    rows, full, branches, copied = plan[at], plan[at + 1], plan[at + 2], plan[at + 3]
    at += _HEADER
    pages, at = plan[at : at + full], at + full
    order, at = plan[at : at + rows], at + rows
    lengths, at = plan[at : at + rows], at + rows
    table, at = plan[at : at + 2 * branches].reshape(branches, 2), at + 2 * branches
    blocks = plan[at : at + table[:, 1].sum()]
    at += len(blocks)
    copies, at = plan[at : at + copied * (1 + PAGE)].reshape(copied, 1 + PAGE), at + copied * (1 + PAGE)
    return _Sequence(pages, order, lengths, table, blocks, copies), at


@_long
def store(row: FloatArray, keys: bool, slot: int, pages: FloatArray) -> None:
    """Writes one head's key or value [head_dim] to its pages in the pool, flat."""
    start, step, pair = _places(keys, slot, len(row), pages.itemsize)
    for d in range(len(row)):
        put(pages, start + (d // pair) * step + d % pair if keys else start + d * step, row[d])


@_long
def _places(keys: bool, slot: int, dim: int, size: int) -> tuple[int, int, int]:
    """Where a slot's features are in a head's pages: from where on, and how far one (of keys: pair) is from the next.

    size: of a number in bytes. Kernels for bfloat16 take what is added up in pairs. Returns also 2 for those, else 1.
    """
    pair = 2 if size == 2 else 1
    page, place = slot // PAGE * PAGE * dim, slot % PAGE
    if keys:
        return page + place * pair, PAGE * pair, pair
    return page + place // pair * dim * pair + place % pair, pair, pair


@_long
def _copy(keys: bool, pages: FloatArray, slot: int, to: int, dim: int, out: FloatArray) -> None:
    """A slot of a head's pages to the place `to` of copied blocks."""
    start, step, pair = _places(keys, slot, dim, pages.itemsize)
    out_start = _places(keys, to, dim, pages.itemsize)[0]
    for at in range(dim // pair if keys else dim):
        for each in range(pair if keys else 1):
            out[out_start + at * step + each] = pages[start + at * step + each]


@_long
def attend(
    qkv: FloatArray, keys: FloatArray, values: FloatArray, plan: IntArray, scale: float, out: FloatArray
) -> None:
    """qkv: [rows of the pass, heads or more, head_dim]; keys, values: a layer's, [kv_heads, pages, PAGE x head_dim].

    out: [rows of the pass, heads, head_dim]; rows that are in no plan are not written.
    """
    at = 0
    while at < len(plan):
        sequence, at = _read(plan, at)
        _attend(qkv, keys, values, sequence, scale, out)


@_long
def _attend(
    qkv: FloatArray, keys: FloatArray, values: FloatArray, sequence: _Sequence, scale: float, out: FloatArray
) -> None:
    """As many rows at a time as the kernels take; query heads that share a KV head are rows of a product."""
    dim, kv_heads, blocks = out.shape[2], len(keys), len(sequence.pages) + sequence.branches[:, 1].max()
    fold = out.shape[1] // kv_heads
    at_once = min(len(sequence.rows), max(1, ROWS // fold))
    places = keys.shape[2] // dim  # PAGE, but compilers don't know: of loops so short they would make no vectors
    copied = len(sequence.copies) * PAGE * dim
    own_keys, own_values = np.zeros((kv_heads, copied), keys.dtype), np.zeros((kv_heads, copied), keys.dtype)
    for kv in range(kv_heads):
        _copy_blocks(True, keys[kv].reshape(-1), sequence.copies, dim, own_keys[kv])
        _copy_blocks(False, values[kv].reshape(-1), sequence.copies, dim, own_values[kv])
    queries, answers = np.empty((at_once * fold, dim), keys.dtype), np.empty((at_once * fold, dim), np.float32)
    scores = np.empty((blocks, at_once * fold, places), np.float32)
    weights, lanes = np.empty(scores.shape, keys.dtype), np.empty(places, np.float32)
    for start in range(0, len(sequence.rows), at_once):
        stop = min(start + at_once, len(sequence.rows))
        rows, lengths = sequence.rows[start:stop], sequence.lengths[start:stop]
        products = _products(sequence, start, stop)
        for kv in range(kv_heads):
            for i in range(len(rows) * fold):
                row, to = qkv[rows[i // fold], kv * fold + i % fold], queries[i]
                for d in range(dim):
                    put(to, d, row[d])
            _score(queries, fold, keys[kv], own_keys[kv], products, scores)
            for i in range(len(rows) * fold):
                _weigh(scores, i, len(sequence.pages) * PAGE + lengths[i // fold], scale, weights, lanes)
            _add_up(weights, fold, values[kv], own_values[kv], products, answers)
            for i in range(len(rows) * fold):
                out[rows[i // fold], kv * fold + i % fold] = answers[i]


@_long
def _copy_blocks(keys: bool, pages: FloatArray, copies: IntArray, dim: int, out: FloatArray) -> None:
    """One head's copied blocks; pages, out: flat."""
    size = PAGE * dim
    for block in range(len(copies)):
        page = copies[block, 0]
        if page >= 0:
            out[block * size : (block + 1) * size] = pages[page * size : (page + 1) * size]
        for place in range(PAGE):
            slot = copies[block, 1 + place]
            if slot >= 0:
                _copy(keys, pages, slot, block * PAGE + place, dim, out)


@_long
def _products(sequence: _Sequence, start: int, stop: int) -> IntArray:
    """The blocks that rows start..stop see [n, 4]: the how many-th of its rows' blocks, which (see `_Sequence.blocks`), the
    first of the rows that see it, counted from start, and how many do.
    """
    found = np.empty((len(sequence.pages) + len(sequence.blocks), 4), np.int32)
    count = 0
    for page in sequence.pages:
        found[count] = np.array([count, page, 0, stop - start], np.int32)
        count += 1
    first, block = 0, 0
    for branch in range(len(sequence.branches)):
        rows, blocks = sequence.branches[branch]
        low, high = max(start, first), min(stop, first + rows)
        for at in range(blocks if low < high else 0):
            number = sequence.blocks[block + at]
            found[count] = np.array([len(sequence.pages) + at, number, low - start, high - low], np.int32)
            count += 1
        first, block = first + rows, block + blocks
    return found[:count]


@_long
def _score(
    queries: FloatArray, fold: int, keys: FloatArray, own: FloatArray, products: IntArray, out: FloatArray
) -> None:
    """queries: [rows x fold, head_dim]; keys: a head's pages; own: its copied blocks.

    out: [blocks, rows x fold, PAGE].
    """
    dim, size, narrow = queries.shape[1], queries.itemsize, queries.itemsize == 2
    asked, to = np.int64(queries.ctypes.data), np.int64(out.ctypes.data)
    pages, copies = np.int64(keys.ctypes.data), np.int64(own.ctypes.data)
    for block, number, first, count in products:
        page = pages + number * PAGE * dim * size if number >= 0 else copies - (number + 1) * PAGE * dim * size
        result = to + (block * out.shape[1] + first * fold) * PAGE * 4
        multiply(asked + first * fold * dim * size, count * fold, dim, page, PAGE, False, result, PAGE, narrow)


@_long
def _add_up(
    weights: FloatArray, fold: int, values: FloatArray, own: FloatArray, products: IntArray, out: FloatArray
) -> None:
    """weights: [blocks, rows x fold, PAGE]; values: a head's pages; own: its copied blocks.

    out: [rows x fold, head_dim].
    """
    dim, size, narrow = out.shape[1], weights.itemsize, weights.itemsize == 2
    shares, to = np.int64(weights.ctypes.data), np.int64(out.ctypes.data)
    pages, copies = np.int64(values.ctypes.data), np.int64(own.ctypes.data)
    for block, number, first, count in products:
        page = pages + number * PAGE * dim * size if number >= 0 else copies - (number + 1) * PAGE * dim * size
        some = shares + (block * weights.shape[1] + first * fold) * PAGE * size
        multiply(some, count * fold, PAGE, page, dim, block > 0, to + first * fold * dim * 4, dim, narrow)


@_long
def _weigh(scores: FloatArray, query: int, length: int, scale: float, weights: FloatArray, lanes: FloatArray) -> None:
    """Softmax of a query's first `length` places; scores, written too, and weights: [blocks, queries, PAGE].

    lanes: [PAGE], for maxima and sums of as many places at a time as processors take.
    """
    seen, factor = (length + PAGE - 1) // PAGE, np.float32(scale)
    for place in range(length - (seen - 1) * PAGE, PAGE):
        scores[seen - 1, query, place] = -np.inf
    lanes[:] = -np.inf
    for block in range(seen):
        row = scores[block, query]
        for place in range(len(lanes)):
            lanes[place] = max(lanes[place], row[place])
    top, total = np.float32(-np.inf), np.float32(0)
    for place in range(len(lanes)):
        top = max(top, lanes[place])
    lanes[:] = 0
    for block in range(seen):
        row = scores[block, query]
        for place in range(len(row)):
            row[place] = exponential((row[place] - top) * factor)
        for place in range(len(lanes)):
            lanes[place] += row[place]
    for place in range(len(lanes)):
        total += lanes[place]
    for block in range(seen):
        row, to = scores[block, query], weights[block, query]
        for place in range(len(row)):
            put(to, place, row[place] / total)
    for block in range(seen, len(weights)):
        weights[block, query] = 0
