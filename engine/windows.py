"""The simple windows, behind the same interface as the goodput window."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.step import MAX_WINDOW
from engine.tree import ROOT, TokenTree
from engine.types import IntArray


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
        return [self._chain(tree) for tree in trees]

    def _chain(self, tree: TokenTree) -> IntArray:
        node, nodes = ROOT, []
        for _ in range(min(self.length, MAX_WINDOW)):
            children = np.flatnonzero(tree.parent[: tree.size] == node)
            if not len(children):
                break
            node = int(children[np.argmax(tree.confidence[children])])
            nodes.append(node)
        return np.asarray(nodes, np.int32)


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
