"""How much drafting pays where drafter and target take turns.

One principle: a millisecond is worth the tokens that decoding brings in one, lately. A node that the target verifies, and a
draft step before that, have to bring more tokens than their milliseconds are worth. So a drafter rests where its steps bring
too little, where lookup has most of it already as where nothing can be guessed, and comes back with a look now and then.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.budget import Calibration, CostModel, Counts, GoodputWindow, near, reach
from engine.compiled import compiled
from engine.drafters import Drafter
from engine.tree import ROOT, TokenTree
from engine.tree_loops import Nodes, frontier, top
from engine.types import FloatArray, IntArray

_RECENT = 0.05  # weight of the newest step: text changes its kind within a sequence, and so does what pays
_LOOKING = 0.005  # of the time: what a resting drafter may take to see whether it pays again
_FIRST_SHARE, _FIRST_OPEN = (
    0.6,
    4.0,
)  # what draft steps are taken to cover before anything is known, and how sure that is


class EffortWindow(GoodputWindow):
    """A goodput window that also says, before each target step, whether one more draft step pays.

    Belongs to one loop that takes turns. What a draft step will bring is what earlier ones did: the probability of new
    children, as a share of what was open at the nodes that they expanded (reached, and none of the known children right).
    """

    def __init__(
        self,
        calibration: Calibration,
        cost: CostModel,
        draft_ms: float = 1.0,
        rows: int = 8,
        max_nodes: int = 31,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cost: of a target step, which this learns. draft_ms: a first guess at a draft step. rows: of a tree in one."""
        super().__init__(calibration, cost, max_nodes)
        self.draft_ms = draft_ms
        self._rows = rows
        self._clock = clock
        self._mark = 0.0  # when the draft step, or the target step, began
        self._covered = _FIRST_SHARE * _FIRST_OPEN
        self._open = _FIRST_OPEN
        self._tokens = self._ms = 0.0  # of recent steps
        self._draft_steps = 0  # since the last target step
        self._rested_ms = 0.0  # since the last draft step
        self._expanding: list[IntArray] = []  # of each tree, by the draft step that runs
        self._was_open = 0.0
        self._sizes: list[int] = []

    @property
    def worth(self) -> float:
        """Tokens that a millisecond is worth, of all sequences together; 0 before the first step."""
        return self._tokens / self._ms if self._ms else 0.0

    @property
    def share(self) -> float:
        """Of the open probability at the nodes that a draft step expands: what its likeliest children cover."""
        return self._covered / self._open

    def pays(self, trees: Sequence[TokenTree]) -> bool:
        """Whether the drafter should take a step before the target does; `grew` has to follow one."""
        known, opened, self._expanding = [], [], []
        for tree in trees:
            found, at, nodes = _before(*self.calibration.counts(tree), tree.nodes, tree.size, self._rows)
            known.append(found)
            opened.append(at)
            self._expanding.append(nodes)
        at_all = _joined(opened)
        self._was_open, self._sizes = float(at_all.sum()), [tree.size for tree in trees]
        milliseconds = self.cost.table(len(trees) + self.max_nodes)[len(trees) :]
        gain = _gain(_joined(known), np.float32(self.share) * at_all, milliseconds, self.worth, self.max_nodes)
        looks = self._rested_ms * _LOOKING > self.draft_ms and len(at_all) > 0
        self._mark = self._clock()
        return looks or gain > self.worth * self.draft_ms

    def grew(self, trees: Sequence[TokenTree]) -> None:
        """The draft step ended that `pays` was asked about."""
        self.draft_ms += _RECENT * (near(1000 * (self._clock() - self._mark), self.draft_ms) - self.draft_ms)
        self._draft_steps += 1
        covered = 0.0
        for tree, nodes, size in zip(trees, self._expanding, self._sizes, strict=True):
            if tree.size > size:
                covered += _covered(tree.nodes, self.calibration.paths(tree), nodes, size)
        if any(tree.expanded[nodes].any() for tree, nodes in zip(trees, self._expanding, strict=True)):
            self._rested_ms = 0.0  # not while a long prefix is read: it isn't known yet what the drafter is good for
            self._covered += _RECENT * (covered - self._covered)
            self._open += _RECENT * (self._was_open - self._open)

    def drafted(self) -> None:
        """No draft step follows: the target's step begins."""
        self._mark = self._clock()

    def stepped(self, rows: int, tokens: int) -> None:
        """The target step ended that `drafted` began; it had so many rows and committed so many tokens."""
        self.cost.observe(rows, 1000 * (self._clock() - self._mark))
        target_ms = float(self.cost.table(rows)[rows])
        self._tokens += _RECENT * (tokens - self._tokens) if self._ms else tokens
        # what steps cost as a rule: how long this one took says more about the machine
        spent_ms = target_ms + self._draft_steps * self.draft_ms
        self._ms += _RECENT * (spent_ms - self._ms) if self._ms else spent_ms
        self._rested_ms += target_ms
        self._draft_steps = 0

    def skipped(self) -> None:
        """The target step did more than decode: it says nothing of what decoding costs, nor do the draft steps before it."""
        self._draft_steps = 0

    def _best(self, reach: FloatArray, milliseconds: FloatArray, sequences: int) -> tuple[int, float]:
        count, accepted, _ = _most_worth(reach, milliseconds, self.worth)
        return count, accepted


def draft_steps(drafter: Drafter, sessions: Sequence[int], most: int, effort: EffortWindow | None) -> set[int]:
    """What a drafter does before a target step: up to `most` steps, as long as the next one pays; the sessions that grew.

    effort: None takes all of them.
    """
    grown: set[int] = set()
    for _ in range(most):
        trees = [drafter.tree(session) for session in sessions]
        if effort is not None and not effort.pays(trees):
            break
        now = drafter.grow()
        if effort is not None and now:
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


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@compiled
def _before(
    trials: Counts, hits: Counts, nodes: Nodes, size: int, rows: int
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Before a draft step: the reach of all nodes but the root; what is open at those that it expands; and these."""
    found = reach(trials, hits, nodes, size)
    expanding = _next(nodes, size, rows)
    return found[1:], _open(nodes, found, expanding), expanding


@compiled
def _gain(known: FloatArray, new: FloatArray, milliseconds: FloatArray, worth: float, most: int) -> float:
    """How much more is expected, less what its milliseconds are worth, if new nodes are known too.

    known, new: the probability of each node; milliseconds: of steps that verify 0, 1, 2... up to `most` nodes.
    """
    before = _value(known, milliseconds, worth, most)
    return _value(np.concatenate((known, new)), milliseconds, worth, most) - before


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
def _open(nodes: Nodes, found: FloatArray, expanding: IntArray) -> FloatArray:
    """Of each node: the probability that the walk reaches it and leaves what is known there, [nodes]."""
    left = np.empty(len(expanding), np.float32)
    for i in range(len(expanding)):
        left[i] = found[expanding[i]]
        for node in range(expanding[i] + 1, len(found)):
            if nodes.parent[node] == expanding[i]:
                left[i] -= found[node]
        left[i] = max(left[i], np.float32(0))
    return left


@compiled
def _covered(nodes: Nodes, reach: FloatArray, expanded: IntArray, old: int) -> float:
    """The probability of the likeliest new child of each of the nodes, together. old: the tree's size before."""
    covered = 0.0
    for above in expanded:
        best = 0.0
        for node in range(old, len(reach)):
            if nodes.parent[node] == above:
                best = max(best, float(reach[node]))
        covered += best
    return covered
