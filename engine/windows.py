"""The simple windows, behind the same interface as the goodput window."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.budget import CostModel
from engine.step import MAX_WINDOW
from engine.tree import ROOT, TokenTree
from engine.types import BoolArray, FloatArray, IntArray

_TRIALS = 512  # that a threshold is fitted to
_FEW = 5  # that are not enough to fit one
_MISSED = 3.0  # what a right token costs that a threshold keeps out; a wrong one that it lets pass costs 1
_FADES = 0.995  # what an older observation of the bandit counts for, each time that another comes
_LEAST_VARIANCE = 0.25  # of accepted tokens: a few equal steps are no certainty
_ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_WINDOW)


def _chain(tree: TokenTree, length: int, threshold: float = 0.0) -> IntArray:
    """The most confident child of each node from the root on; it ends with the first below the threshold."""
    nodes = tree.chain(min(length, MAX_WINDOW))
    below = np.flatnonzero(tree.confidence[nodes] < threshold)
    return nodes[: below[0] + 1] if len(below) else nodes


@dataclass(frozen=True, slots=True)
class FixedChain:
    """The `length` tokens along the most confident child of each node."""

    length: int

    def explain(self) -> None:
        """Expects nothing."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns nothing."""

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See engine.budget.Window."""
        return [_chain(tree, self.length) for tree in trees]


@dataclass(frozen=True, slots=True)
class FixedTree:
    """The `size` most probable nodes by the draft's own confidence."""

    size: int

    def explain(self) -> None:
        """Expects nothing."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Learns nothing."""

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See engine.budget.Window."""
        return [tree.best(min(self.size, MAX_WINDOW), tree.probability[: tree.size]) for tree in trees]


class Heuristic:
    """A chain that grows by 2 where all of it was accepted, and shrinks by 1 where it was not.

    The rule of transformers' assisted generation; all sequences of a replica share one length.
    """

    def __init__(self, most: int, length: int = 5) -> None:
        """most: the longest chain; length: the first."""
        self._most = min(most, MAX_WINDOW)
        self.length = min(length, self._most)

    def explain(self) -> None:
        """Expects nothing."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See engine.budget.Window. A tree that held fewer tokens, all of them right, is no reason to shrink."""
        if len(nodes):
            self.length = min(self.length + 2, self._most) if len(path) == len(nodes) else max(self.length - 1, 1)

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See engine.budget.Window."""
        return [_chain(tree, self.length) for tree in trees]


class ConfidenceThreshold:
    """A chain up to the first token with less confidence than a threshold, which what was accepted moves.

    That token is verified as well, or the threshold could never fall. The rule and the costs are those of transformers'
    dynamic speculation: Mamou et al. 2024 (https://arxiv.org/abs/2405.04304).
    """

    def __init__(self, most: int, threshold: float = 0.4) -> None:
        """most: the longest chain; threshold: the first."""
        self._most = most
        self.threshold = threshold
        self._confidence = np.zeros(_TRIALS, np.float32)  # of the latest tokens that were tried
        self._right = np.zeros(_TRIALS, np.bool_)
        self._tried = 0

    def explain(self) -> None:
        """Expects nothing."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See engine.budget.Window."""
        walked = [ROOT, *path]
        for node in nodes[np.isin(tree.parent[nodes], walked)].tolist():
            at = self._tried % _TRIALS
            self._confidence[at], self._right[at] = tree.confidence[node], node in walked
            self._tried += 1
        seen = min(self._tried, _TRIALS)
        if seen > _FEW and self._right[:seen].any():
            self.threshold = _fitted(self._confidence[:seen], self._right[:seen])

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See engine.budget.Window."""
        return [_chain(tree, self._most, self.threshold) for tree in trees]


def _fitted(confidence: FloatArray, right: BoolArray) -> float:
    """The threshold that is least often wrong: (wrong tokens passed, share) + _MISSED * (right ones kept out, share)."""
    order = np.argsort(-confidence)
    confidence, right = confidence[order], right[order]
    last = np.append(confidence[1:] != confidence[:-1], True)  # of those with the same confidence
    wrong_passed = np.cumsum(~right)[last] / max(1, (~right).sum())
    right_missed = 1 - np.cumsum(right)[last] / right.sum()
    return float(confidence[last][np.argmin(wrong_passed + _MISSED * right_missed)])


class Bandit:
    """A chain of the length that may bring the most tokens per second: an upper confidence bound for each of a few.

    What a chain brought says what every shorter one would have. Costs are the cost model's; what is old fades
    (discounted UCB, Garivier and Moulines 2011, https://arxiv.org/abs/0805.3415), so that other lengths are looked at again.
    """

    def __init__(self, cost: CostModel, most: int) -> None:
        """most: the longest chain."""
        most = min(most, MAX_WINDOW)
        self._cost = cost
        self._lengths = np.asarray([length for length in _ARMS if length < most] + [most])
        self._seen = np.zeros((3, len(self._lengths)))  # of each length: trials, tokens accepted, their squares; faded
        self._chosen = 0

    def explain(self) -> None:
        """Expects nothing."""

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See engine.budget.Window. Where the tree ended before, so would a longer chain have."""
        if len(nodes):
            accepted = np.minimum(len(path), self._lengths)
            self._seen *= _FADES
            self._seen += np.stack([accepted**0, accepted, accepted**2]) * (self._lengths <= self._chosen)

    def choose(self, trees: Sequence[TokenTree]) -> list[IntArray]:
        """See engine.budget.Window."""
        chains = [_chain(tree, int(self._lengths[-1])) for tree in trees]
        if not any(len(chain) for chain in chains):
            return chains
        rows = sum(1 + np.minimum(len(chain), self._lengths) for chain in chains)  # of a step with each length
        milliseconds = self._cost.verifying(len(chains), int(rows.max()) - len(chains))[rows - len(chains)]
        tokens = len(chains) + sum(len(chain) > 0 for chain in chains) * self._hoped()
        self._chosen = int(self._lengths[np.argmax(tokens / milliseconds)])
        if self._chosen == 0:
            self._seen *= _FADES  # nothing comes to observe, or it would stay so for ever
        return [chain[: self._chosen] for chain in chains]

    def _hoped(self) -> FloatArray:
        """The most draft tokens of each length that may well be accepted, [lengths]."""
        trials = np.maximum(self._seen[0], 1e-9)
        mean = self._seen[1] / trials
        variance = np.maximum(self._seen[2] / trials - mean**2, _LEAST_VARIANCE)
        doubt = np.sqrt(2 * variance * np.log1p(self._seen[0].max()) / trials)
        never = self._seen[0] < 1e-3
        hoped: FloatArray = np.where(never, self._lengths, np.minimum(mean + doubt, self._lengths)).astype(np.float32)
        return hoped
