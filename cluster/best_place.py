"""Where drafts run best: measured by turns, for each kind of batch, by what a target decodes in a second.

Three places: replicas of their own, which draft while the target verifies; the target's own process, where both take turns;
and none, since drafts don't always pay. Every place guesses what lookup in the text finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log2, sqrt
from typing import Literal

Place = Literal["separate", "shared", "none"]
PLACES: tuple[Place, ...] = ("separate", "shared", "none")

_ENOUGH = 48  # steps of one sequence that say how fast a place is; of more sequences together, fewer do
_FEWEST = 12  # steps of any batch
_STAY = 4  # times as many steps, at least, before another look at a place that is known
_AFFORDED = 0.01  # of the time: what looks at such places may cost, with all that changing places does
_SETTLING = 4  # first steps at a place that don't count: windows and drafts find their way back
_READING = 256  # steps at most that drafts may take to read the texts again, before what they don't say counts
_LASTING = 24  # steps in a row of another kind of batch before it is gone by
_MARGIN = 1.03  # another place has to be so much faster: every change has texts read again
_KEPT = 1 - 1 / 2048  # of what earlier steps weigh, each step
_DOUBT = 2.0  # standard errors by which a place may be faster than it seemed
_LEAST_SPREAD = 0.3  # of what a step brings, relative: a few equal ones are no certainty
_TAKEN_OVER = 6  # steps at most that what is known of a place, with half or twice as many sequences, counts for

Kind = tuple[int, bool]  # of a batch: how many sequences, about, and whether all are greedy


def kind_of(sequences: int, greedy: bool) -> Kind:
    """What is measured together: where drafts pay depends on how many sequences share a step, and on their sampling.

    The power of two that is nearest by ratio: a full batch, which often is one, and what is left of it for a moment are the
    same kind.
    """
    return 1 << round(log2(sequences)), greedy


@dataclass
class _Speed:
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

    def like(self, times: float) -> "_Speed":
        """A few steps like these, which brought so many times the tokens."""
        share = min(1.0, _TAKEN_OVER / self.steps)
        a, b, c = self._squares
        squares = a * share * times**2, b * share * times, c * share
        return _Speed(self.steps * share, self.tokens * share * times, self.seconds * share, squares)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def doubt(self) -> float:
        """By how much the rate may be off: that of a ratio of two sums."""
        if not self.tokens:
            return inf
        a, b, c = self._squares
        rate = self.rate
        spread = max(a - 2 * rate * b + rate**2 * c, (_LEAST_SPREAD * self.tokens) ** 2 / self.steps)
        return _DOUBT * sqrt(spread) / max(self.seconds, 1e-9)


class _Measured:
    """One kind of batch: the best of some places so far, and looks at those that may be faster.

    What is known of a place fades, so that it is looked at again: the sooner, the nearer to the best it was
    (upper confidence bounds, discounted: Garivier and Moulines 2011, https://arxiv.org/abs/0805.3415), but not before the
    last look was paid for: with many sequences, whose texts drafts have to read first, one costs seconds.
    """

    def __init__(
        self, places: Sequence[Place], enough: int, like: "_Measured | None" = None, near: bool = False
    ) -> None:
        """like: another kind, whose best place is the first guess; looks will cost as much as there.

        near: what was measured there of the other places, over the best, is believed here until they are looked at.
        """
        self._speeds = {place: _Speed() for place in places}
        self._seen: set[Place] = set()  # here
        self._taken_over = like.over_the_best() if like is not None and near else {}
        self._enough = enough  # steps
        self._best: Place = places[0] if like is None else like._best
        self.place = self._best  # or one that is looked at
        self._here = 0  # steps, since it is that
        self._away = False  # from the best, or just back
        self._learning = False  # a place that was never looked at before
        self._look_s: float = 0.0 if like is None else like._look_s  # what the last look has cost
        self._owed_s = max(0.0, self._look_s)  # what looks have cost, and was not made up for by the time since

    @property
    def unknown(self) -> bool:
        """Whether nothing was measured at this place yet."""
        return self.place not in self._seen

    def over_the_best(self) -> dict[Place, _Speed]:
        """What was measured at the other places, with the best one's tokens per second for one."""
        best = self._speeds[self._best].rate
        return {place: self._speeds[place].like(1 / best) for place in self._seen - {self._best}} if best else {}

    def leave(self) -> None:
        """Another kind of batch follows: a look that goes on is given up, and paid for before the next one."""
        if self.place != self._best:
            self._owed_s += max(0.0, self._look_s) if self._learning else 0.0
            self.place, self._here, self._away, self._learning = self._best, 0, False, False

    def stepped(self, tokens: int, seconds: float) -> bool:
        """A step at the present place; whether it is another one from now on."""
        for speed in self._speeds.values():
            speed.fade()
        self._speeds[self.place].add(tokens, seconds)
        self._seen.add(self.place)
        if self._taken_over and self._speeds[self._best].steps >= _FEWEST - 1:
            self._take_over()
        self._here += 1
        self._away = self.place != self._best
        self.looked(tokens, seconds)
        self._owed_s = max(0.0, self._owed_s - _AFFORDED * seconds)
        before = self.place
        self.place = self._next()
        if self.place != before:
            self._here, self._away, self._learning = 0, True, self.unknown
            if before == self._best:
                self._look_s = 0.0
        return self.place != before

    def looked(self, tokens: int, seconds: float) -> None:
        """A step that belongs to a look, if one goes on, and perhaps says nothing of its place: it has its cost."""
        rate = self._speeds[self._best].rate
        if self._away and rate:  # requests that fail at their first token bring none
            lost_s = seconds - tokens / rate
            self._look_s += lost_s
            self._owed_s += 0.0 if self._learning else lost_s

    def _take_over(self) -> None:
        for place, speed in self._taken_over.items():
            if place not in self._seen:
                self._speeds[place] = speed.like(self._speeds[self._best].rate)
        self._taken_over = {}

    def _next(self) -> Place:
        best, here = self._speeds[self._best], self._speeds[self.place]
        if self.place == self._best:
            others = [place for place in self._speeds if place != self._best]
            hoped = max(others, key=lambda place: self._speeds[place].rate + self._speeds[place].doubt)
            other = self._speeds[hoped]
            stay = self._enough * (_STAY if other.steps else 1)
            worth_a_look = other.rate + other.doubt > _MARGIN * best.rate and self._owed_s <= 0
            return hoped if worth_a_look and self._here >= stay else self._best
        enough = self._here >= self._enough
        if (self._here >= _FEWEST and here.rate - here.doubt > best.rate) or (
            enough and here.rate > _MARGIN * best.rate
        ):
            self._best = self.place
        hopeless = self._here >= _FEWEST and here.rate + here.doubt < _MARGIN * best.rate
        return self._best if enough or hopeless else self.place


@dataclass
class BestPlace:
    """Says where drafts are to run; hears of every step.

    places: that there are, the preferred one first; with none or one of them there is nothing to measure.
    """

    places: Sequence[Place]
    _measured: dict[Kind, _Measured] = field(default_factory=dict)
    _kind: Kind | None = None  # that it goes by
    _other: Kind | None = None  # that came instead
    _lasted: int = 0  # steps in a row of that
    _settling: int = 0  # steps
    _reading: int = 0
    _heard: bool = False  # guesses, since the last change

    @property
    def place(self) -> Place:
        """The best as far as it is known, or another one to see how fast that is."""
        if self._kind is not None:
            return self._measured[self._kind].place
        return self.places[0] if self.places else "none"

    def settle(self, steps: int = _SETTLING) -> None:
        """The next few steps don't count, nor do those before drafts that were asked again say something."""
        self._settling, self._reading, self._heard = steps, _READING, False

    def stepped(self, kind: Kind, tokens: int, seconds: float, heard: bool) -> None:
        """A step of such a batch committed so many tokens, and took so long with all that belongs to it.

        heard: drafts guessed for it.
        """
        if len(self.places) < 2 or not self._goes_by(kind):
            return
        self._heard = self._heard or heard
        if self._settling:
            if self._heard or self.place == "none" or not self._reading:
                self._settling -= 1
            else:
                self._reading -= 1
            self._measured[kind].looked(tokens, seconds)
        elif self._measured[kind].stepped(tokens, seconds):
            self._arrive(kind)

    def _goes_by(self, kind: Kind) -> bool:
        """Whether a step counts; another kind does once it has lasted, since every change has texts read again."""
        if kind == self._kind:
            self._other = None
            return True
        if kind != self._other:
            self._other, self._lasted = kind, 0
        self._lasted += 1
        if self._kind is not None and self._lasted < _LASTING:
            return False
        before = self.place if self._kind is not None else None
        if self._kind is not None:
            self._measured[self._kind].leave()
        self._kind, self._other = kind, None
        if kind not in self._measured:
            nearest = self._nearest(kind)
            near = nearest is not None and max(nearest, kind[0]) <= 2 * min(nearest, kind[0])
            like = self._measured[nearest, kind[1]] if nearest is not None else None
            self._measured[kind] = _Measured(self.places, _enough(kind), like, near)
        if self.place != before:
            self._arrive(kind)
        return True

    def _nearest(self, kind: Kind) -> int | None:
        """How many sequences the measured kind has that is most like a new one."""
        sizes = [sequences for sequences, greedy in self._measured if greedy == kind[1]]
        return min(sizes, key=lambda size: max(size, kind[0]) / min(size, kind[0]), default=None)

    def _arrive(self, kind: Kind) -> None:
        """At a place for the first time, drafts and windows have to learn what works there."""
        learning = self.place != "none" and self._measured[kind].unknown
        self.settle(_enough(kind) if learning else _SETTLING)


def _enough(kind: Kind) -> int:
    return max(_FEWEST, _ENOUGH // kind[0])
