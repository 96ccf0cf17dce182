"""Attention of a compiled pass: products of queries with whole pages of the KV pool, by the kernels of its linear layers.

A paged pool (KVPool) keeps a page's keys feature by feature and its values slot by slot, so that pages are read where they
are, by all rows of a sequence at once: first the full pages that all of them see. Behind those, PAGE positions of a path are
in one block, a page again where their slots are in its places. Others are copied: paths of a tree share a block, each with
slots between its own that it doesn't see, as far as there is room. Those have the weight 0, and what a row sees is in one
block, in the same order and pairs whatever else is there: so its bits depend on its own path alone, as long as all numbers
of the sequence and its tree are finite.

Guesses need no such bits: for them all pages are read where they are, and nothing is copied (`in_place`).
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.compiled import compiled, exponential, put
from engine.kv import PAGE
from engine.torch_calls import ROWS, leave, multiply
from engine.types import BoolArray, FloatArray, IntArray

_long = partial(compiled, long=True)
_HEADER = 6
_WORD = 4  # bytes
_PAGE = np.uint32(PAGE)
_NOTHING = np.zeros(0, np.int32)


@cache
def consistent(narrow: bool, dim: int, fold: int) -> bool:
    """Whether a row of these products has the same bits beside any number of others, and with its places of a block moved
    apart, as far as a few tell.

    narrow: in bfloat16; dim: of heads; fold: query heads that share a KV head.
    """
    kind, most = torch.bfloat16 if narrow else torch.float32, max(ROWS, fold)
    if narrow and dim % 2:
        return False
    same = True
    for inputs, outputs, add in ((dim, PAGE, False), (PAGE, dim, False), (PAGE, dim, True)):
        x, block = (torch.arange(1.0 * rows * inputs).sin().to(kind) for rows in (most, outputs))
        found = [_multiplied(x, rows, block, outputs, add, narrow) for rows in range(1, most + 1)]
        same = same and all(torch.equal(out, found[-1][:rows]) for rows, out in enumerate(found, 1))
    pairs = torch.arange(PAGE // 2)
    x, block = (torch.arange(1.0 * rows * PAGE).sin().to(kind).view(rows, -1, 2) for rows in (ROWS, dim))
    x[:, len(pairs) // 2 :] = 0  # the others are moved between these, or before the last of these
    seen, others = pairs.chunk(2)
    for order in (torch.stack([seen, others], 1).flatten(), torch.cat([seen[:1], others, seen[1:]])):
        moved_x, moved = x[:, order].contiguous(), block.view(len(pairs), -1)[order]
        for rows, add in product((1, ROWS), (False, True)):
            found = [_multiplied(*those, dim, add, narrow) for those in ((x, rows, block), (moved_x, rows, moved))]
            same = same and torch.equal(*found)
    leave()
    return same


def _multiplied(x: torch.Tensor, rows: int, block: torch.Tensor, outputs: int, add: bool, narrow: bool) -> torch.Tensor:
    """Some first rows of x times a block, added to ones if asked for: [rows, outputs]."""
    out = torch.ones(rows, outputs)
    inputs = block.numel() // outputs
    multiply(
        x.data_ptr(), inputs, rows, inputs, block.data_ptr(), outputs, outputs, add, out.data_ptr(), outputs, narrow
    )
    return out


def plan(sequences: Sequence[tuple[IntArray, int, IntArray, BoolArray, int, bool]]) -> IntArray:
    """What rows of a pass see, for `attend`.

    Of each sequence: its slots in position order, how many of them all rows see, tree slots, which of those each row sees
    [rows, tree slots] (ancestors come first, its own last), which row of the pass is its first, and whether its slots are
    read in place: nothing is copied, but its rows' bits depend on where the slots of their paths are.
    """
    plans = [plan_one(*sequence) for sequence in sequences]
    return plans[0] if len(plans) == 1 else np.concatenate([_NOTHING, *plans])


@compiled
def plan_one(
    slots: IntArray, prefix: int, tree_slots: IntArray, visible: BoolArray, first: int, in_place: bool
) -> IntArray:
    """One sequence's, as `_read` reads it."""
    if in_place:
        return _in_place(slots, prefix, tree_slots, visible, first)
    rows, full = len(visible), prefix // PAGE
    rest, own = prefix - full * PAGE, slots[full * PAGE :]
    paths, lengths = np.empty((rows, rest + len(tree_slots)), np.int32), np.full(rows, rest, np.int32)
    for row in range(rows):
        paths[row, :rest] = own[:rest]
        for column in range(len(tree_slots)):
            if visible[row, column]:
                paths[row, lengths[row]] = tree_slots[column]
                lengths[row] += 1
    parts = _pages(lengths.max())
    places = np.full((rows, parts * PAGE), -1, np.int32)
    blocks = np.full((rows * parts, PAGE), -1, np.int32)
    ends, part_of, count = np.zeros(rows * parts, np.int32), np.empty(rows * parts, np.int32), 0
    for part in range(parts):
        block_of_part = count
        for row in range(rows):
            start, stop = part * PAGE, min(lengths[row], (part + 1) * PAGE)
            block, end = block_of_part, 0
            while start < stop and end == 0:
                end = _share(blocks[block], ends[block], paths[row, start:stop], places[row, start:stop])
                block += 1
            if start < stop:
                count, ends[block - 1], part_of[block - 1] = max(count, block), end, part
                places[row, start:stop] += (block - 1) * PAGE
    return _written(first, slots, full, lengths, places, blocks[:count], part_of)


