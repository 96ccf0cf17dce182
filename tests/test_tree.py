"""TokenTree against linked objects that do the same in the obvious way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.tree import NO_SLOT, ROOT, TokenTree
from engine.tree_loops import worthwhile
from engine.types import IntArray
from engine.verify import walk

CAPACITY = 24

few_tokens = st.integers(0, 4)  # so that children and paths often coincide
confidences = st.floats(0, 1, width=32)


@dataclass(eq=False)
class Node:
    """A node of the obvious tree."""

    token: int
    confidence: float = 1.0
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    slot: int | None = None
    expanded: bool = False
    sent: bool = False

    def __iter__(self) -> Iterator["Node"]:
        """The subtree, parents first."""
        yield self
        for child in self.children.values():
            yield from child

    @property
    def path(self) -> list[int]:
        return [*self.parent.path, self.token] if self.parent is not None else []

    @property
    def probability(self) -> float:
        return self.parent.probability * self.confidence if self.parent is not None else 1.0


class Trees(RuleBasedStateMachine):
    """Grows, sends and commits both trees at once."""

    @initialize(token=few_tokens)
    def plant(self, token: int) -> None:
        self.root = Node(token)
        self.tree = TokenTree(token, CAPACITY)
        self.next_slot = 0

    def nodes(self) -> list[Node]:
        return list(self.root)

    def find(self, node: Node) -> int:
        return self.tree.path(node.path)

    @rule(data=st.data(), token=few_tokens, confidence=confidences)
    def add(self, data: st.DataObject, token: int, confidence: float) -> None:
        parent = data.draw(st.sampled_from(self.nodes()))
        found = self.tree.add(self.find(parent), token, confidence)
        if token in parent.children:
            assert found == self.find(parent.children[token])
        elif len(self.nodes()) == CAPACITY:
            assert found == -1
        else:
            parent.children[token] = Node(token, confidence, parent)
            assert found == len(self.nodes()) - 1

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A node below computed nodes gets a slot; its children are known then."""
        ready = [n for n in self.root if n.parent is not None and n.slot is None]
        ready = [n for n in ready if n.parent is self.root or (n.parent is not None and n.parent.slot is not None)]
        assume(ready)
        node = data.draw(st.sampled_from(ready))
        node.slot, node.expanded = self.next_slot, True
        self.tree.slot[self.find(node)], self.tree.expanded[self.find(node)] = self.next_slot, True
        self.next_slot += 1

    @rule()
    def send(self) -> None:
        unsent = self.tree.unsent(self.tree.capacity)
        assert sorted(unsent.tolist()) == sorted(
            self.find(node) for node in self.root if node is not self.root and not node.sent
        )
        self.tree.sent[unsent] = True
        for node in self.root:
            node.sent = True

    @rule(data=st.data(), more=st.lists(few_tokens, max_size=2))
    def commit(self, data: st.DataObject, more: list[int]) -> None:
        """Along a path of the tree, and perhaps off it."""
        tokens = [*data.draw(st.sampled_from(self.nodes())).path, *more]
        assume(tokens)
        moved = self.tree.commit(tokens)
        walked, node = [], self.root
        for token in tokens:
            if token not in node.children:
                break
            node = node.children[token]
            walked.append(node)
        path_slots = [n.slot for n in walked if n.slot is not None]  # a parent of a computed node is computed
        assert moved.hit == (len(walked) == len(tokens))
        assert list(moved.path_slots) == path_slots
        held = {n.slot for n in self.root if n.slot is not None}
        if moved.hit:
            node.parent, node.slot, node.sent = None, None, True
            self.root = node
        else:
            self.root = Node(tokens[-1])
        kept = {n.slot for n in self.root if n.slot is not None}
        assert set(moved.freed_slots) == held - kept - set(path_slots)
        assert len(moved.freed_slots) == len(set(moved.freed_slots))
        assert moved.children == len(self.root.children)

    @rule(token=few_tokens)
    def reset(self, token: int) -> None:
        self.tree.reset(token)
        self.root = Node(token)

    @rule(data=st.data())
    def graft_a_piece_into_another_tree(self, data: st.DataObject) -> None:
        """Rooted where the piece is, or further on: then only what begins with the committed tokens arrives."""
        chosen = data.draw(st.lists(st.sampled_from(self.nodes()), unique=True))
        chosen = [node for node in chosen if node is not self.root]
        piece = self.tree.piece(np.asarray(sorted(self.find(node) for node in chosen), np.int32))
        committed = data.draw(st.sampled_from(self.nodes())).path
        other = TokenTree(committed[-1] if committed else self.root.token, CAPACITY)
        new = other.graft(committed, *piece)
        other.check()
        paths = {tuple(node.path[:end]) for node in chosen for end in range(1, len(node.path) + 1)}
        expected = {
            path[len(committed) :]: path for path in paths if path[: len(committed)] == tuple(committed) != path
        }
        assert new == other.size - 1 == len(expected)
        for path, whole in expected.items():
            assert other.confidence[other.path(path)] == self.tree.confidence[self.tree.path(whole)]
        assert other.graft(committed, *piece) == 0  # again

    @rule(count=st.integers(1, CAPACITY), max_depth=st.integers(0, 5))
    def look_at_the_frontier(self, count: int, max_depth: int) -> None:
        frontier = self.tree.frontier(count, max_depth)
        open_nodes = [node for node in self.root if not node.expanded and len(node.path) < max_depth]
        assert set(frontier) <= {self.find(node) for node in open_nodes}
        assert len(frontier) == len(set(frontier)) == min(count, len(open_nodes))
        best = sorted((float(self.tree.probability[self.find(node)]) for node in open_nodes), reverse=True)
        assert self.tree.probability[frontier].tolist() == best[:count]

    @rule(count=st.integers(0, CAPACITY))
    def take_the_best(self, count: int) -> None:
        best = self.tree.best(count, self.tree.probability[: self.tree.size]).tolist()
        assert best == sorted(set(best))
        assert len(best) == min(count, self.tree.size - 1)
        assert {int(self.tree.parent[node]) for node in best} <= {ROOT, *best}, "a parent is missing"
        left = [self.tree.probability[node] for node in range(1, self.tree.size) if node not in best]
        assert all(self.tree.probability[node] >= max(left, default=0) for node in best)

    @invariant()
    def both_are_the_same(self) -> None:
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        tree.check()
        assert tree.size == len(self.nodes())
        for node in self.root:
            index = self.find(node)
            assert tree.token[index] == node.token
            assert tree.depth[index] == len(node.path)
            assert tree.slot[index] == (NO_SLOT if node.slot is None else node.slot)
            assert tree.expanded[index] == node.expanded
            assert tree.sent[index] == (node.sent or node is self.root)
            assert tree.probability[index] == pytest.approx(node.probability, rel=1e-4, abs=1e-12)
            assert tree.token[tree.lineage(index)].tolist() == [self.root.token, *node.path]

    @invariant()
    def every_node_sees_its_path(self) -> None:
        if hasattr(self, "tree"):
            everything = range(self.tree.size)
            visible = self.tree.visible(everything, everything)
            assert all(np.flatnonzero(visible[node]).tolist() == self.tree.lineage(node) for node in everything)


