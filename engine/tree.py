"""The token tree of a session: small preallocated arrays, parents always before children, node 0 the root.

The root is the last committed token; every other node is a draft token. Drafters grow the tree, the target selects the
part it verifies, and a commit moves the root: what doesn't hang below the new root is gone. Nothing in here knows where a
node came from. Token trees for verification: SpecInfer, Miao et al. 2024 (https://arxiv.org/abs/2305.09781).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.types import BoolArray, FloatArray, IntArray

ROOT = 0
NO_SLOT = -1
_TINY = 1e-30  # nothing is divided by less


@dataclass(frozen=True, slots=True)
class Moved:
    """What a commit did to a tree. Slots are KV slots that the nodes held."""

    path_slots: tuple[int, ...]  # of the committed nodes from the old root's child on; ends before the first without KV
    freed_slots: tuple[int, ...]  # of nodes that fell away
    hit: bool  # whether the new root was in the tree
    children: int  # of the new root


class TokenTree:
    """A tree of at most `capacity` nodes over a root token.

    Public arrays, valid up to `size`: `parent` [n], `token` [n], `confidence` [n] (given the parent), `depth` [n] (root 0),
    `probability` [n] (product of confidences from the root), `slot` [n] (KV slot or NO_SLOT), `expanded` [n] (children were
    computed), `sent` [n] (the other side was told).
    """

    def __init__(self, root_token: int, capacity: int = 256) -> None:
        self.capacity = capacity
        self.parent: IntArray = np.zeros(capacity, np.int32)
        self.token: IntArray = np.zeros(capacity, np.int32)
        self.confidence: FloatArray = np.zeros(capacity, np.float32)
        self.depth: IntArray = np.zeros(capacity, np.int32)
        self.probability: FloatArray = np.zeros(capacity, np.float32)
        self.slot: IntArray = np.zeros(capacity, np.int32)
        self.expanded: BoolArray = np.zeros(capacity, np.bool_)
        self.sent: BoolArray = np.zeros(capacity, np.bool_)
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self.reset(root_token)

    def reset(self, root_token: int) -> None:
        """Drops everything but a new root."""
        self.size = 1
        self._children.clear()
        self.parent[ROOT], self.token[ROOT], self.depth[ROOT] = -1, root_token, 0
        self.confidence[ROOT] = self.probability[ROOT] = 1.0
        self.slot[ROOT] = NO_SLOT
        self.expanded[ROOT] = False
        self.sent[ROOT] = True

    def child(self, node: int, token: int) -> int:
        """The child of `node` with this token, or -1."""
        return self._children.get((node, token), -1)

    def has_children(self, node: int) -> bool:
        """Whether anything hangs below `node`."""
        return bool((self.parent[1 : self.size] == node).any())

    def add(self, parent: int, token: int, confidence: float) -> int:
        """The child of `parent` with this token, added if it is new; -1 when the tree is full.

        A confidence that is no probability (NaN, infinite, negative) counts as 0.
        """
        return self.add_many((parent,), (token,), (confidence,))[0]

    def add_many(self, parents: Sequence[int], tokens: Sequence[int], confidences: Sequence[float]) -> list[int]:
        """Several children, each as by `add`; their parents are in the tree already."""
        new: list[tuple[int, int, float]] = []
        nodes = [self._place(*child, new) for child in zip(parents, tokens, confidences, strict=True)]
        self._write(new)
        return nodes

    def _place(self, parent: int, token: int, confidence: float, new: list[tuple[int, int, float]]) -> int:
        """The child's number; if it is new it goes to `new`, which is written to the arrays later, all at once."""
        node = self._children.get((parent, token))
        if node is None:
            node = self.size + len(new)
            if node >= self.capacity:
                return -1
            self._children[parent, token] = node
            new.append((parent, token, confidence if 0 <= confidence <= 1 else 0.0))
        return node

    def _write(self, new: Sequence[tuple[int, int, float]]) -> None:
        if not new:
            return
        parents, tokens, confidences = zip(*new, strict=True)
        depth, probability = self.depth[: self.size].tolist(), self.probability[: self.size].tolist()
        for parent, confidence in zip(parents, confidences, strict=True):
            depth.append(depth[parent] + 1)
            probability.append(probability[parent] * confidence)
        start, self.size = self.size, self.size + len(new)
        added = slice(start, self.size)
        self.parent[added], self.token[added], self.confidence[added] = parents, tokens, confidences
        self.depth[added], self.probability[added] = depth[start:], probability[start:]
        self.slot[added], self.expanded[added], self.sent[added] = NO_SLOT, False, False

    def lineage(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def visible(self, rows: Sequence[int] | IntArray, columns: Sequence[int] | IntArray) -> BoolArray:
        """Which of the nodes `columns` are on the path to each of `rows`, itself included: [rows, columns]."""
        place = {node: column for column, node in enumerate(np.asarray(columns).tolist())}
        out = np.zeros((len(rows), len(columns)), np.bool_)
        parent = self.parent[: self.size].tolist()
        for row, node in enumerate(np.asarray(rows).tolist()):
            while node >= 0:
                column = place.get(node)
                if column is not None:
                    out[row, column] = True
                node = parent[node]
        return out

    def below(self, node: int) -> IntArray:
        """The subtree of `node`, itself included, in index order."""
        inside = [False] * self.size
        inside[node] = True
        for i, parent in enumerate(self.parent[node + 1 : self.size].tolist(), start=node + 1):
            inside[i] = parent >= 0 and inside[parent]
        return np.flatnonzero(inside).astype(np.int32)

    def path(self, tokens: Sequence[int]) -> int:
        """The node reached from the root along `tokens`, or -1."""
        node = ROOT
        for token in tokens:
            node = self.child(node, token)
            if node < 0:
                return -1
        return node

    def frontier(self, count: int, max_depth: int) -> list[int]:
        """Up to `count` nodes whose children are not computed yet, the most probable first."""
        n = self.size
        candidates = np.flatnonzero(~self.expanded[:n] & (self.depth[:n] < max_depth))
        if len(candidates) > count:
            best = np.argpartition(-self.probability[candidates], count - 1)[:count]
            candidates = candidates[best]
        order = np.argsort(-self.probability[candidates], kind="stable")
        return [int(node) for node in candidates[order]]

    def best(self, count: int, probability: FloatArray) -> IntArray:
        """The `count` most probable nodes without the root, in index order: with their ancestors they form a tree.

        probability: [size], never larger at a child than at its parent.
        """
        candidates = np.arange(1, self.size)
        if len(candidates) > count:
            order = np.argsort(-probability[1:], kind="stable")[:count]  # stable: a parent wins a tie with its child
            candidates = np.sort(order) + 1
        return candidates.astype(np.int32)

    def unsent(self, count: int) -> IntArray:
        """Those of the `count` most probable nodes that the other side was not told of."""
        nodes = self.best(count, self.probability[: self.size])
        return nodes[~self.sent[nodes]]

    def piece(self, nodes: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """`nodes` with their ancestors as (parents, tokens, confidences), each [n]: parents are indices, -1 the root."""
        if not len(nodes):
            return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
        inside = set(nodes.tolist())
        parent = self.parent[: self.size].tolist()
        for node in nodes.tolist():
            while (node := parent[node]) > ROOT and node not in inside:
                inside.add(node)
        kept = np.asarray(sorted(inside), np.int32)
        index = np.full(self.size, -1, np.int32)
        index[kept] = np.arange(len(kept), dtype=np.int32)
        return index[self.parent[kept]], self.token[kept].copy(), self.confidence[kept].copy()

    def graft(self, committed: Sequence[int], parents: IntArray, tokens: IntArray, confidences: FloatArray) -> int:
        """Merges a piece that was rooted before the `committed` tokens; returns how many nodes are new.

        What doesn't begin with the committed tokens is dropped.
        """
        new: list[tuple[int, int, float]] = []
        to_go = len(committed)
        # where each node of the piece went: a node here, or -1 - k after k committed tokens, or None
        places: list[int | None] = []
        for parent, token, confidence in zip(parents.tolist(), tokens.tolist(), confidences.tolist(), strict=True):
            at = places[parent] if parent >= 0 else (-1 if to_go else ROOT)
            if at is None:
                places.append(None)
            elif at >= 0:
                node = self._place(at, token, confidence, new)
                places.append(node if node >= 0 else None)
            elif committed[-1 - at] != token:
                places.append(None)
            else:
                places.append(ROOT if -at == to_go else at - 1)
        self._write(new)
        return len(new)

    def commit(self, tokens: Sequence[int]) -> Moved:
        """Moves the root along newly committed `tokens` (at least one) and keeps only what hangs below it."""
        node = ROOT
        path_slots: list[int] = []
        unbroken = True
        for token in tokens:
            node = self.child(node, token) if node >= 0 else -1
            if node < 0:
                break
            unbroken = unbroken and self.slot[node] != NO_SLOT
            if unbroken:
                path_slots.append(int(self.slot[node]))
        held = set(self.slot[: self.size].tolist()) - {NO_SLOT}
        if node < 0:
            self.reset(tokens[-1])
            return Moved(tuple(path_slots), tuple(held - set(path_slots)), hit=False, children=0)
        self._keep_below(node)
        kept = set(self.slot[1 : self.size].tolist())
        children = int((self.parent[1 : self.size] == ROOT).sum())
        return Moved(tuple(path_slots), tuple(held - kept - set(path_slots)), hit=True, children=children)

    def _keep_below(self, node: int) -> None:
        """Renumbers the subtree of `node`, which becomes the root."""
        keep = self.below(node)
        m = len(keep)
        index = np.full(self.size, -1, np.int32)
        index[keep] = np.arange(m, dtype=np.int32)
        scale = self.probability[node]
        self.parent[:m] = index[self.parent[keep]]
        self.parent[ROOT] = -1
        for array in (self.token, self.confidence, self.slot):
            array[:m] = array[keep]
        self.expanded[:m] = self.expanded[keep]
        self.sent[:m] = self.sent[keep]
        self.depth[:m] = self.depth[keep] - self.depth[node]
        self.probability[:m] = self.probability[keep] / max(scale, _TINY)
        self.confidence[ROOT] = self.probability[ROOT] = 1.0
        self.slot[ROOT] = NO_SLOT  # the root's KV belongs to the committed prefix now
        self.sent[ROOT] = True
        self.size = m
        if scale < _TINY:  # the node was thought impossible
            for i in range(1, m):
                self.probability[i] = self.probability[self.parent[i]] * self.confidence[i]
        parents, tokens = self.parent[1:m].tolist(), self.token[1:m].tolist()
        self._children = {pair: i for i, pair in enumerate(zip(parents, tokens, strict=True), start=1)}

    def check(self) -> None:
        """Raises AssertionError unless every invariant of the arrays holds."""
        n = self.size
        assert 1 <= n <= self.capacity
        assert (self.parent[ROOT], self.depth[ROOT], self.probability[ROOT]) == (-1, 0, 1)
        for node in range(1, n):
            parent = int(self.parent[node])
            assert 0 <= parent < node, f"node {node} stands before its parent"
            assert self.depth[node] == self.depth[parent] + 1
            assert self._children[parent, int(self.token[node])] == node
        assert len(self._children) == n - 1
        slots = self.slot[:n][self.slot[:n] != NO_SLOT]
        assert len(set(slots.tolist())) == len(slots), "two nodes share a KV slot"