@compiled
def _in_place(slots: IntArray, prefix: int, tree_slots: IntArray, visible: BoolArray, first: int) -> IntArray:
    """A plan whose blocks are all pages that any row sees a slot of; the committed slots are in the places of a page."""
    rows, full = len(visible), prefix // PAGE
    own = slots[full * PAGE : prefix]
    places = np.zeros((rows, len(own) + len(tree_slots)), np.int32)
    lengths = np.full(rows, len(own), np.int32)
    pages, count = np.empty(1 + len(tree_slots), np.int32), 0
    if len(own):
        pages[0], count = own[0] // PAGE, 1
        places[:, : len(own)] = np.arange(len(own))
    for column in range(len(tree_slots)):
        if visible[:, column].any():
            page, block = tree_slots[column] // PAGE, 0
            while block < count and pages[block] != page:
                block += 1
            pages[block], count = page, max(count, block + 1)
            for row in range(rows):
                if visible[row, column]:
                    places[row, lengths[row]] = block * PAGE + tree_slots[column] % PAGE
                    lengths[row] += 1
    out, at = _begun(first, slots, full, lengths, places[:, : lengths.max()].copy(), count, 0)
    out[at:] = pages[:count]
    return out


@compiled
def _share(block: IntArray, end: int, path: IntArray, places: IntArray) -> int:
    """Puts the slots of a path into a block that ends there, but for those it has, and writes which places they have.

    They are in the order of the path, and those in pairs that would be in a page: kernels may add up pair by pair. Returns
    where the block ends then; 0 if it has too little room, and nothing was put there.
    """
    pair = 0
    for at in range(0, len(path), 2):
        low, high = path[at], path[at + 1] if at + 1 < len(path) else -1
        while pair < end and not (block[pair] == low and (high < 0 or block[pair + 1] < 0 or block[pair + 1] == high)):
            pair += 2
        if pair == PAGE:
            return 0
        places[at] = pair
        if high >= 0:
            places[at + 1] = pair + 1
        pair += 2
        end = max(end, pair)
    for at in range(len(path)):
        block[places[at]] = path[at]
    return end


