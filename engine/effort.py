"""How much drafting pays where drafter and target take turns.

One principle: a millisecond is worth the tokens that decoding brings in one, lately. A node that the target verifies, and a
draft step before that, have to bring more tokens than their milliseconds are worth. So a drafter rests where its steps bring
too little, where lookup has most of it already as where nothing can be guessed, and comes back with a look now and then.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from engine.budget import Calibration, CostModel, Counts, GoodputWindow, near, reach
from engine.compiled import compiled
from engine.drafters import Drafter
from engine.step import Outcome, Plan, rows_of
from engine.tree import ROOT, TokenTree
from engine.tree_loops import Nodes, frontier, top
from engine.types import FloatArray, IntArray

RECENT = 0.05  # weight of the newest step: text changes its kind within a sequence, and so does what pays
_LOOKING = 0.005  # of the time: what a resting drafter may take to see whether it pays again
_LOOKS = 4  # target steps in a row before which it does: the first one finds everything cold
_AHEAD = 8  # draft steps that are thought of together
_DRAFT_STEPS = 16  # in a row, whose cost is learned one by one
# How often a draft's likeliest child is taken to be right before anything is known, and how sure that is.
_FIRST_SHARE, _FIRST_REACHED = 0.7, 4.0
_USUAL = 2  # committed tokens that a draft has to read at most where it did not rest
_OF_ONE_TREE = 0.6  # of a draft step of one tree: what it takes for each of many, before it is known
_OF_A_STEP = 0.12  # of a draft step: what reading another one takes, before it is known

# What a millisecond is worth; milliseconds of 1, 2, 3... draft steps in a row; and of reading what was committed meanwhile.
Costs = tuple[float, FloatArray, float]


class EffortWindow(GoodputWindow):
    """A goodput window that also says, before each target step, whether one more draft step pays.

    Belongs to one loop that takes turns. What a draft step will bring is what earlier ones did: the probability of the
    likeliest child of each node that they expanded, as a share of the node's own. That child may have been there before, by
    a lookup: then the step has made it surer, or put another one in its place.
    """

    def __init__(
        self,
        calibration: Calibration,
        cost: CostModel,
        draft_ms: float,
        rows: int = 8,
        max_nodes: int = 31,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cost: of a target step, which this learns. draft_ms: a first guess at a draft step of one tree.

        rows: of a tree in one.
        """
        super().__init__(calibration, cost, max_nodes)
        self._draft_ms = draft_ms
        self._drafting: dict[int, CostModel] = {}  # by trees, to a power of two
        self._trees = 1  # that the draft steps before this target step grow
        self.behind_ms = _OF_A_STEP * draft_ms  # of each token that a draft which rested has to read first
        self._rows = rows
        self._clock = clock
        self._mark = 0.0  # when the draft step, or the target step, began
        self._ended: float | None = None  # when the last target step did; None where other work came since
        self._covered = _FIRST_SHARE * _FIRST_REACHED
        self._reached = _FIRST_REACHED
        self._tokens = self._ms = 0.0  # of recent steps
        self._between_ms = 0.0  # of recent steps: what is neither the target's pass nor the draft's
        self._draft_steps, self._drafted_ms = 0, 0.0  # since the last target step
        self._drafted_before = False  # the target step before that
        self._rested_ms = 0.0  # since the last draft step
        self._looks = 0  # target steps with a draft step that need not pay
        self._expanding: list[IntArray] = []  # of each tree, by the draft step that runs
        self._sizes: list[int] = []  # of each tree, before it
        self._reached_now = 0.0

    @property
    def worth(self) -> float:
        """Tokens that a millisecond is worth, of all sequences together; 0 before the first step."""
        return self._tokens / self._ms if self._ms else 0.0

    def drafting(self, trees: int) -> CostModel:
        """Of draft steps before a target step, which grow so many trees: the first one finds no weights in the caches."""
        kind = 1 << (trees.bit_length() - 1)
        if kind not in self._drafting:
            self._drafting[kind] = cost = CostModel()
            for steps in range(1, _DRAFT_STEPS + 1):
                cost.start(steps, steps * self._draft_ms * max(1.0, kind * _OF_ONE_TREE))
        return self._drafting[kind]

    @property
    def share(self) -> float:
        """Of the probability of the nodes that a draft step expands: what their likeliest children have."""
        return self._covered / self._reached

    def pays(self, trees: Sequence[TokenTree]) -> bool:
        """Whether the drafter should take a step before the target does; `grew` has to follow one.

        It may only pay together with those behind it, which are cheaper.
        """
        self._trees, self._sizes = len(trees), [tree.size for tree in trees]
        known, starts, below, self._expanding, count = [], [], [], [], 0
        for tree in trees:
            found, at, ways, nodes = before(*self.calibration.counts(tree), tree.nodes, tree.size, self._rows)
            known.append(found)
            starts.append(at)
            ways[ways >= 0] += count
            below.append(ways)
            self._expanding.append(nodes)
            count += len(found)
        at_all = np.concatenate(starts)
        self._reached_now = float(at_all.sum())
        most, done = self.most(len(trees)), self._draft_steps
        share, milliseconds = np.float32(self.share), self.cost.verifying(len(trees), most)
        all_known, all_below = np.concatenate(known), np.concatenate(below)
        gain = gain_of(all_known, at_all, all_below, share, milliseconds, self._costs(0), most, done)
        looks = len(at_all) > 0 and self._draft_steps == 0 and self._looks_again()
        self._mark = self._clock()
        return gain > 0 or looks

    def grew(self, trees: Sequence[TokenTree]) -> None:
        """The draft step ended that `pays` was asked about."""
        self._draft_steps += 1
        self._drafted_ms += 1000 * (self._clock() - self._mark)
        self._learn_drafting()
        covered, read_on = 0.0, True
        for tree, nodes, size in zip(trees, self._expanding, self._sizes, strict=True):
            covered += covered_by(tree.nodes, self.calibration.paths(tree), nodes)
            read_on = read_on and tree.size == size and not tree.expanded[nodes].any()
        if not read_on:  # else a long prefix is being read: it isn't known yet what the drafter is good for
            self._rested_ms = 0.0
            self._covered += RECENT * (covered - self._covered)
            self._reached += RECENT * (self._reached_now - self._reached)

    def stakes(self, tree: TokenTree, behind: int) -> "Stakes":
        """What says whether draft steps pay, for a drafter that takes several in one go; `grew_on` has to follow.

        behind: tokens that it has to read first, but for those that the session was opened with: read once, for all steps.
        """
        trials, hits = self.calibration.counts(tree)
        self._trees, self._mark = 1, self._clock()
        return Stakes(
            trials,
            hits,
            self.cost.verifying(1, self.max_nodes),
            self._costs(behind),
            self._covered,
            self._reached,
            self._looks_again(),
        )

    def grew_on(self, steps: int, covered: float, reached: float, behind: int) -> None:
        """So many draft steps ended, the first since the last target step; covered, reached: what became of `Stakes`.

        behind: tokens that were read first, the prompt's too.
        """
        if steps:
            self._covered, self._reached = covered, reached
            self._draft_steps, self._drafted_ms, self._rested_ms = steps, 1000 * (self._clock() - self._mark), 0.0
            if behind > _USUAL:
                each_ms = (self._drafted_ms - self._takes_ms(steps)) / (behind - _USUAL)
                self.behind_ms += RECENT * (near(each_ms, self.behind_ms) - self.behind_ms)
            else:
                self._learn_drafting()

    def drafted(self) -> None:
        """No draft step follows: the target's step begins."""
        self._mark = self._clock()

    def stepped(self, rows: int, tokens: int, sequences: int = 1) -> None:
        """It ended and did nothing but decode; it had so many rows, of so many sequences, and committed so many tokens."""
        now = self._clock()
        took_ms = 1000 * (now - self._mark)
        self.cost.observe(rows, took_ms, sequences)
        target_ms = self.cost.milliseconds(rows, sequences)
        between_ms = 1000 * (now - self._ended) - took_ms - self._drafted_ms if self._ended is not None else target_ms
        if between_ms < target_ms:  # else there was something else to do, or nothing at all
            self._between_ms += RECENT * (between_ms - self._between_ms)
        self._tokens += RECENT * (tokens - self._tokens) if self._ms else tokens
        # what steps cost as a rule: how long this one took says more about the machine
        drafting_ms = self._takes_ms(self._draft_steps) if self._draft_steps else 0.0
        spent_ms = target_ms + drafting_ms + self._between_ms
        self._ms += RECENT * (spent_ms - self._ms) if self._ms else spent_ms
        self._rested_ms += target_ms
        self._begin(now)

    def ended(self, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
        """The target step ended that `drafted` began.

        Where it did more than decode, or failed and has no outcomes, it says nothing of what decoding costs, nor do the
        draft steps before it.
        """
        if outcomes and all(outcome.decoded for outcome in outcomes):
            self.stepped(rows_of(plans), sum(len(outcome.tokens) for outcome in outcomes), len(plans))
        else:
            self._begin(None)

    def _looks_again(self) -> bool:
        """Whether a resting drafter takes a step to see whether it pays again."""
        if self._rested_ms * _LOOKING > _LOOKS * self._takes_ms(1):
            self._looks = _LOOKS
        return self._looks > 0

    def _costs(self, behind: int) -> Costs:
        reading_ms = max(0, behind - _USUAL) * self.behind_ms
        return self.worth, self.drafting(self._trees).table(_DRAFT_STEPS + _AHEAD)[1:], reading_ms

    def _takes_ms(self, steps: int) -> float:
        """So many draft steps in a row."""
        return float(self.drafting(self._trees).table(steps)[steps])

    def _learn_drafting(self) -> None:
        """So many draft steps have taken so long. After a rest they take longer, and would make the rest last."""
        if self._drafted_before:
            self.drafting(self._trees).observe(self._draft_steps, self._drafted_ms)

    def _begin(self, ended: float | None) -> None:
        """Another target step comes."""
        self._ended = ended
        self._looks -= self._looks > 0
        self._drafted_before = self._draft_steps > 0
        self._draft_steps, self._drafted_ms = 0, 0.0

    def _best(self, reach: FloatArray, milliseconds: FloatArray, sequences: int) -> tuple[int, float]:
        count, accepted, _ = _most_worth(reach, milliseconds, self.worth)
        return count, accepted


class Stakes(NamedTuple):
    """What says whether draft steps of one tree pay; see EffortWindow."""

    trials: Counts
    hits: Counts
    milliseconds: FloatArray  # of target steps that verify 0, 1, 2... nodes
    costs: Costs
    covered: float
    reached: float
    looks: bool  # whether the first one is taken in any case


@runtime_checkable
class GrowsOn(Protocol):
    """A drafter that can take several steps in one go, as long as they pay."""

    def grow_on(self, most: int, effort: EffortWindow) -> list[int] | None:
        """Up to `most` draft steps; the sessions that were worked on, or None where that takes `grow`."""


def draft_steps(drafter: Drafter, sessions: Sequence[int], most: int, effort: EffortWindow | None) -> set[int]:
    """What a drafter does before a target step: up to `most` steps, as long as the next one pays; the sessions that grew.

    effort: None takes all of them.
    """
    if effort is not None and isinstance(drafter, GrowsOn) and (worked := drafter.grow_on(most, effort)) is not None:
        effort.drafted()
        return set(worked)
    grown: set[int] = set()
    for _ in range(most):
        trees = [drafter.tree(session) for session in sessions]
        if effort is not None and not effort.pays(trees):
            break
        now = drafter.grow()
        if not now:  # nor would the next step find anything
            break
        if effort is not None:
            effort.grew(trees)
        grown.update(now)
    if effort is not None:
        effort.drafted()
    return grown


@compiled
def _most_worth(reach: FloatArray, milliseconds: FloatArray, worth: float) -> tuple[int, float, float]:
    """How many of the nodes, the likeliest first, are worth most; the accepted ones to expect; the value of these.

    milliseconds: of steps that verify 0, 1, 2... of the nodes [nodes + 1].
    """
    count, accepted, value, expected = 0, 0.0, -worth * milliseconds[0], 0.0
    for n in range(1, len(milliseconds)):
        expected += reach[n - 1]
        brings = expected - worth * milliseconds[n]
        if brings > value:
            count, accepted, value = n, expected, brings
    return count, accepted, value


@compiled
def before(
    trials: Counts, hits: Counts, nodes: Nodes, size: int, rows: int
) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
    """Before a draft step: the reach of all nodes but the root; of those that it expands; their ways; and these.

    Ways: int32 [expanded, _AHEAD], the likeliest child of each, that one's, and so on, as places in what comes first, or -1.
    """
    found = reach(trials, hits, nodes, size)
    expanding = _next(nodes, size, rows)
    heir = np.full(size, -1, np.int32)
    for node in range(1, size):
        parent = nodes.parent[node]
        if heir[parent] < 0 or found[node] > found[heir[parent]]:
            heir[parent] = node
    ways = np.full((len(expanding), _AHEAD), -1, np.int32)
    for i in range(len(expanding)):
        node = heir[expanding[i]]
        for step in range(_AHEAD):
            if node < 0:
                break
            ways[i, step], node = node - 1, heir[node]
    return found[1:], found[expanding], ways, expanding


@compiled
def gain_of(
    known: FloatArray,
    starts: FloatArray,
    ways: IntArray,
    share: np.float32,
    milliseconds: FloatArray,
    costs: Costs,
    most: int,
    done: int,
) -> float:
    """How much more is expected, less what its milliseconds are worth, of the best number of draft steps from one on.

    known: the probability of each node; starts: of those that the first of the steps expands, behind which the next ones
    go on; ways: see `before`. What a step finds is as likely as what was there, at least. milliseconds: of steps that
    verify 0, 1, 2... up to `most` nodes. done: draft steps so far; before the first one, what was committed meanwhile is
    read.
    """
    worth, drafting, reading_ms = costs
    as_it_is = _value(known, milliseconds, worth, most)
    count, gain = len(known), -np.inf
    found = np.concatenate((known, np.zeros(_AHEAD * len(starts), np.float32)))
    likely = starts.copy()
    for step in range(_AHEAD):
        for i in range(len(starts)):
            at = ways[i, step]
            likely[i] = max(share * likely[i], found[at] if at >= 0 else np.float32(0))
            if at < 0:
                at, count = count, count + 1
            found[at] = likely[i]
        if step & (step + 1):
            continue  # 1, 2, 4 and 8 steps are enough to compare
        price = worth * (drafting[done + step] + (-drafting[done - 1] if done else np.float32(reading_ms)))
        gain = max(gain, _value(found[:count], milliseconds, worth, most) - as_it_is - price)
    return gain


@compiled
def _value(found: FloatArray, milliseconds: FloatArray, worth: float, most: int) -> float:
    likeliest = found[top(found, most)]
    return _most_worth(likeliest, milliseconds[: len(likeliest) + 1], worth)[2]


@compiled
def _next(nodes: Nodes, size: int, rows: int) -> IntArray:
    """What a draft step expands: the root where it is new, else the most probable of what wasn't expanded yet."""
    if not nodes.expanded[ROOT]:
        return np.zeros(1, np.int32)
    return frontier(nodes, size, rows, len(nodes.parent))


@compiled
def covered_by(nodes: Nodes, reach: FloatArray, expanded: IntArray) -> float:
    """The probability of the likeliest child of each of the nodes, together."""
    covered = 0.0
    for above in expanded:
        best = 0.0
        for node in range(above + 1, len(reach)):
            if nodes.parent[node] == above:
                best = max(best, float(reach[node]))
        covered += best
    return covered
