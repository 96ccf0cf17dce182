"""What to verify: one calibrated probability per node and one cost model of the target's step.

The goodput window maximises expected tokens per second, as SmartSpec does for chains (Liu et al. 2024,
https://arxiv.org/abs/2406.14066): nodes are taken in order of their probability while they earn more than they cost.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.compiled import compiled
from engine.step import MAX_WINDOW
from engine.tree import ROOT, TokenTree
from engine.tree_loops import Nodes, top
from engine.types import FloatArray, IntArray

Counts = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)
# Where bins of confidence begin. The surest, which most guesses are, are split further: behind 0.9 stand 0.77 to 0.98.
_EDGES = np.asarray([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 0.999], np.float32)
_DEPTHS = 8  # deeper nodes share the last
_PRIOR = 8.0  # trials that the draft's own confidence counts for
_PROBE_EVERY = 64  # steps without speculation between looks whether it pays again
_REACH = 1.5  # a step that took longer, or shorter, than this times what was believed counts as this
_ENOUGH_NEWS = 16  # observations, each of which changes little, before the table of costs is made anew
_TRUSTED = 100  # observations; more don't make a time surer
_LEARN = 0.05  # weight of the newest step
_NEW = 10.0  # observations of a size that say as much of it as of all others
_APART, _NEIGHBOURS = 32, 8  # up to so many rows, each number is a size of its own; beyond, some are one
_LEAST_FURTHER = 0.01  # of a step: what further sequences add to it at least, so that there is something to learn from
_EACH = 3  # draft tokens of each sequence in a step, where there are many
_MEMORY = 2000.0  # trials per cell that are remembered
_NOTHING = np.zeros(0, np.int32)  # no nodes
_NO_REACH = np.zeros(0, np.float32)


class Calibration:
    """The acceptance rate seen at each confidence and depth, starting from the confidence itself.

    Apart for greedy trees and others: noise takes a draft's confidence further from what the target chooses.
    """

    def __init__(self) -> None:
        self._trials = np.zeros((2, len(_EDGES), _DEPTHS))  # not greedy, greedy
        self._hits = np.zeros((2, len(_EDGES), _DEPTHS))
        self._centers = (_EDGES + np.append(_EDGES[1:], np.float32(1))) / 2

    def paths(self, tree: TokenTree) -> FloatArray:
        """Calibrated probability that the target's walk reaches each node, float32 [tree.size]."""
        return reach(*self.counts(tree), tree.nodes, tree.size)

    def counts(self, tree: TokenTree) -> tuple[Counts, Counts]:
        """Trials and hits by confidence and depth in trees like this one, as `reach` takes them."""
        kind = int(tree.greedy)
        return self._trials[kind], self._hits[kind]

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns from a step: of the verified `nodes`, those below the walked path were tried, those on it hit."""
        _count_tried(*self.counts(tree), tree.nodes, nodes, np.asarray([ROOT, *path], np.int32))

    def table(self) -> list[tuple[float, float, float]]:
        """(confidence, acceptance rate, trials) for each bin that was tried, all trees and depths together."""
        trials, hits = self._trials.sum((0, 2)), self._hits.sum((0, 2))
        return [(float(c), float(h / t), float(t)) for c, h, t in zip(self._centers, hits, trials, strict=True) if t]


@compiled
def _cell(confidence: float, depth: int) -> tuple[int, int]:
    known = 0
    for edge in _EDGES[1:]:
        known += confidence >= edge
    return known, min(max(depth, 1), _DEPTHS) - 1


@compiled
def reach(trials: Counts, hits: Counts, nodes: Nodes, size: int) -> FloatArray:
    """Of each node: the acceptance rate of its cell, begun with its own confidence, times its parent's reach."""
    out = np.ones(size, np.float32)
    for i in range(1, size):
        confidence = nodes.confidence[i]
        cell = _cell(confidence, nodes.depth[i])
        known = (hits[cell] + _PRIOR * confidence) / (trials[cell] + _PRIOR)
        out[i] = known * out[nodes.parent[i]]
    return out


