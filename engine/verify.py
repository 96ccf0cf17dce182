"""Verification is one walk: follow the child that equals the target's own token, stop when there is none."""

from collections.abc import Callable

from engine.tree import ROOT, TokenTree


def walk(tree: TokenTree, verified: set[int], chosen: Callable[[int], int]) -> list[int]:
    """The target's tokens along the tree: the accepted draft tokens, then the target's own next token.

    verified: the nodes that were in the target's step (with their ancestors); chosen(node): the target's token after that
    node, asked for the root and for accepted nodes only.
    """
    node = ROOT
    tokens: list[int] = []
    while True:
        token = chosen(node)
        tokens.append(token)
        node = tree.child(node, token)
        if node not in verified:  # -1 where there is no such child
            return tokens
