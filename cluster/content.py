"""Sessions for an engine that names no requests: each row of its batch is known by its tokens alone.

Pure: rows in, session ids and proposals out. What crosses the wire is TargetState's business, as for our own target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.target_state import TargetState
from engine.types import IntArray, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)  # vLLM takes drafts as certain: the likeliest token is the one to propose


@dataclass
class _Session:
    """What a row held when it was last seen."""

    id: int
    tokens: IntArray  # [capacity]; the first `length` are its
    length: int
    seen: float  # seconds

    def begins(self, row: IntArray) -> bool:
        """Whether the row's text is this one, or goes on from it."""
        # Bytes are compared with far less ado than arrays, and this is done for every row in every step.
        return self.length <= len(row) and self.tokens[: self.length].tobytes() == row[: self.length].tobytes()

    def grow(self, row: IntArray) -> list[int]:
        """Takes the row's text; the tokens that are new."""
        if len(row) > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * len(row))
        new = row[self.length :]
        self.tokens[self.length : len(row)] = new
        self.length = len(row)
        tokens: list[int] = new.tolist()
        return tokens


@dataclass
class ContentSessions:
    """The sessions of a target whose batches come as rows of tokens, in any order."""

    state: TargetState
    lease_s: float = 0.5  # a session that no row showed for so long is given up; a row that returns opens another
    most: int = 512  # sessions; beyond, those that no row shows give way, the longest unseen first
    _held: dict[int, _Session] = field(default_factory=dict)  # by id
    _due: float = -math.inf  # seconds; no lease ends before
    _rows: list[int] = field(default_factory=list)  # the session of each row of the last call; -1: none
    _full: float = -math.inf  # seconds: the last call whose rows showed all sessions that there may be

    def follow(self, rows: Sequence[IntArray], now: float) -> list[int]:
        """Finds or opens the session of each row [n >= 0 tokens], and commits what is new in it; -1 for empty rows.

        Rows move, jump ahead by any number of tokens, leave for a while and return; two rows with the same text have a
        session each. now: seconds, of any clock.
        """
        free = dict(self._held)
        found = [self._claim(free, row, self._rows[i] if i < len(self._rows) else -1) for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            if found[i] < 0 and len(row):
                found[i] = self._search(free, row)
        for session in found:
            if session >= 0:
                self._held[session].seen = now
        self._expire(now)  # now, since the step before may have been longer than a lease
        self._rows = [self._take(held, row, now) for held, row in zip(found, rows, strict=True)]
        return self._rows

    def holds(self, session: int) -> bool:
        """Whether it was not given up yet."""
        return session in self._held

    def _claim(self, free: dict[int, _Session], row: IntArray, likely: int) -> int:
        """The session that was in this row the last time, if the row goes on from it; -1 otherwise."""
        held = free.get(likely)
        if held is None or not held.begins(row):
            return -1
        del free[likely]
        return likely

    def _search(self, free: dict[int, _Session], row: IntArray) -> int:
        """The longest session that the row goes on from; -1 if there is none."""
        for held in sorted(free.values(), key=lambda held: -held.length):
            if held.begins(row):
                del free[held.id]
                return held.id
        return -1

    def _take(self, found: int, row: IntArray, now: float) -> int:
        if not len(row):
            return -1
        if found < 0:
            if len(self._held) >= self.most and not self._make_room(now):
                return -1
            found = self.state.session_opened(row.tolist(), _GREEDY)
            self._held[found] = _Session(found, np.array(row, np.int32), len(row), now)
            return found
        if new := self._held[found].grow(row):
            self.state.tokens_committed(found, new)
        return found

    def _make_room(self, now: float) -> bool:
        """Gives up the session that was not seen for the longest; False if all were seen in this call."""
        if self._full == now:  # of many rows without a session, one looks
            return False
        oldest = min(self._held.values(), key=lambda held: held.seen)
        if oldest.seen >= now:
            self._full = now
            return False
        self._give_up(oldest.id)
        return True

    def _expire(self, now: float) -> None:
        if now <= self._due:
            return
        for session in [held.id for held in self._held.values() if now - held.seen > self.lease_s]:
            self._give_up(session)
        self._due = min([now, *(held.seen for held in self._held.values())]) + self.lease_s

    def _give_up(self, session: int) -> None:
        del self._held[session]
        self.state.session_closed(session)
