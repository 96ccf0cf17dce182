"""Where the last tokens of a text occurred before, in the newest tokens of many texts.

Hash chains over a ring of tokens, as LZ77 compressors keep them: a token is added in constant time, and what is overwritten
needs no clearing, since a link that leads so far back is known to be dead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.compiled import compiled
from engine.drafters.votes import NOTHING
from engine.types import FloatArray, IntArray

LongArray = npt.NDArray[np.int64]

ORDERS = np.asarray([8, 4, 2, 1], np.int64)  # lengths of the n-grams that are chained, the longest first
LONGEST = 32  # tokens that a match is followed back
_NEVER = -1
_STEPS = 4  # links followed for each place wanted: hashes collide


class Chains(NamedTuple):
    """The arrays of a `Past`, as compiled functions take them."""

    tokens: IntArray  # [kept], a ring
    before: LongArray  # [orders, kept]: the place before with the same hash
    latest: LongArray  # [orders, kept], by hash
    total: int  # tokens ever added; a place is its number among them


class Past:
    """The newest `kept` tokens of texts, and chains of places where the same n-gram ends: 68 bytes a token."""

    def __init__(self, kept: int) -> None:
        """kept: rounded up to a power of two."""
        self.kept = 1 << max(kept - 1, LONGEST).bit_length()
        self._tokens = np.full(self.kept, NOTHING, np.int32)
        self._before = np.full((len(ORDERS), self.kept), _NEVER, np.int64)
        self._latest = np.full((len(ORDERS), self.kept), _NEVER, np.int64)
        self._total = 0
        self._run = 0  # of them since the last text began

    @property
    def chains(self) -> Chains:
        """As they are now."""
        return Chains(self._tokens, self._before, self._latest, self._total)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        new = np.asarray(tokens, np.int32)[-self.kept :]
        self._run = _extend(self._tokens, self._before, self._latest, self._total, self._run, new)
        self._total += len(new)

    def begin(self) -> None:
        """The next tokens are of another text: no match reaches across."""
        self.extend([NOTHING])

    def matches(self, last: IntArray, count: int) -> tuple[LongArray, IntArray]:
        """Up to `count` places where as many of the `last` tokens as known here stand, newest first; their lengths.

        Both [n]. Only places that share the longest chained n-gram found are listed; they match for at least that long.
        """
        places, lengths = np.empty(count, np.int64), np.empty(count, np.int32)
        found = matches(self.chains, last, places, lengths)
        return places[:found], lengths[:found]

    def follow(self, places: LongArray, depth: int) -> IntArray:
        """What came behind each place, [n, depth]; from a text's end on NOTHING."""
        return follow(self.chains, places, depth)

    def check(self) -> None:
        """Raises AssertionError unless all links are those that adding the kept tokens to nothing would make."""
        oldest = max(0, self._total - self.kept)
        again = Past(self.kept)
        again._total = oldest
        again.extend(self._tokens[np.arange(oldest, self._total) % self.kept].tolist())
        for order, length in enumerate(ORDERS.tolist()):
            alive = oldest + length - 1  # the first place whose whole n-gram is kept
            at = np.arange(alive, self._total) % self.kept
            pairs = [(self._before[order][at], again._before[order][at]), (self._latest[order], again._latest[order])]
            for mine, other in pairs:
                same = np.where(mine < alive, _NEVER, mine) == np.where(other < alive, _NEVER, other)
                assert same.all(), "a link leads to another n-gram"


def vote(lengths: IntArray, longest: int) -> FloatArray:
    """Of places that match so long, [n]: one token more counts for twice as much."""
    return (0.5 ** (longest - lengths)).astype(np.float32)


@compiled
def _hash(tokens: IntArray, around: int, end: int, length: int, mask: int) -> int:
    """Of the `length` tokens up to place `end`, at most `mask`. around: what place & around is an index of tokens by."""
    value = np.uint64(14695981039346656037)
    for place in range(end - length + 1, end + 1):
        value = (value ^ np.uint64(tokens[place & around])) * np.uint64(1099511628211)
    return int(np.int64((value ^ (value >> np.uint64(29))) & np.uint64(mask)))


@compiled
def _extend(tokens: IntArray, before: LongArray, latest: LongArray, total: int, run: int, new: IntArray) -> int:
    """Writes and chains new tokens; how many stand in a row since the last text began."""
    mask = len(tokens) - 1
    for i in range(len(new)):
        end = total + i
        tokens[end & mask] = new[i]
        run = run + 1 if new[i] != -1 else 0
        for order in range(len(ORDERS)):
            if run >= ORDERS[order]:
                key = _hash(tokens, mask, end, ORDERS[order], mask)
                before[order, end & mask] = latest[order, key]
                latest[order, key] = end
            else:
                before[order, end & mask] = -1
    return run


@compiled
def _length(tokens: IntArray, total: int, place: int, last: IntArray) -> int:
    """How many of the last tokens stand before and at a place."""
    mask = len(tokens) - 1
    known = min(len(last), LONGEST, place - max(0, total - len(tokens)) + 1)
    for n in range(known):
        if tokens[(place - n) & mask] != last[len(last) - 1 - n]:
            return n
    return known


@compiled
def matches(past: Chains, last: IntArray, places: LongArray, lengths: IntArray) -> int:
    """Fills places and lengths, as by `Past.matches`; how many were found."""
    tokens, before, latest, total = past
    mask, oldest, found = len(tokens) - 1, total - len(tokens), 0
    for order in range(len(ORDERS)):
        n = ORDERS[order]
        if n > len(last):
            continue
        place = latest[order, _hash(last, -1, len(last) - 1, n, mask)]
        steps = _STEPS * len(places)
        while found < len(places) and steps > 0 and place >= 0 and place - n + 1 >= oldest:
            length = _length(tokens, total, place, last) if place < total - 1 else 0
            if length >= n:
                places[found], lengths[found] = place, length
                found += 1
            place = before[order, place & mask]
            steps -= 1
        if found:
            break
    return found


@compiled
def follow(past: Chains, places: LongArray, depth: int) -> IntArray:
    """See `Past.follow`."""
    tokens, total = past.tokens, past.total
    rows = np.full((len(places), depth), NOTHING, np.int32)
    for row in range(len(places)):
        for i in range(depth):
            at = places[row] + 1 + i
            if at >= total or tokens[at & (len(tokens) - 1)] == NOTHING:
                break
            rows[row, i] = tokens[at & (len(tokens) - 1)]
    return rows
