"""Several drafters' trees as one: a token that several propose below the same path is one node.

What a drafter's confidences are worth is learned: how often the committed token was among its children of the root, over how
sure it was that it would be. A node has the largest of what its drafters' confidences are worth. Not a noisy-or: drafters
that read the same text are wrong together, so that two of them agreeing says little more than the better one does. Siblings
exclude each other: where they add up to more than 1, as drafters contradict each other, they share it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine import tree_loops as loops
from engine.compiled import compiled
from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.tree import ROOT, Moved, TokenTree
from engine.types import FloatArray, InvalidRequest, SamplingParams

_LEARN = 0.05  # weight of the newest commit
_BEFORE = 0.5  # what was claimed, and was right, before anything is known


class Worth:
    """What the confidences of one drafter are worth, lately: in greedy sessions, and in others, where lookups do worse."""

    def __init__(self) -> None:
        self._claimed = {True: _BEFORE, False: _BEFORE}  # expected to be committed, of its children of the root
        self._right = {True: _BEFORE, False: _BEFORE}

    def factor(self, greedy: bool) -> float:
        """What to multiply its confidences with."""
        return self._right[greedy] / max(self._claimed[greedy], 1e-3)

    def learn(self, greedy: bool, tree: TokenTree, token: int) -> None:
        """A token was committed; `tree` is what the drafter had before. Where it had nothing, there is nothing to learn."""
        children = np.flatnonzero(tree.parent[: tree.size] == ROOT)
        claimed = min(1.0, float(tree.confidence[children].sum()))
        if claimed > 0:
            right = float(tree.child(ROOT, token) >= 0)
            self._claimed[greedy] += _LEARN * (claimed - self._claimed[greedy])
            self._right[greedy] += _LEARN * (right - self._right[greedy])


class _Session:
    """The merged tree of one sequence."""

    def __init__(self, tree: TokenTree, greedy: bool) -> None:
        self.tree = tree
        self.greedy = greedy
        self.merged = 1  # the tree's size after the last merge: what stands behind was hung there by others
        self.shared = False  # others hang nodes into the tree


class MergedDrafter:
    """Implements Drafter with several others, which nobody else may use."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """drafters: at least one."""
        self._parts = list(drafters)
        self._worth = [Worth() for _ in drafters]
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter. All of the drafters hold the session, or none."""
        self.close(session)
        try:
            for part in self._parts:
                part.open(session, tokens, params, prompt)
        except (PoolExhausted, InvalidRequest):
            self.close(session)
            raise
        room = sum(part.tree(session).capacity - 1 for part in self._parts)  # for all nodes of all of them
        greedy = params.temperature == 0
        self._sessions[session] = _Session(TokenTree(tokens[-1], room + 1, greedy), greedy)
        self._merge(session)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter. Raises PoolExhausted, after which the session must be closed."""
        held = self._sessions[session]
        for part, worth in zip(self._parts, self._worth, strict=True):
            worth.learn(held.greedy, part.tree(session), tokens[0])
        if held.tree.size > held.merged:
            self._hand_on(session)  # or nobody would stand for what the commit keeps of it
        for part in self._parts:
            part.commit(session, tokens)
        moved = held.tree.commit(tokens)
        self._merge(session)
        return replace(moved, children=int((held.tree.parent[1 : held.tree.size] == ROOT).sum()))

    def grow(self) -> list[int]:
        """See Drafter. Each of the drafters takes a step."""
        for session, held in self._sessions.items():
            if held.tree.size > held.merged:
                self._hand_on(session)
        grown = list(dict.fromkeys(session for part in self._parts for session in part.grow()))
        for session in grown:
            self._merge(session)
        return grown

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)
        for part in self._parts:
            part.close(session)

    def check(self) -> None:
        """See Drafter."""
        for part in self._parts:
            part.check()
        for session, held in self._sessions.items():
            held.tree.check()
            theirs = set().union(*(_paths(part.tree(session)) for part in self._parts))
            ours = _paths(held.tree)
            assert theirs <= ours or held.shared, "a drafter's node is missing"
            assert ours <= theirs or held.shared, "a node is no drafter's"
            for node in range(held.tree.size):
                children = np.flatnonzero(held.tree.parent[: held.tree.size] == node)
                assert held.tree.confidence[children].sum() <= 1.001, "children are likelier than certain, together"

    def _hand_on(self, session: int) -> None:
        """What others hung into the tree is every drafter's, to go on from there: see engine.drafters.cascade."""
        held = self._sessions[session]
        held.shared = True
        piece = held.tree.piece(np.arange(held.merged, held.tree.size, dtype=np.int32))
        for part in self._parts:
            part.tree(session).graft([], *piece)
        self._merge(session)

    def _merge(self, session: int) -> None:
        """Adds what is new in the drafters' trees behind what is there; all confidences are made anew.

        A commit keeps the same nodes of a drafter's tree and of this one, so that nothing has to be remembered of who
        proposed what.
        """
        held = self._sessions[session]
        tree = held.tree
        claims = np.zeros((len(self._parts), tree.capacity), np.float32)
        for part, claim in zip(self._parts, claims, strict=True):
            proposed = part.tree(session)
            tree.size = _merge(tree.nodes, tree.size, proposed.nodes, proposed.size, claim)
        worth = np.asarray([worth.factor(held.greedy) for worth in self._worth], np.float32)
        _weigh(tree.nodes, tree.size, claims, worth)
        held.merged = tree.size


def _paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tokens from below the root to every node."""
    return {tuple(tree.token[tree.lineage(node)[1:]].tolist()) for node in range(tree.size)}


@compiled
def _merge(nodes: loops.Nodes, size: int, part: loops.Nodes, part_size: int, claims: FloatArray) -> int:
    """Adds a drafter's nodes, and writes its confidences to `claims` [capacity]; the new size."""
    places = np.zeros(part_size, np.int32)  # -1: there was no room
    for i in range(1, part_size):
        above = places[part.parent[i]]
        places[i] = loops.add(nodes, size, above, part.token[i], 0.0) if above >= 0 else -1
        if places[i] >= 0:
            size = max(size, places[i] + 1)
            claims[places[i]] = part.confidence[i]
    return size


@compiled
def _weigh(nodes: loops.Nodes, size: int, claims: FloatArray, worth: FloatArray) -> None:
    """Confidences and probabilities from what drafters claim [drafters, capacity] and what that is worth [drafters]."""
    together = np.zeros(size, np.float32)  # of each node's children
    for i in range(1, size):
        best = np.float32(0)
        for drafter in range(len(worth)):
            best = max(best, min(np.float32(1), worth[drafter] * claims[drafter, i]))
        nodes.confidence[i] = best
        together[nodes.parent[i]] += best
    for i in range(1, size):
        above = nodes.parent[i]
        if together[above] > 1:
            nodes.confidence[i] /= together[above]
        nodes.probability[i] = nodes.probability[above] * nodes.confidence[i]