@compiled
def _count_tried(trials: Counts, hits: Counts, nodes: Nodes, verified: IntArray, walked: IntArray) -> None:
    for node in verified:
        if (walked == nodes.parent[node]).any():
            cell = _cell(nodes.confidence[node], nodes.depth[node])
            forget = min(1.0, _MEMORY / (trials[cell] + 1.0))
            trials[cell] = (trials[cell] + 1.0) * forget
            hits[cell] = (hits[cell] + (walked == node).any()) * forget


class CostModel:
    """Milliseconds of a step by its size (a target's rows, or draft steps in a row), learned while serving.

    Each size costs its first measurement, times what all steps lately cost over theirs, times what is its own: where a
    machine becomes slower, it is slower at all sizes at once, and those seen rarely stay comparable with the others.
    Each sequence but the first adds to that, whatever it verifies: its keys and values are read once for all its rows.
    """

    def __init__(self, bucket: Callable[[int], int] = lambda rows: rows) -> None:
        """bucket: the number of rows that the model is really called with."""
        self._bucket = bucket
        self._first: dict[int, float] = {}
        self._own: dict[int, float] = {}  # of a size, over what all have in common
        self._common = 1.0
        self._further = 0.0  # milliseconds of each further sequence, but for what all have in common
        self._count: dict[int, int] = {}  # of observations
        self._called: list[int] = []  # the bucket of 0, 1, 2... rows
        self._table: FloatArray | None = None
        self._news = 0  # observations that the table doesn't know of

    def start(self, rows: int, milliseconds: float) -> None:
        """A first measurement, of one sequence."""
        self._first[rows] = milliseconds
        self._table = None

    def start_further(self, sequences: int, milliseconds: float) -> None:
        """What a row of each of so many sequences takes, two or more; that of one sequence's rows is known."""
        alone_ms = float(self.table(sequences)[sequences])
        self._further = max(milliseconds - alone_ms, _LEAST_FURTHER * alone_ms) / (sequences - 1)

    def again(self) -> "CostModel":
        """Another with the same first measurements."""
        other = CostModel(self._bucket)
        other._first, other._further = dict(self._first), self._further
        return other

    def observe(self, rows: int, milliseconds: float, sequences: int = 1) -> None:
        """Learns from one step, slowly: a single slow step is noise."""
        if milliseconds <= 0:
            return  # a clock that stands still says nothing
        rows = self._bucket(rows)
        rows = rows if rows <= _APART else round(rows / _NEIGHBOURS) * _NEIGHBOURS
        further = self._further * (sequences - 1)
        if rows not in self._first:
            self._first[rows] = self._plausible(rows, milliseconds - self._common * further) / self._common
        own = self._own.get(rows, 1.0)
        of_rows = self._first[rows] * own
        believed = (of_rows + further) * self._common
        off = _LEARN * (near(milliseconds, believed) / believed - 1)
        self._count[rows] = count = min(self._count.get(rows, 0) + 1, _TRUSTED)
        share = min(0.5, _NEW / count)  # what is its own is known once it was seen often: what changes then is common
        part = of_rows / (of_rows + further)
        self._common *= 1 + part * (1 - share) * off
        self._own[rows] = own * (1 + part * share * off)
        self._further *= 1 + (1 - part) * off
        self._news += 1
        if self._news >= _ENOUGH_NEWS or self._count[rows] < _ENOUGH_NEWS:
            self._table, self._news = None, 0

    def _plausible(self, rows: int, milliseconds: float) -> float:
        """What a size is taken to cost that was not seen before: a slow step is noise here too.

        A fast one is not beyond the largest size: costs are taken to grow in proportion there, where they often don't.
        """
        if not self._first:
            return milliseconds
        known, largest = float(self.table(rows)[rows]), max(self._first)
        if rows < largest:
            return near(milliseconds, known)
        return min(max(milliseconds, float(self.table(largest)[largest])), known * _REACH)

    def milliseconds(self, rows: int, sequences: int) -> float:
        """Of a step of so many rows, of so many sequences together."""
        return float(self.verifying(sequences, rows - sequences)[-1])

    def verifying(self, sequences: int, nodes: int) -> FloatArray:
        """Milliseconds of steps of so many sequences that verify 0..nodes draft tokens, float32 [nodes + 1]."""
        of_rows = self.table(sequences + nodes)[sequences:]
        further = self._common * self._further * (sequences - 1)
        return of_rows + np.float32(further) if further > 0 else of_rows

    def table(self, rows: int) -> FloatArray:
        """Milliseconds for 0..rows rows of one sequence, never falling; ones before anything was seen. [rows + 1]."""
        if self._table is None or len(self._table) <= rows:
            self._table = self._interpolate(max(rows, 2 * MAX_WINDOW))
        return self._table[: rows + 1]

    def _interpolate(self, rows: int) -> FloatArray:
        if not self._first:
            return np.ones(rows + 1, np.float32)
        self._share()
        points = sorted(self._first)
        known = [self._first[point] * self._own.get(point, 1.0) * self._common for point in points]
        values = _rising(known, [1 + self._count.get(point, 0) for point in points])
        while len(self._called) <= rows:
            self._called.append(self._bucket(len(self._called)))
        called = np.asarray(self._called[: rows + 1])
        # past the last point the cost is taken to grow in proportion
        beyond = np.maximum(called / points[-1], 1.0)
        table: FloatArray = (np.interp(called, points, values) * beyond).astype(np.float32)
        return table

    def _share(self) -> None:
        """What the sizes seen have in common is no longer their own."""
        seen = sum(self._count.values())
        if seen:
            mean = math.exp(sum(self._count[size] * math.log(own) for size, own in self._own.items()) / seen)
            self._common *= mean
            self._own = {size: own / mean for size, own in self._own.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a window expects of the step that it chose, and why it did."""

    sequences: int
    nodes: int
    accepted: float  # draft tokens expected to be accepted
    milliseconds: float  # expected of the step
    alone_ms: float  # of a step without draft tokens

    def __str__(self) -> str:
        tokens, alone = self.sequences + self.accepted, f"{self.sequences} in {self.alone_ms:.1f} ms without"
        return f"{self.nodes} draft tokens: {tokens:.2f} tokens expected in {self.milliseconds:.1f} ms, {alone}"


def near(value: float, old: float) -> float:
    """A new observation, within reach of what is believed: a slow step says more about the machine than about its rows."""
    return min(max(value, old / _REACH), old * _REACH)


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never falling values nearest to the given ones: neighbours that fall are averaged (isotonic regression)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, members
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return [value for value, _, members in pools for _ in range(members)]


class Window(Protocol):
    """Decides which nodes of each tree the target verifies next."""

    def explain(self) -> Choice | None:
        """Of the last choice; None for windows that expect nothing."""

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """For each tree the nodes to verify, with their ancestors, in index order; at most MAX_WINDOW each."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns from a step that verified `nodes` and whose walk went along `path`."""


@dataclass
class GoodputWindow:
    """Takes nodes, the most probable first over all sequences, while expected tokens per second rise.

    overhead_ms: time between steps, paid whatever the window is. max_nodes: per step, over all sequences; where these are
    many, _EACH for each.
    """

    calibration: Calibration
    cost: CostModel
    max_nodes: int = 31
    overhead_ms: float = 0.0
    _idle: int = 0  # choices in a row that took nothing of what there was
    _last: Choice | None = None

    def explain(self) -> Choice | None:
        """See Window."""
        return self._last

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See Window."""
        self.calibration.observe(tree, nodes, path)

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See Window."""
        reach = [self.calibration.paths(tree) for tree in trees]
        alone = len(trees) == 1  # what puts trees together takes its time for one, too
        everything = reach[0][1:] if alone else np.concatenate([_NO_REACH, *(part[1:] for part in reach)])
        order = top(everything, min(self.max_nodes, MAX_WINDOW) if alone else self.most(len(trees)))
        milliseconds = self.cost.verifying(len(trees), len(order))
        chosen, accepted = self._best(everything[order], milliseconds, len(trees))
        self._idle = 0 if chosen else self._idle + (len(everything) > 0)
        if chosen == 0 and self._idle % _PROBE_EVERY == 0 and len(everything):
            chosen, accepted = 1, float(everything[order[0]])  # a look whether speculation pays again
        self._last = Choice(len(trees), chosen, accepted, float(milliseconds[chosen]), float(milliseconds[0]))
        logger.debug("%s", self._last)
        counts = [chosen]
        if not alone:
            owners = np.repeat(np.arange(len(trees)), [tree.size - 1 for tree in trees])
            counts = np.bincount(owners[order[:chosen]], minlength=len(trees)).tolist()
        return [
            tree.best(min(count, MAX_WINDOW), part) if count else _NOTHING
            for tree, count, part in zip(trees, counts, reach, strict=True)
        ]

    def most(self, sequences: int) -> int:
        """Draft tokens that a step of so many sequences verifies, at most."""
        return max(self.max_nodes, _EACH * sequences)

    def least(self, sequences: int) -> float:
        """How probable a node has to be for its row to pay, in a step of so many sequences that verifies nothing else."""
        most = self.most(sequences)
        milliseconds = self.cost.verifying(sequences, most)
        alone_ms, full_ms = float(milliseconds[0]), float(milliseconds[-1])
        return sequences * (full_ms - alone_ms) / (most * (alone_ms + self.overhead_ms))

    def _best(self, reach: FloatArray, milliseconds: FloatArray, sequences: int) -> tuple[int, float]:
        """How many nodes to take, and the accepted ones to expect; see _best_count."""
        return _best_count(reach, milliseconds, sequences, self.overhead_ms)


@compiled
def _best_count(reach: FloatArray, milliseconds: FloatArray, sequences: int, overhead_ms: float) -> tuple[int, float]:
    """How many of the nodes, the likeliest first, bring the most tokens per second; and the accepted ones to expect.

    milliseconds: of steps that verify 0, 1, 2... of the nodes [nodes + 1].
    """
    count, accepted, goodput, expected = 0, 0.0, 0.0, 0.0
    for n in range(len(milliseconds)):
        if n:
            expected += reach[n - 1]
        tokens_per_ms = (sequences + expected) / (milliseconds[n] + overhead_ms)
        if tokens_per_ms > goodput:
            count, accepted, goodput = n, expected, tokens_per_ms
    return count, accepted


class Patience:
    """How long a step that missed may wait for growth before it starts without.

    Growth that comes in time saves (tokens accepted after a wait) x (seconds per token) less what verifying costs. If it
    usually comes sooner than that, it is worth waiting for, though never much longer; else the step starts at once, and only
    now and then is it looked again how long growth takes: more and more rarely, as long as nothing at all is accepted.
    """

    _RATE = 0.2  # weight of the newest observation
    _FAR = 2.0  # times what waits are worth, or take: a longer one counts as this, so that one in vain ends no others
    _LOOK_EVERY, _RAREST = 8, 1024  # misses

    def __init__(self) -> None:
        self._misses = 0
        self._look_every = self._LOOK_EVERY
        self._waited = False  # before the step that comes
        self._reaction_s = 0.0  # from a miss to growth; a wait in vain counts double
        self._accepted = 0.5  # draft tokens in a step after a wait
        self._token_s = 0.0
        self._alone_s = 0.0  # a step that verifies nothing
        self._verifying_s = 0.0  # a step after a wait

    def limit_s(self) -> float:
        """Seconds to wait at most after a miss; 0 is not at all."""
        self._misses += 1
        worth = self._worth_s()
        if self._reaction_s < worth:
            return 2 * worth
        return self._token_s if self._misses % self._look_every == 0 else 0.0

    def _worth_s(self) -> float:
        return self._accepted * self._token_s - max(0.0, self._verifying_s - self._alone_s)

    def waited(self, seconds: float, arrived: bool) -> None:
        """A wait ended."""
        self._waited = arrived
        most = self._FAR * max(self._reaction_s, self._worth_s())
        taken = seconds if arrived else 2 * seconds
        self._reaction_s = self._blend(self._reaction_s, min(taken, most) if self._reaction_s else taken)
        self._look_every = min(2 * self._look_every, self._RAREST)

    def stepped(self, seconds: float, tokens: int, accepted: int, verified: bool) -> None:
        """A step ended that committed `tokens`, of which `accepted` were draft tokens."""
        self._token_s = self._blend(self._token_s, seconds / max(1, tokens))
        if accepted:
            self._look_every = self._LOOK_EVERY
        if not verified:
            self._alone_s = self._blend(self._alone_s, seconds)
        elif self._waited:
            self._accepted = self._blend(self._accepted, accepted)
            self._verifying_s = self._blend(self._verifying_s, seconds)
        self._waited = False

    def _blend(self, old: float, new: float) -> float:
        return new if old == 0 else old + self._RATE * (new - old)
