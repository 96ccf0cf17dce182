"""Attention of a compiled pass: products of queries with whole pages of the KV pool, by the kernels of its linear layers.

A paged pool (KVPool) keeps a page's keys feature by feature and its values slot by slot, so that pages are read where they
are, by all rows of a sequence at once (engine.page_plan). What a row doesn't see of a block has the weight 0. So its bits
depend on its own path alone, as long as all numbers of the sequence and its tree are finite.
"""

from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention import Longs
from engine.compiled import borrowed, compiled, exponential, put, read_ahead
from engine.kv import PAGE
from engine.page_plan import Planned, read_plan
from engine.torch_calls import ROWS, leave, multiply, room
from engine.types import FloatArray, IntArray

_long = partial(compiled, long=True)
_WORD = 4  # bytes
_PAGE = np.uint32(PAGE)
# At a time: scores, of which a core's caches hold the values, too; parts.
_SCORES, _TOGETHER = 1 << 14, 256


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

    out: [rows of the pass, heads, head_dim]; rows that are in no plan get 0. Query heads that share a KV head are rows of a
    product. The scores of several parts come first, then their weights, then their sums: a kernel that follows another one
    sets the processor up anew, and values are on their way while weights are computed.
    """
    (rows, heads, dim), kv_heads = out.shape, len(keys)
    each = rows * heads // kv_heads  # queries of a KV head
    queries = room(kv_heads, each * dim, keys.dtype).reshape(kv_heads, each, dim)
    answers = room(kv_heads, each * dim, np.float32).reshape(kv_heads, each, dim)
    answers[:] = 0
    _by_kv_heads(qkv, heads, queries)
    at, kv, start = 0, 0, 0
    while at < len(plan):
        parts, size, at, kv, start = _next_parts(plan, at, kv, start, kv_heads, heads // kv_heads)
        scores, weights = room(1, size, np.float32)[0], room(1, size, keys.dtype)[0]
        for i in range(len(parts)):
            _score(queries, keys, _part(plan, parts[i], heads // kv_heads), scores)
        for i in range(len(parts)):
            _weigh(scores, values, dim, _part(plan, parts[i], heads // kv_heads), scale, weights)
        for i in range(len(parts)):
            _add_up(weights, values, _part(plan, parts[i], heads // kv_heads), answers)
    _by_rows(answers, out)


class _Part(NamedTuple):
    """Rows of a sequence that are computed together, for one KV head: as many queries each as share that."""

    sequence: Planned
    kv: int
    start: int  # of the sequence's rows
    fold: int  # queries of a row
    queries: int
    first: int  # of the queries, over all rows of the pass
    scores: int  # where they begin, [blocks, queries, PAGE]


@_long
def _next_parts(
    plan: IntArray, at: int, kv: int, start: int, kv_heads: int, fold: int
) -> tuple[Longs, int, int, int, int]:
    """The parts that follow, from a KV head and a row of the sequence on that begins at `at`, as many as fill _SCORES.

    Of each: where its sequence begins, its KV head, its first row and the one behind its last, and where its scores begin,
    [n, 5]. Returns also how many scores those are, and where to go on.
    """
    parts, count, size = np.empty((_TOGETHER, 5), np.int64), 0, 0
    while at < len(plan) and count < _TOGETHER:
        sequence, end = read_plan(plan, at)
        each, rows = fold * _blocks(sequence) * PAGE, len(sequence.lengths)
        stop = min(rows, start + max((_SCORES - size) // each, 0 if count else max(1, ROWS // fold)))
        if stop == start:
            break
        parts[count] = at, kv, start, stop, size
        count, size, start = count + 1, size + (stop - start) * each, stop
        if start == rows:
            kv, start = kv + 1, 0
        if kv == kv_heads:
            at, kv = end, 0
    return parts[:count], size, at, kv, start


@_long
def _part(plan: IntArray, numbers: Longs, fold: int) -> _Part:
    """numbers: of _next_parts."""
    sequence = read_plan(plan, numbers[0])[0]
    start, stop = numbers[2], numbers[3]
    return _Part(sequence, numbers[1], start, fold, (stop - start) * fold, (sequence.first + start) * fold, numbers[4])


@_long
def _blocks(sequence: Planned) -> int:
    return len(sequence.pages) + len(sequence.blocks)


@_long
def _by_kv_heads(qkv: FloatArray, heads: int, queries: FloatArray) -> None:
    """queries: [kv_heads, those of all rows, head_dim]."""
    qkv, queries = borrowed(qkv), borrowed(queries)
    fold = heads // len(queries)
    for row in range(len(qkv)):
        for head in range(heads):
            asked, to = qkv[row, head], queries[head // fold, row * fold + head % fold]
            for d in range(len(to)):
                put(to, d, asked[d])


@_long
def _by_rows(answers: FloatArray, out: FloatArray) -> None:
    """answers: [kv_heads, those of all rows, head_dim]; out: [rows, heads, head_dim]."""
    answers, out = borrowed(answers), borrowed(out)
    fold = out.shape[1] // len(answers)
    for row in range(len(out)):
        for head in range(out.shape[1]):
            out[row, head] = answers[head // fold, row * fold + head % fold]


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
def _score(queries: FloatArray, keys: FloatArray, part: _Part, out: FloatArray) -> None:
    """queries: as in _by_kv_heads; keys: a layer's; out: scores of all parts."""
    queries, out, keys = borrowed(queries[part.kv]), borrowed(out), borrowed(keys[part.kv])
    sequence, dim, size, narrow = part.sequence, queries.shape[1], queries.itemsize, queries.itemsize == 2
    own = np.zeros(len(sequence.copies) * PAGE * dim, keys.dtype)
    if len(sequence.copies):
        slots, places = _moved(sequence.copies)
        _copy_pages(keys, sequence.copies, own)
        _copy_keys(_words(keys.reshape(-1)), slots, places, dim * size // _WORD, _words(own))
    asked = np.int64(queries.ctypes.data) + part.first * dim * size
    to: Any = np.int64(out.ctypes.data) + part.scores * 4
    following = _page(sequence, 0, keys, own)
    for block in range(_blocks(sequence)):
        page = following
        if block + 1 < _blocks(sequence):
            following = _page(sequence, block + 1, keys, own)
            read_ahead(following, keys.shape[1] * size)
        for query in range(0, part.queries, ROWS):
            some = min(ROWS, part.queries - query)
            multiply(asked + query * dim * size, dim, some, dim, page, PAGE, PAGE, False, to, PAGE, narrow)
            to += some * PAGE * 4


@_long
def _add_up(weights: FloatArray, values: FloatArray, part: _Part, out: FloatArray) -> None:
    """weights: of all parts; values: a layer's; out: as answers in _by_rows."""
    weights, out, values = borrowed(weights), borrowed(out[part.kv]), borrowed(values[part.kv])
    sequence, dim, size, narrow = part.sequence, out.shape[1], weights.itemsize, weights.itemsize == 2
    own = np.zeros(len(sequence.copies) * PAGE * dim, values.dtype)
    if len(sequence.copies):
        slots, places = _moved(sequence.copies)
        _copy_pages(values, sequence.copies, own)
        _copy_values(_words(values.reshape(-1)), slots, places, dim, _WORD // size, _words(own))
    shares: Any = np.int64(weights.ctypes.data) + part.scores * size
    to = np.int64(out.ctypes.data) + part.first * dim * 4
    for block in range(_blocks(sequence)):
        page = _page(sequence, block, values, own)
        for query in range(0, part.queries, ROWS):
            some = min(ROWS, part.queries - query)
            multiply(shares, PAGE, some, PAGE, page, dim, dim, block > 0, to + query * dim * 4, dim, narrow)
            shares += some * PAGE * size


@_long
def _page(sequence: Planned, block: int, pages: FloatArray, own: FloatArray) -> Any:
    """The address of a block in a head's pages, or in its copied blocks, which nobody holds behind the last use of `own`."""
    full = len(sequence.pages)
    number = np.int64(sequence.pages[block] if block < full else sequence.blocks[block - full])
    size = pages.shape[1] * pages.itemsize
    if number >= 0:
        return np.int64(pages.ctypes.data) + number * size
    return np.int64(own.ctypes.data) - (number + 1) * size


@_long
def _weigh(scores: FloatArray, values: FloatArray, dim: int, part: _Part, scale: float, weights: FloatArray) -> None:
    """scores and weights: of all parts. A layer's values, which are needed next, are read ahead meanwhile."""
    scores, weights, values = borrowed(scores), borrowed(weights), borrowed(values[part.kv])
    sequence, blocks = part.sequence, _blocks(part.sequence)
    ahead, nothing = 0, values[0, :0]  # blocks that are copied are not there yet
    places = values.shape[1] // dim  # PAGE, but compilers don't know: of loops so short they would make no vectors
    path = np.empty(len(sequence.pages) * places + (sequence.places.shape[1] + places) // places * places, np.float32)
    stop = part.scores + blocks * part.queries * places
    asked = scores[part.scores : stop].reshape(blocks, part.queries, places)
    found = weights[part.scores : stop].reshape(blocks, part.queries, places)
    for query in range(part.queries):
        while ahead * part.queries < (query + 1) * blocks:
            read_ahead(_page(sequence, ahead, values, nothing), values.shape[1] * values.itemsize)
            ahead += 1
        row = part.start + query // part.fold
        seen = sequence.places[row, : sequence.lengths[row]]
        _weigh_one(asked, query, len(sequence.pages), seen, sequence.straight[row], scale, found, path)


@_long
def _weigh_one(
    scores: FloatArray,
    query: int,
    full: int,
    places: IntArray,
    straight: int,
    scale: float,
    weights: FloatArray,
    path: FloatArray,
) -> None:
    """Softmax of what a query sees: `full` blocks, and of the others these places, the first `straight` at their positions.

    scores, weights: [blocks, queries, PAGE]; path: room for whole blocks of all that is seen.
    """
    first, moved = full * PAGE, straight // PAGE * PAGE
    stop = first + len(places)
    path = borrowed(path[: (stop + PAGE - 1) // PAGE * PAGE])
    # Scores in position order, which those of most blocks have. Indices as in engine.row_attention.
    for block in range(len(path) // PAGE):
        row, to = scores[block, query], path[block * PAGE : block * PAGE + PAGE]
        for place in range(len(row)):
            to[place] = row[place]
    for at in range(straight, len(places)):
        index: Any = np.uint32(places[at])
        path[np.uint32(first + at)] = scores[full + index // _PAGE, query, index % _PAGE]
    path[stop:] = -np.inf
    _softmax(path, np.float32(scale))
    # And from it to their places, with 0 at all others.
    for block in range(len(weights)):
        to = weights[block, query]
        if block * PAGE < first + moved:
            row = path[block * PAGE : block * PAGE + PAGE]
            for place in range(len(to)):
                put(to, place, row[place])
        else:
            for place in range(len(to)):
                to[place] = 0
    for at in range(moved, len(places)):
        index = np.uint32(places[at])
        put(weights[full + index // _PAGE, query], index % _PAGE, path[np.uint32(first + at)])


@_long
def _softmax(x: FloatArray, scale: np.float32) -> None:
    """In place, of x times `scale`; the order of the sum depends on the length alone."""
    bits: Any = x.view(np.int32)
    most = np.int32(-0x80000000)
    for i in range(len(x)):  # as integers in the same order, whose largest compilers find with vectors
        most = max(most, np.int32(bits[i] ^ _magnitude_if_negative(bits[i])))
    top = np.int32(most ^ _magnitude_if_negative(most)).view(np.float32)
    total = np.float32(0)
    for i in range(len(x)):
        x[i] = exponential((x[i] - top) * scale)
        total += x[i]
    share = np.float32(1) / total
    for i in range(len(x)):
        x[i] *= share


@_long
def _magnitude_if_negative(bits: np.int32) -> np.int32:
    """All bits but the sign's, which have to be turned for a negative float32 to be in order; else none."""
    return np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
