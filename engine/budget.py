"""What to verify: one calibrated probability per node and one cost model of the target's step.

The goodput window maximises expected tokens per second, as SmartSpec does for chains (Liu et al. 2024,
https://arxiv.org/abs/2406.14066): nodes are taken in order of their probability while they earn more than they cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.step import MAX_WINDOW
from engine.tree import ROOT, TokenTree
from engine.types import FloatArray, IntArray

_BINS = 10  # of confidence
_DEPTHS = 8  # deeper nodes share the last
_PRIOR = 8.0  # trials that the draft's own confidence counts for
_PROBE_EVERY = 64  # steps without speculation between looks whether it pays again
_MEMORY = 2000.0  # trials per cell that are remembered


class Calibration:
    """The acceptance rate seen at each confidence and depth, starting from the confidence itself."""

    def __init__(self) -> None:
        self._trials = np.zeros((_BINS, _DEPTHS))
        self._hits = np.zeros((_BINS, _DEPTHS))
        self._centers = (np.arange(_BINS) + 0.5) / _BINS

    def probability(self, confidence: FloatArray, depth: IntArray) -> FloatArray:
        """Calibrated probability of each node given its parent; confidence and depth are [n]."""
        cell = self._cell(confidence, depth)
        prior = np.clip(confidence, 0.0, 1.0)
        known: FloatArray = ((self._hits[cell] + _PRIOR * prior) / (self._trials[cell] + _PRIOR)).astype(np.float32)
        return known

    def paths(self, tree: TokenTree) -> FloatArray:
        """Calibrated probability that the target's walk reaches each node, float32 [tree.size]."""
        n = tree.size
        given_parent = self.probability(tree.confidence[:n], tree.depth[:n]).tolist()
        out = [1.0] * n
        parents = tree.parent[:n].tolist()
        for node in range(1, n):
            out[node] = out[parents[node]] * given_parent[node]
        return np.asarray(out, np.float32)

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns from a step: of the verified `nodes`, those below the walked path were tried, those on it hit."""
        walked = [ROOT, *path]
        tried = nodes[np.isin(tree.parent[nodes], walked)]
        cell = self._cell(tree.confidence[tried], tree.depth[tried])
        np.add.at(self._trials, cell, 1.0)
        np.add.at(self._hits, cell, np.isin(tried, walked).astype(np.float64))
        full = self._trials > _MEMORY
        self._hits[full] *= _MEMORY / self._trials[full]
        self._trials[full] = _MEMORY

    def table(self) -> list[tuple[float, float, float]]:
        """(confidence, acceptance rate, trials) for each bin that was tried, all depths together."""
        trials, hits = self._trials.sum(1), self._hits.sum(1)
        return [(float(c), float(h / t), float(t)) for c, h, t in zip(self._centers, hits, trials, strict=True) if t]

    def _cell(self, confidence: FloatArray, depth: IntArray) -> tuple[IntArray, IntArray]:
        bins = np.clip(confidence * _BINS, 0, _BINS - 1).astype(np.int32)
        return bins, np.minimum(np.maximum(depth, 1) - 1, _DEPTHS - 1)


class CostModel:
    """Milliseconds of a target step by number of rows, learned while serving; interpolated between what was seen."""

    def __init__(self, seen: dict[int, float] | None = None) -> None:
        """seen: first measurements, milliseconds by rows."""
        self._seen = dict(seen or {})
        self._table: FloatArray | None = None

    def observe(self, rows: int, milliseconds: float) -> None:
        """Learns from one step, slowly: a single slow step is noise."""
        old = self._seen.get(rows)
        self._seen[rows] = milliseconds if old is None else old + 0.05 * (milliseconds - old)
        self._table = None

    def table(self, rows: int) -> FloatArray:
        """Milliseconds for 0..rows rows, never falling; ones before anything was seen. float32 [rows + 1]."""
        if self._table is None or len(self._table) <= rows:
            self._table = self._interpolate(max(rows, 2 * MAX_WINDOW))
        return self._table[: rows + 1]

    def _interpolate(self, rows: int) -> FloatArray:
        if not self._seen:
            return np.ones(rows + 1, np.float32)
        points = sorted(self._seen)
        values = np.maximum.accumulate([self._seen[point] for point in points])
        # past the last point the cost is taken to grow in proportion
        beyond = values[-1] * np.maximum(np.arange(rows + 1) / points[-1], 1.0)
        inside = np.interp(np.arange(rows + 1), points, values)
        return np.maximum(inside, beyond).astype(np.float32)


class Window(Protocol):
    """Decides which nodes of each tree the target verifies next."""

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """For each tree the nodes to verify, with their ancestors, in index order; at most MAX_WINDOW each."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns from a step that verified `nodes` and whose walk went along `path`."""


