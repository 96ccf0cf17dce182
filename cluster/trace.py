"""What an actor did when: bounded, off unless asked for, the raw material of the timeline picture."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

MAX_SPANS = 20_000

Kind = Literal["target step", "draft step", "commit", "growth", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """One thing done: seconds on the machine's monotonic clock, equal in all processes of one machine."""

    kind: Kind
    start: float
    end: float
    amount: int  # rows of a target step, sessions of a draft step, nodes of a growth, commits sent or tokens applied


class Trace:
    """Keeps the latest spans."""

    def __init__(self) -> None:
        self.on = False
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def add(self, kind: Kind, start: float, amount: int) -> None:
        """Records what began at `start` and ends now."""
        if self.on:
            self._spans.append(Span(kind, start, time.monotonic(), amount))

    def take(self) -> list[Span]:
        """The spans so far, which are forgotten here."""
        spans = list(self._spans)
        self._spans.clear()
        return spans
