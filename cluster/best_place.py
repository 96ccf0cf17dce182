"""Where drafts run best: measured by turns, for each kind of batch, by what a target decodes in a second.

Replicas of their own, which draft while the target verifies; the target's own process, where both take turns; none, since
drafts don't always pay, where it is still guessed what lookup in the text finds, as everywhere; and for more than a few
sequences "off", where nothing is guessed.
"""

from collections.abc import Sequence
from math import log2
from typing import Literal

from cluster.place_speed import PromptTime, Speed

Place = Literal["separate", "shared", "none", "off"]
PLACES: tuple[Place, ...] = ("separate", "shared", "none", "off")

_ENOUGH = 48  # steps of one sequence that say how fast a place is; of more sequences together, fewer do
_FEWEST = 12  # steps of any batch
_STAY = 4  # times as many steps in a row at the best place, at least, before a look at another one
_FEW = 4  # sequences; up to so many, drafts nearly always pay: they are asked at once, and first looks are quick
_AFFORDED = 0.005  # of the time: what looks at a place may cost, with all that changing places does
_GIVEN_S = 0.2  # what the first look at a place may cost
_LOSS = 0.6  # of the steps that say how fast a place is: what a look costs, as long as none has shown it
_SETTLING = 4  # first steps at a place that don't count: windows and drafts find their way back
_READING = 256  # steps at most that drafts may take to read the texts again, before what they don't say counts
_LASTING = 48  # steps in a row of other kinds of batches before these are gone by
_LEAVING = 4  # the same where drafts are known not to pay; and before looks of the former kind end
_MARGIN = 1.03  # a place where drafts have to read texts again has to be so much faster, and so has guessing nothing

Kind = tuple[int, bool]  # of a batch: how many sequences, about, and whether all are greedy


def kind_of(sequences: int, greedy: bool) -> Kind:
    """What is measured together: where drafts pay depends on how many sequences share a step, and on their sampling.

    The power of two that is nearest by ratio: a full batch, which often is one, and what is left of it for a moment are the
    same kind.
    """
    return 1 << round(log2(sequences)), greedy


