"""Where drafts run best: measured by turns, for each kind of batch, by what a target decodes in a second.

Three places: replicas of their own, which draft while the target verifies; the target's own process, where both take turns;
and none, since drafts don't always pay. Every place guesses what lookup in the text finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Literal

from cluster.place_speed import PromptTime, Speed

Place = Literal["separate", "shared", "none"]
PLACES: tuple[Place, ...] = ("separate", "shared", "none")

_ENOUGH = 48  # steps of one sequence that say how fast a place is; of more sequences together, fewer do
_FEWEST = 12  # steps of any batch
_STAY = 4  # times as many steps in a row at the best place, at least, before a look at another one
_FEW = 4  # sequences; up to so many, drafts nearly always pay: they are asked at once, and first looks are quick
_AFFORDED = 0.005  # of the time: what looks at a place may cost, with all that changing places does
_GIVEN_S = 0.2  # what the first look at a place may cost
_LOSS = 0.3  # of a look's steps, first ones too: what it costs, as long as none has shown it
_SETTLING = 4  # first steps at a place that don't count: windows and drafts find their way back
_READING = 256  # steps at most that drafts may take to read the texts again, before what they don't say counts
_LASTING = 24  # steps in a row of another kind of batch before it is gone by
_LEAVING = 4  # before looks of the former kind end, and before drafts are left alone where they don't pay
_MARGIN = 1.03  # a place where drafts have to read texts again has to be so much faster

Kind = tuple[int, bool]  # of a batch: how many sequences, about, and whether all are greedy


def kind_of(sequences: int, greedy: bool) -> Kind:
    """What is measured together: where drafts pay depends on how many sequences share a step, and on their sampling.

    The power of two that is nearest by ratio: a full batch, which often is one, and what is left of it for a moment are the
    same kind.
    """
    return 1 << round(log2(sequences)), greedy


@dataclass
class Savings:
    """What looks at other places may cost: a share of the time, for each place, over all kinds of batches.

    With many sequences, whose texts drafts have to read first, a look costs seconds.
    """

    _saved_s: dict[Place, float] = field(default_factory=lambda: dict.fromkeys(PLACES, _GIVEN_S))

    def earn(self, seconds: float) -> None:
        """So much time went by."""
        for place in PLACES:
            self._saved_s[place] += _AFFORDED * seconds

    def affords(self, place: Place, price_s: float) -> bool:
        """Whether there is enough for a look."""
        return self._saved_s[place] >= price_s

    def begin(self, place: Place) -> None:
        """A look begins, with all there is: nothing is put by for two."""
        self._saved_s[place] = 0.0


class _Measured:
    """One kind of batch: the best of some places so far, and looks at those that may be faster.

    What is known of a place fades, so that it is looked at again: the sooner, the nearer to the best it was
    (upper confidence bounds, discounted: Garivier and Moulines 2011, https://arxiv.org/abs/0805.3415), but not before
    there are savings for it.
    """

    def __init__(
        self, kind: Kind, places: Sequence[Place], savings: Savings, like: "_Measured | None" = None, near: bool = False
    ) -> None:
        """like: a kind with about as many sequences.

        near: what was measured there of the other places, over the best, is believed here until they are looked at.
        """
        self._speeds = {place: Speed() for place in places}
        self._seen: set[Place] = set()  # here
        self.prompts = PromptTime()
        self._savings = savings
        self._taken_over = like.over_the_best() if like is not None and near else {}
        self._few = kind[0] <= _FEW
        self.enough = max(_FEWEST, _ENOUGH // kind[0])  # steps
        self.size = kind[0]
        self.best: Place = self._first(places, like)
        self.place = self.best  # or one that is looked at
        self._here = 0  # steps, since it is that
        self._look: Place | None = None  # the place that is looked at, or was, until drafts are back from it
        self._look_s = 0.0  # what that has cost
        self._prices: dict[Place, float] = {}  # what the last looks have cost, in steps

    @property
    def unknown(self) -> bool:
        """Whether nothing was measured at this place yet."""
        return self.place not in self._seen

    def over_the_best(self) -> dict[Place, Speed]:
        """What was measured at the other places, with the best one's tokens per second for one."""
        best = self._speeds[self.best]
        places = self._seen - {self.best} if best.steps else ()
        return {place: self._speeds[place].like(1 / best.rate) for place in places}

    def enter(self) -> None:
        """It is this kind's turn; a look that another kind interrupted is given up.

        What many sequences have done before they became fewer is no reason for a look: they may do so again.
        """
        if not self._few or self.place != self.best:
            self._here = 0
        self.place, self._look = self.best, None

    def stepped(self, tokens: int, seconds: float) -> bool:
        """A step at the present place; whether it is another one from now on."""
        for speed in self._speeds.values():
            speed.fade()
        self._speeds[self.place].add(tokens, seconds)
        self._seen.add(self.place)
        if self._taken_over and self._speeds[self.best].steps >= _FEWEST - 1:
            self._take_over()
        self._here += 1
        self.looked(tokens, seconds)
        before, self.place = self.place, self._next()
        if self.place != before:
            self._here = 0
        elif self.place == self.best:
            self._look = None  # back from it
        return self.place != before

    def looked(self, tokens: int, seconds: float) -> None:
        """A step that belongs to a look, if one goes on, and perhaps says nothing of its place: it has its cost."""
        best = self._speeds[self.best]
        if self._look is not None:
            self._look_s += seconds - tokens / best.rate
            self._prices[self._look] = max(0.0, self._look_s) / best.step_s

    def _first(self, places: Sequence[Place], like: "_Measured | None") -> Place:
        """Where it begins: drafts that pay with more sequences pay with fewer, hardly the other way round."""
        known = places[0] if like is None else like.best
        fewer = self._few or (like is not None and self.size <= like.size)
        return known if fewer or "none" not in places else "none"

    def _take_over(self) -> None:
        for place, speed in self._taken_over.items():
            if place not in self._seen:
                self._speeds[place] = speed.like(self._speeds[self.best].rate)
        self._taken_over = {}

    def _next(self) -> Place:
        best, here = self._speeds[self.best], self._speeds[self.place]
        if self.place == self.best:
            others = [place for place in self._speeds if place != self.best]
            others.sort(key=lambda place: -self._speeds[place].at_best)
            found = next((place for place in others if self._worth_a_look(place)), None)
            if found is None:
                return self.best
            self._look, self._look_s = found, 0.0
            self._savings.begin(found)
            return found
        enough = self._here >= self.enough
        if (self._here >= _FEWEST and here.rate - here.doubt > best.rate) or (
            enough and here.rate > _margin(self.place) * best.rate
        ):
            self.best = self.place
        hopeless = self._here >= _FEWEST and here.at_best < _margin(self.place) * best.rate
        return self.best if enough or hopeless else self.place

    def _worth_a_look(self, place: Place) -> bool:
        new = place not in self._seen
        stayed = self._here >= self.enough * (1 if new and self._few else _STAY)
        hoped = self._speeds[place].at_best > _margin(place) * self._speeds[self.best].rate
        free = new and (self._few or place == "none")
        return stayed and hoped and (free or self._savings.affords(place, self._price_s(place)))

    def _price_s(self, place: Place) -> float:
        return self._prices.get(place, _LOSS * 2 * self.enough) * self._speeds[self.best].step_s


@dataclass
class BestPlace:
    """Says where drafts are to run; hears of every step.

    places: that there are, the preferred one first; with none or one of them there is nothing to measure.
    """

    places: Sequence[Place]
    savings: Savings = field(default_factory=Savings)
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

    def stepped(self, kind: Kind, tokens: int, seconds: float, heard: bool, prompt_tokens: int = 0) -> None:
        """A step of such a batch committed so many tokens, and took so long with all that belongs to it.

        heard: drafts guessed for it. prompt_tokens: that it read besides, whose time is no merit or fault of a place.
        """
        self.savings.earn(seconds)
        if len(self.places) < 2 or not tokens or not self._goes_by(kind):
            return  # requests that fail at their first token say nothing of a place
        measured = self._measured[kind]
        reading_s = prompt_tokens * measured.prompts.each_s
        if not self._settling and self.place == measured.best:
            measured.prompts.add(prompt_tokens, seconds)
        if prompt_tokens and not (measured.prompts.known and reading_s < seconds / 2):
            return  # what is left says little
        self._heard = self._heard or heard
        if self._settling:
            if self._heard or self.place == "none" or not self._reading:
                self._settling -= 1
            else:
                self._reading -= 1
            measured.looked(tokens, seconds - reading_s)
        elif measured.stepped(tokens, seconds - reading_s):
            self._arrive(measured)

    def _goes_by(self, kind: Kind) -> bool:
        """Whether a step counts; another kind does once it has lasted, since every change has texts read again."""
        if kind == self._kind:
            self._other = None
            return True
        if kind != self._other:
            self._other, self._lasted = kind, 0
        self._lasted += 1
        measured = self._measured.get(kind) or self._new(kind)
        if self._kind is not None:
            former, before = self._measured[self._kind], self.place
            if self._lasted == _LEAVING and before != former.best:
                former.enter()
                self._arrive(former)
            lasts = _LEAVING if measured.best == "none" else _LASTING
            if measured.best != self.place and self._lasted < lasts:
                return False
        else:
            before = None
        self._kind, self._other = kind, None
        self._measured[kind] = measured
        measured.enter()
        if self.place != before:
            self._arrive(measured)
        return True

    def _new(self, kind: Kind) -> _Measured:
        sizes = [sequences for sequences, greedy in self._measured if greedy == kind[1]]
        nearest = min(sizes, key=lambda size: max(size, kind[0]) / min(size, kind[0]), default=None)
        if nearest is None:
            return _Measured(kind, self.places, self.savings)
        near = max(nearest, kind[0]) <= 2 * min(nearest, kind[0])
        return _Measured(kind, self.places, self.savings, self._measured[nearest, kind[1]], near)

    def _arrive(self, measured: _Measured) -> None:
        """At a place for the first time, drafts and windows have to learn what works there."""
        learning = self.place != "none" and measured.unknown
        self.settle(measured.enough if learning else _SETTLING)


def _margin(place: Place) -> float:
    """How much faster a place has to be than the best."""
    return 1.0 if place == "none" else _MARGIN
