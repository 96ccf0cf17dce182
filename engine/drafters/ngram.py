"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens is the guess. No model.

Source: Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Sequence

from engine.tree import ROOT, Moved, TokenTree
from engine.types import SamplingParams


class _Session:
    def __init__(self, tokens: list[int], capacity: int, longest: int) -> None:
        self.tokens = tokens
        self.tree = TokenTree(tokens[-1], capacity)
        self.fresh = True  # the root moved since the tree was grown
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence before the last token ends
        self._longest = longest
        self._indexed = 0

    def index(self) -> None:
        """Adds the n-grams that end before the last token."""
        for end in range(self._indexed + 1, len(self.tokens)):
            for n in range(1, min(self._longest, end) + 1):
                self.ends[tuple(self.tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(self.tokens) - 1)


class NgramDrafter:
    """Implements Drafter: grows a chain of at most `length` tokens where the last 1 to `longest` tokens occurred before."""

    def __init__(self, length: int = 12, longest: int = 4) -> None:
        self._length = length
        self._longest = longest
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams) -> None:
        """See Drafter."""
        self._sessions[session] = _Session(list(tokens), self._length + 1, self._longest)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        held.tokens.extend(tokens)
        held.fresh = True
        return held.tree.commit(tokens)

    def grow(self) -> list[int]:
        """See Drafter."""
        grown = [session for session, held in self._sessions.items() if held.fresh]
        for session in grown:
            self._lookup(self._sessions[session])
        return grown

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)

    def check(self) -> None:
        """See Drafter."""
        for held in self._sessions.values():
            held.tree.check()

    def _lookup(self, held: _Session) -> None:
        """Hangs the continuation of the longest match below the root; the longer the match, the surer."""
        held.fresh = False
        held.index()
        tokens = held.tokens
        for n in range(min(self._longest, len(tokens) - 1), 0, -1):
            end = held.ends.get(tuple(tokens[-n:]))
            if end is not None:
                node = ROOT
                held.tree.expanded[ROOT] = True
                for token in tokens[end : end + self._length]:
                    node = held.tree.add(node, token, 1 - 0.5**n)
                    if node < 0:
                        return
                return
