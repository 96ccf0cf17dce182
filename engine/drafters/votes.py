"""How several earlier places went on, as one small tree: what many of them agree on stands first."""

import numpy as np

from engine.tree import TokenTree
from engine.types import FloatArray, IntArray

NOTHING = -1  # where a continuation has ended; no token id is negative


def hang_votes(tree: TokenTree, rows: IntArray, votes: FloatArray, nodes: int, trust: FloatArray) -> None:
    """Adds the `nodes` most voted tokens below the root.

    rows: continuations [n, depth], ended by NOTHING. votes: of each [n]. A node's confidence is its share of its
    parent's votes, times the trust in tokens so deep, [depth].
    """
    some = rows[:, 0] != NOTHING if rows.size else np.zeros(0, np.bool_)
    if some.any():
        parents, tokens, shares, depths = _tally(rows[some], votes[some])
        kept = _most_voted(parents, tokens, shares, nodes)
        place = np.full(len(parents) + 1, -1, np.int32)  # the last is that of parent -1, the root
        place[kept] = np.arange(len(kept), dtype=np.int32)
        above = np.append(shares, np.float32(votes[some].sum()))[parents[kept]]
        confidences = (shares[kept] / above * trust[depths[kept]]).astype(np.float32)
        tree.graft([], place[parents[kept]], tokens[kept], confidences)


def _tally(rows: IntArray, votes: FloatArray) -> tuple[IntArray, IntArray, FloatArray, IntArray]:
    """The tree of all rows, level by level: of each node its parent (-1: the root), token, votes, and depth from 0."""
    order = np.lexsort(rows.T[::-1])
    rows, votes = rows[order], votes[order]
    begins = np.ones(rows.shape, np.bool_)  # where a row parts from the one before
    begins[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    above = np.full(len(rows), -1, np.int32)  # of each row: its node a level higher
    levels, total = [], 0
    for depth in range(rows.shape[1]):
        first = np.flatnonzero(begins[:, depth])
        sums = np.add.reduceat(votes, first)
        levels.append((above[first], rows[first, depth], sums, np.full(len(first), depth, np.int32)))
        above = (total - 1 + np.cumsum(begins[:, depth])).astype(np.int32)
        total += len(first)
    parents, tokens, counted, depths = (np.concatenate(column) for column in zip(*levels, strict=True))
    return parents, tokens, counted, depths


def _most_voted(parents: IntArray, tokens: IntArray, votes: FloatArray, nodes: int) -> IntArray:
    """Up to `nodes` of them, in index order; a parent has at least its children's votes and stands before them."""
    real = np.flatnonzero(tokens != NOTHING)
    chosen = real[np.argsort(-votes[real], kind="stable")[:nodes]]
    return np.sort(chosen).astype(np.int32)
