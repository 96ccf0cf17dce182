"""Suffix decoding: what followed the last tokens in this session's text and in earlier outputs. No model.

Source: SuffixDecoding, Oliaro et al. 2024 (https://arxiv.org/abs/2411.04975). The authors' package, arctic-inference 0.3,
comes as source alone and needs a torch of its own to be built; the index here is a small one of ours.
"""

from collections.abc import Sequence

import numpy as np

from engine.drafters.past import LONGEST, Past, vote
from engine.drafters.votes import hang_votes
from engine.tree import ROOT, Moved, TokenTree
from engine.types import SamplingParams


class _Session:
    def __init__(self, tokens: Sequence[int], own: int, greedy: bool) -> None:
        self.past = Past(own)
        self.past.extend(tokens)
        self.last = list(tokens[-LONGEST:])
        self.output: list[int] = []  # since it was opened: the rest may be kept already
        self.tree = TokenTree(tokens[-1], greedy=greedy)
        self.fresh = True  # the root moved since the tree was grown

    def extend(self, tokens: Sequence[int]) -> Moved:
        self.past.extend(tokens)
        self.output.extend(tokens)
        self.last = [*self.last, *tokens][-LONGEST:]
        self.fresh = True
        return self.tree.commit(tokens)


class SuffixDrafter:
    """Implements Drafter: the places where most of the last tokens stood before vote on how they go on.

    An output is shared with other sessions when its session closes; the oldest are dropped. What a session guesses at may so
    come from any other's output. The text stays the target's own, but how fast it comes can tell that somebody has
    had it before. The protocol doesn't name tenants: where they must not learn so much of each other, give each of them a
    drafter, or share nothing (`shared=0`).
    """

    def __init__(
        self, nodes: int = 24, depth: int = 12, shared: int = 1 << 18, own: int = 1 << 13, places: int = 64
    ) -> None:
        """nodes: added after each commit, at most `depth` deep. places: looked at for it, of each kind.

        shared: tokens of earlier outputs that are kept; own: of each session's text. Each token takes 68 bytes.
        """
        self._nodes, self._depth, self._own, self._places = nodes, depth, own, places
        self._shared = Past(shared) if shared else None
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self.close(session)
        self._sessions[session] = _Session(tokens, self._own, params.temperature == 0)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        return self._sessions[session].extend(tokens)

    def grow(self) -> list[int]:
        """See Drafter."""
        grown = [session for session, held in self._sessions.items() if held.fresh]
        for session in grown:
            self._grow(self._sessions[session])
        return grown

    def _grow(self, held: _Session) -> None:
        held.fresh = False
        held.tree.expanded[ROOT] = True  # looked at, whether anything was found or not
        last = np.asarray(held.last, np.int32)
        pasts = [held.past, self._shared] if self._shared is not None else [held.past]
        found = [(past, *past.matches(last, self._places)) for past in pasts]
        rows = np.concatenate([past.follow(places, self._depth) for past, places, _ in found])
        lengths = np.concatenate([matched for _, _, matched in found])
        if len(lengths):
            longest = int(lengths.max())
            trust = 1 - 0.5 ** (longest + np.arange(self._depth, dtype=np.float32))  # the longer the match, the surer
            hang_votes(held.tree, rows, vote(lengths, longest), self._nodes, trust)

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        held = self._sessions.pop(session, None)
        if held is not None and held.output and self._shared is not None:
            self._shared.begin()
            self._shared.extend(held.output)

    def check(self) -> None:
        """See Drafter."""
        for held in self._sessions.values():
            held.tree.check()
            held.past.check()
        if self._shared is not None:
            self._shared.check()
