"""Virtual time: what happens next happens now."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times, those of the same time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0  # milliseconds
        self._order = count()
        self._actions: list[tuple[float, int, Action]] = []

    def after(self, milliseconds: float, action: Action) -> None:
        """Runs an action so much later."""
        heapq.heappush(self._actions, (self.now + milliseconds, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._actions:
            self.now, _, action = heapq.heappop(self._actions)
            action()

    @property
    def seconds(self) -> float:
        """The time, as policies want it."""
        return self.now / 1000