@compiled
def _written(
    first: int, slots: IntArray, full: int, lengths: IntArray, places: IntArray, blocks: IntArray, part_of: IntArray
) -> IntArray:
    """The plan; blocks [n, PAGE]: which slots are there, or -1; part_of: the how many-th page of a path each stands for."""
    own, count, copied = slots[full * PAGE :], len(blocks), 0
    in_place = np.empty(count, np.bool_)
    for block in range(count):
        start = part_of[block] * PAGE
        in_place[block] = _stand(blocks[block], own[start : start + PAGE])
        copied += not in_place[block]
    out, at = _begun(first, slots, full, lengths, places, count, copied)
    copy = at + count
    copied = 0
    for block in range(count):
        start = part_of[block] * PAGE
        page = own[start] // PAGE if start < len(own) else -1
        if not in_place[block]:
            out[copy] = page
            for place in range(PAGE):
                stands = start + place < len(own) and blocks[block, place] == own[start + place]
                out[copy + 1 + place] = -1 if stands else blocks[block, place]
            copy += 1 + PAGE
            copied += 1
            page = -copied
        out[at + block] = page
    return out


@compiled
def _begun(
    first: int, slots: IntArray, full: int, lengths: IntArray, places: IntArray, blocks: int, copied: int
) -> tuple[IntArray, int]:
    """A plan up to the numbers of its blocks, and where these go; blocks, copied: how many there are."""
    rows, columns = places.shape
    out = np.empty(_HEADER + full + rows * (1 + columns) + blocks + copied * (1 + PAGE), np.int32)
    out[0], out[1], out[2], out[3], out[4], out[5] = rows, first, full, columns, blocks, copied
    at = _HEADER
    out[at : at + full] = slots[: full * PAGE : PAGE] // PAGE
    at += full
    out[at : at + rows] = lengths
    at += rows
    out[at : at + rows * columns] = places.reshape(-1)
    return out, at + rows * columns


@compiled
def _stand(block: IntArray, page: IntArray) -> bool:
    """Whether all slots of a block are in their places in a page, given by its slots."""
    stand = True
    for place in range(PAGE):
        stand = stand and (block[place] < 0 or (place < len(page) and block[place] == page[place]))
    return stand


@compiled
def _pages(places: int) -> int:
    return (places + PAGE - 1) // PAGE


class _Sequence(NamedTuple):
    """What some rows of one sequence see."""

    first: int  # of its rows
    pages: IntArray  # that all of them see
    lengths: IntArray  # [n]: how many places each sees behind these pages
    places: IntArray  # [n, most places]: where they are, over all blocks
    blocks: IntArray  # of these places: a page, or -1 - i for the i-th copied block
    copies: IntArray  # [copied blocks, 1 + PAGE]: a page, and which slots are at its places instead; -1 for none


