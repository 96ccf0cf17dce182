"""How fast a target is in one place, from its steps, which fade; what cluster.best_place compares."""

from dataclasses import dataclass
from math import inf, sqrt

_KEPT = 1 - 1 / 2048  # of what earlier steps weigh, each step
_DOUBT = 2.0  # standard errors by which a place may be faster than it seemed
_LEAST_SPREAD = 0.3  # of what a step brings, relative: a few equal ones are no certainty
_TAKEN_OVER = 6  # steps at most that others count for
_KNOWN = 12  # steps that say how long prompts take
_FORGOTTEN = 1e-6  # steps, faded: the sums come near what numbers can hold


@dataclass
class Speed:
    """Steps at one place, by their sums, which fade."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of tokens, tokens x seconds, of seconds

    def fade(self) -> None:
        self.steps *= _KEPT
        self.tokens *= _KEPT
        self.seconds *= _KEPT
        a, b, c = self._squares
        self._squares = a * _KEPT, b * _KEPT, c * _KEPT

    def add(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        a, b, c = self._squares
        self._squares = a + tokens**2, b + tokens * seconds, c + seconds**2

    def like(self, times: float) -> "Speed":
        """A few steps like these, which brought so many times the tokens. Not of what is forgotten."""
        share = min(1.0, _TAKEN_OVER / self.steps)
        a, b, c = self._squares
        squares = a * share * times**2, b * share * times, c * share
        return Speed(self.steps * share, self.tokens * share * times, self.seconds * share, squares)

    @property
    def forgotten(self) -> bool:
        """Whether nothing is known: there were no steps, or too long ago."""
        return self.steps < _FORGOTTEN

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / max(self.steps, 1e-9)

    @property
    def doubt(self) -> float:
        """By how much the rate may be off: that of a ratio of two sums."""
        if self.forgotten or not self.seconds:
            return inf
        a, b, c = self._squares
        rate = self.rate
        spread = max(a - 2 * rate * b + rate**2 * c, (_LEAST_SPREAD * self.tokens) ** 2 / self.steps)
        return _DOUBT * sqrt(spread) / self.seconds

    @property
    def at_best(self) -> float:
        """The rate that it may be."""
        return self.rate + self.doubt


@dataclass
class PromptTime:
    """What a token of a prompt adds to a step: the slope of a line through steps with more and fewer, whose sums fade."""

    _steps: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _products: tuple[float, float] = (0.0, 0.0)  # of tokens squared, of tokens x seconds

    def add(self, tokens: int, seconds: float) -> None:
        self._steps = self._steps * _KEPT + 1
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds
        a, b = self._products
        self._products = a * _KEPT + tokens**2, b * _KEPT + tokens * seconds

    @property
    def known(self) -> bool:
        """Whether there were steps enough."""
        return self._steps >= _KNOWN

    @property
    def each_s(self) -> float:
        """Seconds; 0 where all steps had as many: places are compared with that time then."""
        spread = self._steps * self._products[0] - self._tokens**2
        return max(0.0, self._steps * self._products[1] - self._tokens * self._seconds) / spread if spread > 1 else 0.0