@dataclass
class GoodputWindow:
    """Takes nodes, the most probable first over all sequences, while expected tokens per second rise.

    overhead_ms: time between steps, paid whatever the window is. max_nodes: per step, over all sequences.
    """

    calibration: Calibration
    cost: CostModel
    max_nodes: int = 31
    overhead_ms: float = 0.0
    _idle: int = 0  # choices in a row that took nothing

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See Window."""
        self.calibration.observe(tree, nodes, path)

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See Window."""
        reach = [self.calibration.paths(tree)[1:] for tree in trees]
        everything = np.concatenate(reach) if reach else np.zeros(0, np.float32)
        chosen = self._worth(everything, len(trees))
        self._idle = 0 if chosen else self._idle + 1
        if chosen == 0 and self._idle % _PROBE_EVERY == 0 and len(everything):
            chosen = 1  # a look whether speculation pays again
        if chosen == 0:
            return [np.zeros(0, np.int32) for _ in trees]
        share = np.sort(everything)[::-1][chosen - 1]
        counts = [min(int((part >= share).sum()), MAX_WINDOW) for part in reach]
        return [
            tree.best(count, np.concatenate([np.ones(1, np.float32), part]))
            for tree, count, part in zip(trees, counts, reach, strict=True)
        ]

    def _worth(self, probabilities: FloatArray, sequences: int) -> int:
        """How many of the most probable nodes to verify."""
        best = np.sort(probabilities)[::-1][: self.max_nodes]
        expected = sequences + np.concatenate([np.zeros(1), np.cumsum(best)])
        milliseconds = self.cost.table(sequences + len(best))[sequences:] + self.overhead_ms
        return int(np.argmax(expected / milliseconds))


class Patience:
    """How long a missed sequence may wait for growth before its step starts without: at most what the growth is worth.

    A draft token that is accepted saves the time that a token takes; so growth is worth (accepted tokens per step) x
    (time per token). Growth that doesn't come in time teaches not to wait for it.
    """

    _RATE = 0.05  # weight of the newest observation

    def __init__(self) -> None:
        self._accepted = 1.0  # per step that verified something
        self._token_s = 0.0  # seconds per token
        self._arrives = 1.0  # share of waits that ended with growth
        self._waits = 0

    def limit_s(self) -> float:
        """Seconds to wait at most; 0 is not at all."""
        self._waits += 1
        if self._arrives < 0.3 and self._waits % 32:  # a hung or dead draft: look again rarely
            return 0.0
        return self._arrives * self._accepted * self._token_s

    def waited(self, seconds: float, arrived: bool) -> None:
        """A wait ended."""
        self._arrives += 0.2 * (arrived - self._arrives)

    def stepped(self, seconds: float, tokens: int, accepted: int, speculated: bool) -> None:
        """A step committed `tokens`, of which `accepted` were draft tokens."""
        self._token_s += (0.5 if self._token_s == 0 else self._RATE) * (seconds / max(1, tokens) - self._token_s)
        if speculated:
            self._accepted += self._RATE * (accepted - self._accepted)