class Savings:
    """What looks may cost: a share of the time, for each place.

    With many sequences, whose texts drafts have to read first, a look costs seconds.
    """

    def __init__(self, given_s: float) -> None:
        self._saved_s = dict.fromkeys(PLACES, given_s)

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
        self, kind: Kind, places: Sequence[Place], first: Place, first_looks: Savings, like: "_Measured | None"
    ) -> None:
        """first: where it begins. first_looks: what these may cost, over all kinds.

        like: a kind with half or twice as many sequences: what was measured there of other places, over the first one, is
        believed here until they are looked at.
        """
        self._speeds = {place: Speed() for place in places}
        self._seen: set[Place] = set()  # here
        self.prompts = PromptTime()
        self._first_looks, self._looks = first_looks, Savings(0)
        self._taken_over = like.over(first) if like is not None else {}
        self.size = kind[0]
        self._few = self.size <= _FEW
        self.enough = max(_FEWEST, _ENOUGH // self.size)  # steps
        self.best: Place = first
        self.place = self.best  # or one that is looked at
        self._here = 0  # steps, since it is that
        self._look: Place | None = None  # the place that is looked at, or was, until drafts are back from it
        self._look_s = 0.0  # what that has cost
        self._prices: dict[Place, float] = {}  # what the last looks have cost, in steps

    @property
    def unknown(self) -> bool:
        """Whether nothing was measured at this place yet."""
        return self.place not in self._seen

    @property
    def compared(self) -> bool:
        """Whether the best place was."""
        return len(self._seen) > 1

    def over(self, base: Place) -> dict[Place, Speed]:
        """What was measured at the other places, with this one's tokens per second for one."""
        seen = {place for place in self._seen if not self._speeds[place].forgotten}
        known = seen - {base} if base in seen else ()
        return {place: self._speeds[place].like(1 / self._speeds[base].rate) for place in known}

    def enter(self, fewer: bool) -> None:
        """It is this kind's turn; a look that another kind interrupted is given up.

        fewer: than before. What is left of a batch is no reason for a look, as long as others may come.
        """
        if self.place != self.best or (fewer and not self._few):
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
        elif self.place == self.best and self._look is not None:  # back from it, or it is the best now
            self._prices[self._look] = max(0.0, self._look_s) / self._speeds[self.best].step_s
            self._look = None
        return self.place != before

    def looked(self, tokens: int, seconds: float) -> None:
        """A step that belongs to a look, if one goes on, and perhaps says nothing of its place: it has its cost."""
        if self._look is not None:
            self._look_s += seconds - tokens / self._speeds[self.best].rate

    def earn(self, seconds: float) -> None:
        """Batches of this kind took so long."""
        self._looks.earn(seconds)

    def _take_over(self) -> None:
        for place, speed in self._taken_over.items():
            if place not in self._seen:
                self._speeds[place] = speed.like(self._speeds[self.best].rate)
        self._taken_over = {}

    def _next(self) -> Place:
        best, here = self._speeds[self.best], self._speeds[self.place]
        if self.place == self.best:
            return self._faster() or self._looked_at() or self.best
        enough = self._here >= self.enough
        if (self._here >= _FEWEST and here.rate - here.doubt > best.rate) or (
            enough and here.rate > _margin(self.place) * best.rate
        ):
            self.best = self.place
        hopeless = self._here >= _FEWEST and here.at_best < _margin(self.place) * best.rate
        return self.best if enough or hopeless else self.place

    def _faster(self) -> Place | None:
        """Another place that is known to be, where the best one has become slower; it is the best now."""
        known = [place for place in self._seen - {self.best} if self._speeds[place].steps >= _FEWEST / 2]
        fastest = max(known, key=lambda place: self._speeds[place].rate, default=self.best)
        if self._here < self.enough or self._speeds[fastest].rate <= _MARGIN * self._speeds[self.best].rate:
            return None
        self.best = fastest
        return fastest

    def _looked_at(self) -> Place | None:
        """Another place that is worth a look, which begins."""
        others = [place for place in self._speeds if place != self.best]
        others.sort(key=lambda place: -self._speeds[place].at_best)
        found = next((place for place in others if self._worth_a_look(place)), None)
        if found is not None:
            self._look, self._look_s = found, 0.0
            self._savings(found).begin(found)
        return found

    def _worth_a_look(self, place: Place) -> bool:
        new, best = place not in self._seen, self._speeds[self.best]
        stayed = self._here >= self.enough * (1 if new and self._few else _STAY)
        hoped = self._speeds[place].at_best > _margin(place) * best.rate
        free = new and (self._few or not _drafts(place))
        price_s = self._prices.get(place, _LOSS * self.enough) * best.step_s
        return stayed and hoped and (free or self._savings(place).affords(place, price_s))

    def _savings(self, place: Place) -> Savings:
        return self._looks if place in self._seen else self._first_looks


class BestPlace:
    """Says where drafts are to run; hears of every step."""

    def __init__(self, places: Sequence[Place], former: "BestPlace | None" = None) -> None:
        """places: that there are, the preferred one first; with none or one of them there is nothing to measure.

        former: what said so for other drafts: where these paid, the new ones are asked at once.
        """
        self.places = places
        self._first_looks: Savings = Savings(_GIVEN_S) if former is None else former._first_looks
        self._paid: dict[Kind, Place] = {} if former is None else former._paying()
        self._measured: dict[Kind, _Measured] = {}
        self._kind: Kind | None = None  # that it goes by
        self._wanted: Place | None = None  # by other kinds, which came instead
        self._lasted = 0  # steps in a row of those
        self._settling = 0  # steps
        self._reading = 0  # steps that may still be lost, by drafts that read or prompts that are long
        self._heard = False  # guesses, since the last change

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
        self._first_looks.earn(seconds)
        if len(self.places) < 2 or not tokens or not self._goes_by(kind):
            return  # requests that fail at their first token say nothing of a place
        measured = self._measured[kind]
        measured.earn(seconds)
        reading_s = prompt_tokens * measured.prompts.each_s
        self._heard = self._heard or heard
        if self._settling:
            if self._heard or not _drafts(self.place) or not self._reading:
                self._settling -= 1
            else:
                self._reading -= 1
            measured.looked(tokens, max(seconds / 2, seconds - reading_s))
            return
        if self.place == measured.best:
            measured.prompts.add(prompt_tokens, seconds)
        if prompt_tokens and not (measured.prompts.known and reading_s < seconds / 2):
            self._reading -= 1  # what is left of such a step says little
            if self._reading < 0 and self.place != measured.best:
                self._give_up(measured, fewer=False)
        elif measured.stepped(tokens, seconds - reading_s):
            self._arrive(measured)

    def _goes_by(self, kind: Kind) -> bool:
        """Whether a step counts; another kind does once it has lasted, since every change has texts read again."""
        if kind == self._kind:
            self._wanted = None
            return True
        measured, before = self._measured.get(kind) or self._new(kind), None
        if measured.best != self._wanted:
            self._wanted, self._lasted = measured.best, 0
        self._lasted += 1
        if self._kind is not None:
            former, before, fewer = self._measured[self._kind], self.place, kind[0] < self._kind[0]
            if self._lasted == _LEAVING and before != former.best:
                self._give_up(former, fewer)
                before = self.place
            known = measured.compared or kind[0] > 2 * former.size or not _drafts(before)
            leaves = known and not _drafts(measured.best)
            if measured.best != before and self._lasted < (_LEAVING if leaves else _LASTING):
                return False
            measured.enter(fewer)
        self._kind, self._wanted, self._measured[kind] = kind, None, measured
        if self.place != before:
            self._arrive(measured)
        return True

    def _give_up(self, measured: _Measured, fewer: bool) -> None:
        """Ends a look."""
        measured.enter(fewer)
        self._arrive(measured)

    def _new(self, kind: Kind) -> _Measured:
        """A kind begins where the nearest one is fastest, unless it has more than twice as many sequences: drafts that pay
        with many pay with fewer, hardly the other way round.
        """
        (size, greedy), first = kind, self._paid.get(kind)
        known = [each for (_, also), each in self._measured.items() if also == greedy and each.compared]
        like = min(known, key=lambda each: (max(each.size, size) / min(each.size, size), -each.size), default=None)
        if first is None and like is not None and size <= 2 * like.size:
            first = like.best
        if first is None or first not in self.places:
            first = "none" if size > _FEW and "none" in self.places else self.places[0]
        if first == "off" and "none" in self.places and (like is None or size < like.size):
            first = "none"  # guesses that don't pay with many sequences may with fewer
        places = [place for place in self.places if place != "off" or size > _FEW]
        near = like if like is not None and like.size <= 2 * size and size <= 2 * like.size else None
        return _Measured(kind, places, first, self._first_looks, near)

    def _paying(self) -> dict[Kind, Place]:
        """Where drafts are best, by kinds with which they paid."""
        return {kind: each.best for kind, each in self._measured.items() if _drafts(each.best)}

    def _arrive(self, measured: _Measured) -> None:
        """At a place for the first time, drafts and windows have to learn what works there."""
        learning = _drafts(self.place) and measured.unknown
        self.settle(measured.enough if learning else _SETTLING)


def _drafts(place: Place) -> bool:
    """Whether drafts run there, which have to read the texts first."""
    return place in ("separate", "shared")


def _margin(place: Place) -> float:
    """How much faster a place has to be than the best."""
    return 1.0 if place == "none" else _MARGIN
