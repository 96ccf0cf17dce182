"""Verification is one walk: follow the child that equals the target's own token, stop when there is none."""

from engine import tree_loops as loops
from engine.tree import TokenTree
from engine.types import IntArray


def walk(tree: TokenTree, verified: IntArray, chosen: IntArray) -> tuple[list[int], bool]:
    """The rows along the walk, the root's first, and whether children of the last one were verified and refused.

    verified: the nodes that were in the target's step, in index order: row 0 is the root's, row i + 1 that of verified[i].
    chosen: the target's token after each row, [1 + verified]; those of the walked rows are what is committed.
    """
    rows, refused = loops.walk(tree.nodes, verified, chosen)
    return rows.tolist(), refused