@_long
def _read(plan: IntArray, at: int) -> tuple[_Sequence, int]:
    """The sequence whose plan begins there, and where that ends."""
    rows, first, full, columns, blocks, copied = plan[at : at + _HEADER]
    at += _HEADER
    pages, at = plan[at : at + full], at + full
    lengths, at = plan[at : at + rows], at + rows
    places, at = plan[at : at + rows * columns].reshape(rows, columns), at + rows * columns
    numbers, at = plan[at : at + blocks], at + blocks
    copies, at = plan[at : at + copied * (1 + PAGE)].reshape(copied, 1 + PAGE), at + copied * (1 + PAGE)
    return _Sequence(first, pages, lengths, places, numbers, copies), at


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
    dim, kv_heads, full = out.shape[2], len(keys), len(sequence.pages)
    fold, count = out.shape[1] // kv_heads, len(sequence.lengths)
    at_once = min(count, max(1, ROWS // fold))
    places = keys.shape[2] // dim  # PAGE, but compilers don't know: of loops so short they would make no vectors
    sources, places_of = _moved(sequence.copies)
    own_keys = np.zeros((kv_heads, len(sequence.copies) * PAGE * dim), keys.dtype)
    own_values = np.zeros_like(own_keys)
    for kv in range(kv_heads):
        _copy_pages(keys[kv], sequence.copies, own_keys[kv])
        _copy_pages(values[kv], sequence.copies, own_values[kv])
        _copy_keys(_words(keys[kv].reshape(-1)), sources, places_of, dim * keys.itemsize // _WORD, _words(own_keys[kv]))
        _copy_values(
            _words(values[kv].reshape(-1)), sources, places_of, dim, _WORD // keys.itemsize, _words(own_values[kv])
        )
    blocks, straight = np.concatenate((sequence.pages, sequence.blocks)), _straight(sequence)
    queries, answers = np.empty((at_once * fold, dim), keys.dtype), np.empty((at_once * fold, dim), np.float32)
    scores = np.empty((len(blocks), at_once * fold, places), np.float32)
    weights, lanes = np.empty(scores.shape, keys.dtype), np.empty(places, np.float32)
    path = np.empty(sequence.places.shape[1], np.float32)
    for start in range(0, count, at_once):
        rows = min(at_once, count - start)
        first = sequence.first + start
        for kv in range(kv_heads):
            for i in range(rows * fold):
                asked, to = qkv[first + i // fold, kv * fold + i % fold], queries[i]
                for d in range(dim):
                    put(to, d, asked[d])
            _score(queries, rows * fold, keys[kv], own_keys[kv], blocks, scores)
            for i in range(rows * fold):
                row = start + i // fold
                seen = sequence.places[row, : sequence.lengths[row]]
                _weigh(scores, i, full, seen, straight[row], scale, weights, path, lanes)
            _add_up(weights, rows * fold, values[kv], own_values[kv], blocks, answers)
            for i in range(rows * fold):
                out[first + i // fold, kv * fold + i % fold] = answers[i]


@_long
def _straight(sequence: _Sequence) -> IntArray:
    """How many of each row's first places are those of their positions [n]."""
    found = np.zeros(len(sequence.lengths), np.int32)
    for row in range(len(found)):
        while found[row] < sequence.lengths[row] and sequence.places[row, found[row]] == found[row]:
            found[row] += 1
    return found


@_long
def _moved(copies: IntArray) -> tuple[IntArray, IntArray]:
    """Slots that are copied, and to which places over all copied blocks."""
    slots, places = np.empty(copies.size, np.int32), np.empty(copies.size, np.int32)
    count = 0
    for block in range(len(copies)):
        for place in range(PAGE):
            if copies[block, 1 + place] >= 0:
                slots[count], places[count] = copies[block, 1 + place], block * PAGE + place
                count += 1
    return slots[:count], places[:count]


@_long
def _copy_pages(pages: FloatArray, copies: IntArray, out: FloatArray) -> None:
    """What stays of a head's pages; out: copied blocks, flat."""
    size = pages.shape[1]
    for block in range(len(copies)):
        page = copies[block, 0]
        if page >= 0:
            out[block * size : (block + 1) * size] = pages[page]


@_long
def _words(numbers: FloatArray) -> Any:
    """Numbers as words of four bytes: one float32, or a pair in bfloat16."""
    return numbers.view(np.uint32)


@_long
def _copy_keys(pages: Any, slots: IntArray, places: IntArray, features: int, out: Any) -> None:
    """Slots of a head's pages to their places in copied blocks; all in words, of which a key has so many."""
    size = PAGE * features
    starts, ends = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        starts[i] = slots[i] // PAGE * size + slots[i] % PAGE
        ends[i] = places[i] // PAGE * size + places[i] % PAGE
    for at in range(0, size, PAGE):
        for i in range(len(slots)):
            out[ends[i] + at] = pages[starts[i] + at]


@_long
def _copy_values(pages: Any, slots: IntArray, places: IntArray, dim: int, pair: int, out: Any) -> None:
    """As `_copy_keys`; pair: how many slots share a word."""
    bits = np.uint32(32 // pair)
    kept = np.uint32(0xFFFFFFFF) >> (np.uint32(32) - bits)
    for i in range(len(slots)):
        row, to = pages[slots[i] // pair * dim :][:dim], out[places[i] // pair * dim :][:dim]
        down, up = np.uint32(slots[i] % pair) * bits, np.uint32(places[i] % pair) * bits
        others = ~np.uint32(kept << up)
        for d in range(len(to)):
            to[d] = (to[d] & others) | np.uint32(((row[d] >> down) & kept) << up)


@_long
def _score(
    queries: FloatArray, rows: int, keys: FloatArray, own: FloatArray, blocks: IntArray, out: FloatArray
) -> None:
    """queries: [rows or more, head_dim]; keys: a head's pages; own: its copied blocks; blocks: as those of `_Sequence`.

    out: [blocks, rows or more, PAGE].
    """
    dim, size, narrow = queries.shape[1], queries.itemsize, queries.itemsize == 2
    asked: Any = np.int64(queries.ctypes.data)
    to = np.int64(out.ctypes.data)
    pages, copies = np.int64(keys.ctypes.data), np.int64(own.ctypes.data)
    for block, number in enumerate(blocks):
        page = pages + number * PAGE * dim * size if number >= 0 else copies - (number + 1) * PAGE * dim * size
        multiply(asked, dim, rows, dim, page, PAGE, PAGE, False, to + block * out.shape[1] * PAGE * 4, PAGE, narrow)


@_long
def _add_up(
    weights: FloatArray, rows: int, values: FloatArray, own: FloatArray, blocks: IntArray, out: FloatArray
) -> None:
    """weights: [blocks, rows or more, PAGE]; values: a head's pages; own: its copied blocks; blocks: as above.

    out: [rows or more, head_dim].
    """
    dim, size, narrow = out.shape[1], weights.itemsize, weights.itemsize == 2
    shares = np.int64(weights.ctypes.data)
    to: Any = np.int64(out.ctypes.data)
    pages, copies = np.int64(values.ctypes.data), np.int64(own.ctypes.data)
    for block, number in enumerate(blocks):
        page = pages + number * PAGE * dim * size if number >= 0 else copies - (number + 1) * PAGE * dim * size
        some = shares + block * weights.shape[1] * PAGE * size
        multiply(some, PAGE, rows, PAGE, page, dim, dim, block > 0, to, dim, narrow)


@_long
def _weigh(
    scores: FloatArray,
    query: int,
    full: int,
    places: IntArray,
    straight: int,
    scale: float,
    weights: FloatArray,
    path: FloatArray,
    lanes: FloatArray,
) -> None:
    """Softmax of what a query sees: `full` blocks, and of the others these places, the first `straight` at their positions.

    scores, written too, and weights: [blocks, queries, PAGE]. path: [most places], for what has to change its place; lanes:
    [PAGE], for maxima and sums of as many places at a time as processors take. One function: calls would take their time.
    """
    seen, factor = full + (len(places) + PAGE - 1) // PAGE, np.float32(scale)
    # Scores to position order, which the first are in. Indices as in engine.row_attention.
    for at in range(straight, len(places)):
        index: Any = np.uint32(places[at])
        path[np.uint32(at)] = scores[full + index // _PAGE, query, index % _PAGE]
    for start in range(0, len(places), PAGE):
        row, own = scores[full + start // PAGE, query], path[start : start + PAGE]
        for place in range(len(row)):
            moved = own[place] if start + place < len(places) else np.float32(-np.inf)
            row[place] = row[place] if start + place < straight else moved
    # Weights in that order.
    lanes[:] = -np.inf
    for block in range(seen):
        row = scores[block, query]
        for place in range(len(lanes)):
            lanes[place] = max(lanes[place], row[place])
    half, total = len(lanes) // 2, np.float32(0)
    while half:
        for place in range(half):
            lanes[place] = max(lanes[place], lanes[half + place])
        half //= 2
    top = lanes[0]
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
    # And from it to their places, with 0 at all others.
    for at in range(straight, len(places)):
        index = np.uint32(at)
        path[index] = scores[full + index // _PAGE, query, index % _PAGE] / total
    for block in range(full + straight // PAGE, len(weights)):
        to = weights[block, query]
        for place in range(len(to)):
            if (block - full) * PAGE + place >= straight:
                to[place] = 0
    for at in range(straight, len(places)):
        index = np.uint32(places[at])
        put(weights[full + index // _PAGE, query], index % _PAGE, path[np.uint32(at)])