Trees.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTrees = Trees.TestCase


def grown(*nodes: tuple[int, int, float], capacity: int = 64) -> TokenTree:
    """nodes: (parent, token, confidence)."""
    tree = TokenTree(0, capacity)
    for node in nodes:
        tree.add(*node)
    return tree


def ids(*values: int) -> IntArray:
    return np.asarray(values, np.int32)


def arrays(parents: Sequence[int], tokens: Sequence[int]) -> tuple[IntArray, IntArray, np.ndarray]:
    return np.asarray(parents, np.int32), np.asarray(tokens, np.int32), np.full(len(parents), 0.5, np.float32)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12), st.floats(0, 1))
def test_as_many_nodes_are_expanded_as_bring_most_for_their_time(found: list[float], node_cost: float) -> None:
    likeliest = np.array(sorted(found, reverse=True), np.float32)
    rates = np.cumsum(likeliest, dtype=np.float64) / (1 + node_cost * np.arange(len(likeliest)))
    count = worthwhile(likeliest, node_cost)
    assert rates[count - 1] == pytest.approx(rates.max(), rel=1e-6)
    assert worthwhile(likeliest, 0.0) == len(likeliest), "what takes no time is worth it"


@pytest.mark.parametrize("confidence", [float("nan"), float("inf"), -float("inf"), -0.5, 1.5])
def test_a_confidence_that_is_no_probability_counts_as_nothing(confidence: float) -> None:
    tree = grown((0, 1, 0.5), (0, 2, confidence), (2, 3, 0.9))
    assert tree.confidence[:4].tolist() == [1.0, 0.5, 0.0, pytest.approx(0.9)]
    assert tree.frontier(2, 5)[1] == 1  # behind the root
    assert tree.best(1, tree.probability[:4]).tolist() == [1]
    assert tree.commit([2]).hit
    tree.check()


@given(st.lists(st.tuples(st.integers(0, 30), few_tokens), max_size=30), st.lists(few_tokens, max_size=3))
def test_a_full_tree_takes_what_fits_of_a_piece(nodes: list[tuple[int, int]], committed: list[int]) -> None:
    parents = [min(parent, index) - 1 for index, (parent, _) in enumerate(nodes)]
    tree = TokenTree(0, 6)
    new = tree.graft(committed, *arrays(parents, [token for _, token in nodes]))
    tree.check()
    assert new == tree.size - 1


def test_a_piece_ahead_of_the_committed_tokens_is_dropped() -> None:
    tree = TokenTree(0)
    assert tree.graft([7, 8], *arrays([-1, 0], [7, 9])) == 0
    assert tree.graft([7, 8], *arrays([-1], [7])) == 0
    assert tree.graft([7, 8], *arrays([-1, 0, 1], [7, 8, 9])) == 1
    assert tree.path([9]) > 0


