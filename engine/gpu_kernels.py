"""The kernels of engine.gpu_attention, in Triton.

The keys of a block of rows are split among several programs, whose parts are joined in the end, as in flash-decoding (Dao
et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html): else one sequence would leave most of a GPU idle.
"""

import triton
import triton.language as tl


@triton.jit
def store(
    key, value, store, slots, key_head, key_row, value_head, value_row, side, head_size,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row's key and value of one head."""
    row, head, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    slot = tl.load(slots + row).to(tl.int64)
    inside = d < DIM
    to = store + head * head_size + slot * DIM + d
    tl.store(to, tl.load(key + head * key_head + row * key_row + d, mask=inside), mask=inside)
    tl.store(to + side, tl.load(value + head * value_head + row * value_row + d, mask=inside), mask=inside)


@triton.jit
def attend(
    query, store, told, masks, parts, sums, blocks, positions, scale, cap, window,
    query_head, query_row, side, head_size,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, FOLD: tl.constexpr, SIZE: tl.constexpr,
    FIELDS: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows, one KV head, a part of the keys: weighted values, the largest score and the sum of weights."""
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    about = told + blocks + block * FIELDS
    rows = tl.load(about + 1)
    if rows == 0:
        return
    first, prefix, pages = tl.load(about), tl.load(about + 2), tl.load(about + 3)
    tree, slots, mask = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6)
    m, d, n = tl.arange(0, SIZE), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    row = m // FOLD
    own, inside = row < rows, d < DIM
    asked = query + (first + row)[:, None] * query_row + (head * FOLD + m % FOLD)[:, None] * query_head + d[None, :]
    q = tl.load(asked, mask=own[:, None] & inside[None, :], other=0.0)
    position = tl.load(told + positions + first + row, mask=own, other=0)
    before = tl.cdiv(prefix, KEYS)
    steps = before + tl.cdiv(tree, KEYS)
    each = tl.cdiv(steps, SPLITS)
    best = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    out = tl.zeros([SIZE, WIDTH], tl.float32)
    for step in range(split * each, tl.minimum(split * each + each, steps)):
        place, behind = step * KEYS + n, (step - before) * KEYS + n
        ahead, beyond = place < prefix, (behind >= 0) & (behind < tree)
        page = tl.load(told + pages + place // PAGE, mask=ahead, other=0)
        slot = tl.load(told + slots + behind, mask=beyond, other=0)
        slot = tl.where(ahead, page * PAGE + place % PAGE, slot).to(tl.int64)
        seen = tl.load(
            masks + mask + row[:, None] * tree + behind[None, :], mask=own[:, None] & beyond[None, :], other=0
        )
        sees = ahead[None, :] | (seen != 0)
        if WINDOWED:
            sees = sees & (beyond[None, :] | (place[None, :] > position[:, None] - window))
        there = (ahead | beyond)[:, None] & inside[None, :]
        at = store + head.to(tl.int64) * head_size + slot[:, None] * DIM + d[None, :]
        keys = tl.load(at, mask=there, other=0.0)
        score = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if CAPPED:
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        score = tl.where(sees, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        level = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(score - level[:, None])
        kept = tl.exp(best - level)
        values = tl.load(at + side, mask=there, other=0.0)
        total = total * kept + tl.sum(weight, 1)
        out = out * kept[:, None] + tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)
        best = top
    of = (((first + row) * tl.num_programs(1) + head) * FOLD + m % FOLD) * SPLITS + split
    tl.store(sums + 2 * of, best, mask=own)
    tl.store(sums + 2 * of + 1, total, mask=own)
    tl.store(parts + of[:, None].to(tl.int64) * DIM + d[None, :], out, mask=own[:, None] & inside[None, :])


@triton.jit
def join(
    parts, sums, out, sinks, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """One row of one query head: its parts become one."""
    head, d = tl.program_id(1), tl.arange(0, WIDTH)
    place = tl.program_id(0) * tl.num_programs(1) + head
    of, inside = place * SPLITS + tl.arange(0, SPLITS), d < DIM
    best, total = tl.load(sums + 2 * of), tl.load(sums + 2 * of + 1)
    part = tl.load(parts + of[:, None].to(tl.int64) * DIM + d[None, :], mask=inside[None, :], other=0.0)
    top = tl.max(best, 0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    level = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(best - level)
    whole = tl.sum(total * share, 0)
    if SINKS:
        whole += tl.exp(sink - level)
    value = tl.sum(part * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + place * DIM + d, value.to(out.dtype.element_ty), mask=inside)
