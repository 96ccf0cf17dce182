"""The token tree of a session: small preallocated arrays, parents always before children, node 0 the root.

The root is the last committed token; every other node is a draft token. Drafters grow the tree, the target selects the
part it verifies, and a commit moves the root: what doesn't hang below the new root is gone. Nothing in here knows where a
node came from. Token trees for verification: SpecInfer, Miao et al. 2024 (https://arxiv.org/abs/2305.09781).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine import tree_loops as loops
from engine.types import BoolArray, FloatArray, IntArray

ROOT = 0
NO_SLOT = loops.NO_SLOT


@dataclass(frozen=True, slots=True)
class Moved:
    """What a commit did to a tree. Slots are KV slots that the nodes held."""

    path_slots: tuple[int, ...]  # of the committed nodes from the old root's child on; ends before the first without KV
    freed_slots: tuple[int, ...]  # of nodes that fell away
    hit: bool  # whether the new root was in the tree
    children: int  # of the new root


_OFF = Moved((), (), hit=False, children=0)  # the tokens lead out of the tree, where no node had a slot


class TokenTree:
    """A tree of at most `capacity` nodes over a root token.

    Public arrays, valid up to `size`: `parent` [n], `token` [n], `confidence` [n] (given the parent), `depth` [n] (root 0),
    `probability` [n] (product of confidences from the root), `slot` [n] (KV slot or NO_SLOT), `expanded` [n] (children were
    computed), `sent` [n] (the other side was told).
    """

    def __init__(self, root_token: int, capacity: int = 256, greedy: bool = True) -> None:
        """greedy: whether the target chooses without noise, to which other guesses are right: see engine.budget."""
        self.capacity, self.greedy = capacity, greedy
        self.nodes = loops.make_nodes(capacity)
        records = np.asarray(self.nodes)
        self.parent, self.token, self.depth, self.slot = (
            records[name] for name in ("parent", "token", "depth", "slot")
        )
        self.confidence, self.probability = records["confidence"], records["probability"]
        self.expanded, self.sent = records["expanded"], records["sent"]
        self.reset(root_token)

    def reset(self, root_token: int) -> None:
        """Drops everything but a new root."""
        self.size = 1
        self.parent[ROOT], self.token[ROOT], self.depth[ROOT] = -1, root_token, 0
        self.confidence[ROOT] = self.probability[ROOT] = 1.0
        self.slot[ROOT] = NO_SLOT
        self.expanded[ROOT] = False
        self.sent[ROOT] = True

    def child(self, node: int, token: int) -> int:
        """The child of `node` with this token, or -1."""
        return loops.child(self.nodes, self.size, node, token)

    def add(self, parent: int, token: int, confidence: float) -> int:
        """The child of `parent` with this token, added if it is new; -1 when the tree is full.

        A confidence that is no probability (NaN, infinite, negative) counts as 0.
        """
        return self.add_many((parent,), (token,), (confidence,))[0]

    def add_many(self, parents: Sequence[int], tokens: Sequence[int], confidences: Sequence[float]) -> list[int]:
        """Several children, each as by `add`; their parents are in the tree already."""
        given = np.asarray(confidences, np.float32)
        added = loops.add_many(self.nodes, self.size, _ids(parents), _ids(tokens), given)
        self.size = int(added[-1])
        return [int(node) for node in added[:-1]]

    def expand(
        self,
        nodes: Sequence[int],
        tokens: IntArray,
        confidences: FloatArray,
        overrule: bool = False,
        least: float = 0.0,
    ) -> None:
        """Adds the children of each of `nodes`, each as by `add`; tokens and confidences are [nodes, children].

        overrule: children that were there already get the new confidences too, or 0. least: children behind the first of
        each node that have less confidence are left out.
        """
        self.size = loops.expand(self.nodes, self.size, _ids(nodes), tokens, confidences, least)
        if overrule:
            loops.overrule(self.nodes, self.size, _ids(nodes), tokens, confidences)

    def adopt(self, other: "TokenTree", count: int, known: bool) -> int:
        """Takes over the `count` most probable nodes of another tree with the same root; returns how many are new.

        known: the other knows better: its confidences replace those that are here. Otherwise nothing changes that is here,
        and nodes whose children were computed here get no others.
        """
        old = self.size
        piece = other.piece(other.best(count, other.probability[: other.size]))
        self.size = loops.adopt(self.nodes, old, *piece, known)
        return self.size - old

    def lineage(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def visible(self, rows: Sequence[int] | IntArray, columns: Sequence[int] | IntArray) -> BoolArray:
        """Which of the nodes `columns` are on the path to each of `rows`, itself included: [rows, columns]."""
        return loops.visible(self.nodes, self.size, _ids(rows), _ids(columns))

    def rows(self, nodes: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
        """Of the root and `nodes`: tokens and depths [1 + n], and `visible` of each by each."""
        return loops.rows(self.nodes, self.size, nodes)

    def computed_rows(self, nodes: Sequence[int]) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
        """Of `nodes`: tokens and depths [n]; the slots of all nodes that have one [m], and which of these are on the path to
        each [n, m], its own included.
        """
        return loops.computed_rows(self.nodes, self.size, _ids(nodes))

    def path(self, tokens: Sequence[int]) -> int:
        """The node reached from the root along `tokens`, or -1."""
        nodes = self.along(tokens)
        return ([ROOT, *nodes])[-1] if len(nodes) == len(tokens) else -1

    def along(self, tokens: Sequence[int]) -> list[int]:
        """The nodes along `tokens` from the root, as far as they are there."""
        nodes: list[int] = loops.path(self.nodes, self.size, _ids(tokens)).tolist()
        return nodes

    def chain(self, most: int, least: float = 0.0, start: int = ROOT) -> IntArray:
        """Up to `most` nodes behind `start`, each the most confident child, down to a probability of `least`."""
        found: IntArray = loops.chain(self.nodes, self.size, start, most, least)
        return found

    def frontier(self, count: int, max_depth: int) -> list[int]:
        """Up to `count` nodes whose children are not computed yet, the most probable first."""
        nodes: list[int] = loops.frontier(self.nodes, self.size, count, max_depth).tolist()
        return nodes

    def best(self, count: int, probability: FloatArray) -> IntArray:
        """The `count` most probable nodes without the root, in index order: with their ancestors they form a tree.

        probability: [size], never larger at a child than at its parent.
        """
        values: FloatArray = np.ascontiguousarray(probability)
        return loops.best(values, count)

    def unsent(self, count: int) -> IntArray:
        """Those of the `count` most probable nodes that the other side was not told of."""
        nodes = self.best(count, self.probability[: self.size])
        unsent: IntArray = nodes[~self.sent[nodes]]
        return unsent

    def piece(self, nodes: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """`nodes` with their ancestors as (parents, tokens, confidences), each [n]: parents are indices, -1 the root."""
        return loops.piece(self.nodes, self.size, nodes)

    def graft(
        self,
        committed: Sequence[int],
        parents: IntArray,
        tokens: IntArray,
        confidences: FloatArray,
        told: bool = False,
        vocab_size: int = 0,
    ) -> int:
        """Merges a piece that was rooted before the `committed` tokens; returns how many nodes are new.

        What doesn't begin with the committed tokens is dropped. A confidence above 1 counts as 1. told: by the other side,
        which knows all these nodes, also those that were here before. vocab_size: what leads through ids beyond it is
        dropped, too; 0: any are taken.
        """
        old = self.size
        piece = _ids(committed), _ids(parents), _ids(tokens), confidences
        self.size = int(loops.graft(self.nodes, old, *piece, told, vocab_size))
        return self.size - old

    def hang(self, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """Adds a chain below the root, each token as by `add`."""
        self.size = int(loops.hang(self.nodes, self.size, _ids(tokens), np.asarray(confidences, np.float32)))

    def commit(self, tokens: Sequence[int]) -> Moved:
        """Moves the root along newly committed `tokens` (at least one) and keeps only what hangs below it."""
        if self.size == 1:  # as in every step of a session that nobody guesses for
            self.reset(tokens[-1])
            return _OFF
        size, children, slots, along = loops.commit(self.nodes, self.size, _ids(tokens))
        if size == 0:
            self.reset(tokens[-1])
        else:
            self.size = size
        held: list[int] = slots.tolist()
        return Moved(tuple(held[:along]), tuple(held[along:]), size > 0, int(children))

    def check(self) -> None:
        """Raises AssertionError unless every invariant of the arrays holds."""
        n = self.size
        assert 1 <= n <= self.capacity
        assert (self.parent[ROOT], self.depth[ROOT], self.probability[ROOT]) == (-1, 0, 1)
        for node in range(1, n):
            parent = int(self.parent[node])
            assert 0 <= parent < node, f"node {node} stands before its parent"
            assert self.depth[node] == self.depth[parent] + 1
            assert self.child(parent, int(self.token[node])) == node, "two children have the same token"
        slots = self.slot[:n][self.slot[:n] != NO_SLOT]
        assert len(set(slots.tolist())) == len(slots), "two nodes share a KV slot"


def _ids(values: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(values, np.int32)