def test_a_piece_contains_the_ancestors_of_its_nodes() -> None:
    tree = grown((0, 5, 0.5), (1, 6, 0.4), (0, 7, 0.3), (2, 8, 0.2))
    parents, tokens, held = tree.piece(np.asarray([4], np.int32))
    assert (parents.tolist(), tokens.tolist()) == ([-1, 0, 1], [5, 6, 8])
    assert held.tolist() == [pytest.approx(value) for value in (0.5, 0.4, 0.2)]


def test_no_nodes_make_an_empty_piece() -> None:
    assert [len(part) for part in grown((0, 5, 0.5)).piece(np.zeros(0, np.int32))] == [0, 0, 0]


def test_path_slots_end_before_the_first_node_without_kv() -> None:
    tree = grown((0, 1, 0.9), (1, 2, 0.9), (2, 3, 0.9), (0, 4, 0.1))
    tree.slot[[1, 3, 4]] = [10, 30, 40]
    moved = tree.commit([1, 2, 3])
    assert moved.path_slots == (10,)
    assert sorted(moved.freed_slots) == [30, 40]


@pytest.mark.parametrize("name", ["parent", "depth", "token", "slot", "probability"])
def test_check_finds_a_broken_array(name: str) -> None:
    tree = grown((0, 4, 0.5), (0, 2, 0.5), (2, 3, 0.5))
    tree.slot[1:3] = [4, 5]
    tree.check()
    getattr(tree, name)[0 if name == "probability" else 2] = 4
    with pytest.raises(AssertionError):
        tree.check()


# the walk


def test_the_walk_ends_at_the_first_token_that_is_no_child() -> None:
    tree = grown((0, 5, 0.5), (1, 6, 0.5), (0, 7, 0.5))
    assert walk(tree, ids(1, 2, 3), ids(5, 6, 9, 5)) == ([0, 1, 2], False)
    assert walk(tree, ids(1, 2, 3), ids(7, 6, 9, 5)) == ([0, 3], False)
    assert walk(tree, ids(1, 2, 3), ids(5, 8, 9, 5)) == ([0, 1], True)
    assert walk(tree, ids(1, 2, 3), ids(8, 6, 9, 5)) == ([0], True)
    assert walk(tree, ids(), ids(5)) == ([0], False)


def test_the_walk_does_not_pass_a_node_that_was_not_verified() -> None:
    tree = grown((0, 5, 0.5), (1, 6, 0.5))
    assert walk(tree, ids(2), ids(5, 9)) == ([0], False)


def test_many_children_are_added_as_one_by_one() -> None:
    parents, tokens, confidences = [0, 0, 1, 1, 0], [5, 6, 7, 8, 5], [0.6, 0.3, float("nan"), 0.5, 0.9]
    one_by_one, at_once = grown((0, 4, 0.5)), grown((0, 4, 0.5))
    expected = [one_by_one.add(*child) for child in zip(parents, tokens, confidences, strict=True)]
    assert at_once.add_many(parents, tokens, confidences) == expected == [2, 3, 4, 5, 2]
    for name in ("parent", "token", "confidence", "depth", "probability", "slot", "expanded", "sent"):
        assert (getattr(at_once, name)[: at_once.size] == getattr(one_by_one, name)[: one_by_one.size]).all(), name
    at_once.check()


def test_a_full_tree_takes_the_first_of_many_children() -> None:
    tree = grown(capacity=3)
    assert tree.add_many([0, 0, 0, 0], [1, 2, 3, 1], [0.1] * 4) == [1, 2, -1, 1]
    tree.check()


def test_unsent_nodes_are_told_when_they_are_among_the_best() -> None:
    tree = grown((0, 1, 0.6), (0, 2, 0.4), (1, 3, 0.9))  # reached with 0.6, 0.4 and 0.54
    assert tree.unsent(2).tolist() == [1, 3]
    tree.sent[[1, 3]] = True
    assert tree.unsent(2).tolist() == []
    tree.commit([2])
    assert tree.unsent(2).tolist() == []
    assert grown((0, 1, 0.6)).unsent(2).tolist() == [1]


def test_places_behind_the_possible_tokens_are_no_children() -> None:
    """Where a grammar allows fewer than a draft looks for, the rest is token 0 with a confidence of 0."""
    tree = TokenTree(0)
    tree.expand([ROOT], np.asarray([[5, 0, 0]], np.int32), np.asarray([[1.0, 0, 0]], np.float32))
    assert tree.token[1 : tree.size].tolist() == [5]
    tree.expand([1], np.asarray([[0, 0, 0]], np.int32), np.asarray([[1.0, 0, 0]], np.float32), overrule=True)
    assert tree.confidence[1 : tree.size].tolist() == [1.0, 1.0]


def test_children_that_are_hardly_likely_are_left_out_but_never_the_first() -> None:
    tree = TokenTree(0)
    tokens = np.asarray([[7, 8, 9], [5, 6, 4]], np.int32)
    tree.expand([ROOT], tokens[:1], np.asarray([[0.6, 0.3, 0.01]], np.float32), least=0.02)
    assert tree.token[1 : tree.size].tolist() == [7, 8]
    tree.expand([1], tokens[1:], np.asarray([[0.01, 0.01, 0.01]], np.float32), least=0.02)
    assert tree.token[1 : tree.size].tolist() == [7, 8, 5]
