"""What rows of a pass see of a paged pool, as blocks of PAGE positions: told once for all layers, read by each.

First come the full pages that all rows of a sequence see. Behind those, PAGE positions of a path are in one block, a page
again where their slots are in its places. Others are copied: paths of a tree share a block, each with slots between its own
that it doesn't see, as far as there is room. What a row sees is in one block, in the same order and pairs whatever else is
there.

Guesses need no such bits: for them all pages are read where they are, and nothing is copied (`in_place`).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from engine.compiled import borrowed, compiled
from engine.kv import PAGE
from engine.types import BoolArray, IntArray

_HEADER = 6
_NOTHING = np.zeros(0, np.int32)


def plan(sequences: Sequence[tuple[IntArray, int, IntArray, BoolArray, int, bool]]) -> IntArray:
    """What rows of a pass see, for engine.page_attention.attend.

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
    """One sequence's, as `read_plan` reads it."""
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
    out = np.empty(_HEADER + full + rows * (2 + columns) + blocks + copied * (1 + PAGE), np.int32)
    out[0], out[1], out[2], out[3], out[4], out[5] = rows, first, full, columns, blocks, copied
    at = _HEADER
    out[at : at + full] = slots[: full * PAGE : PAGE] // PAGE
    at += full
    out[at : at + rows] = lengths
    at += rows
    for row in range(rows):
        straight = 0
        while straight < lengths[row] and places[row, straight] == straight:
            straight += 1
        out[at + row] = straight
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


class Planned(NamedTuple):
    """What some rows of one sequence see."""

    first: int  # of its rows
    pages: IntArray  # that all of them see
    lengths: IntArray  # [n]: how many places each sees behind these pages
    straight: IntArray  # [n]: how many of each row's first places are those of their positions
    places: IntArray  # [n, most places]: where they are, over all blocks
    blocks: IntArray  # of these places: a page, or -1 - i for the i-th copied block
    copies: IntArray  # [copied blocks, 1 + PAGE]: a page, and which slots are at its places instead; -1 for none


@partial(compiled, long=True)
def read_plan(plan: IntArray, at: int) -> tuple[Planned, int]:
    """The sequence whose plan begins there, by views of the plan, which the caller holds; and where that ends."""
    plan = borrowed(plan)
    rows, first, full, columns, blocks, copied = plan[at : at + _HEADER]
    at += _HEADER
    pages, at = plan[at : at + full], at + full
    lengths, at = plan[at : at + rows], at + rows
    straight, at = plan[at : at + rows], at + rows
    places, at = plan[at : at + rows * columns].reshape(rows, columns), at + rows * columns
    numbers, at = plan[at : at + blocks], at + blocks
    copies, at = plan[at : at + copied * (1 + PAGE)].reshape(copied, 1 + PAGE), at + copied * (1 + PAGE)
    return Planned(first, pages, lengths, straight, places, numbers, copies), at
