"""A draft model that is itself made faster by another drafter: n-grams -> small -> middle -> target, to any depth.

The inner drafter guesses what the outer model will choose, as the outer one does for the target: the nodes it proposes are
hung into the outer's tree and expanded there in one forward pass, in place of one pass for each depth. What the outer model
chooses (by the same noise) replaces the inner's confidences, and is hung into the inner's tree, so that the inner drafter
goes on from there. A cascade is a drafter again, so cascades nest.
Source: cascade speculative drafting, Chen et al. 2023 (https://arxiv.org/abs/2312.11462).
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.tree import ROOT, Moved, TokenTree
from engine.types import InvalidRequest, SamplingParams

_TOLD = 16  # nodes of a session that one tells the other at a time


class CascadeDrafter:
    """Implements Drafter with two others, which nobody else may use: `inner` guesses for `outer`."""

    def __init__(self, outer: Drafter, inner: Drafter, inner_steps: int = 2) -> None:
        """outer: expands what others hang into its trees, as a ModelDrafter does; best one with Growing(overrule=True).

        inner_steps: of the inner drafter for one of the outer.
        """
        self._outer, self._inner = outer, inner
        self._inner_steps = inner_steps
        self._sessions: set[int] = set()
        self._chosen: set[int] = set()  # sessions in which the inner drafter doesn't know the outer's choices yet

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter. Both drafters hold the session, or none."""
        self.close(session)
        try:
            self._outer.open(session, tokens, params, prompt)
            self._inner.open(session, tokens, params, prompt)
        except (PoolExhausted, InvalidRequest):
            self.close(session)
            raise
        self._sessions.add(session)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter. Raises PoolExhausted, after which the session must be closed."""
        moved = self._outer.commit(session, tokens)
        self._inner.commit(session, tokens)
        self._chosen.add(session)
        hung = self._hang(session)
        return replace(moved, children=moved.children or int(hung))

    def grow(self) -> list[int]:
        """See Drafter. At most one forward pass of the outer model."""
        for session in self._chosen:
            self._inner.tree(session).adopt(self._outer.tree(session), _TOLD, known=True)
        self._chosen.clear()
        guessed: set[int] = set()
        for _ in range(self._inner_steps):
            guessed.update(self._inner.grow())
        hung = [session for session in guessed if self._hang(session)]
        grown = self._outer.grow()
        self._chosen.update(grown)
        return list(dict.fromkeys([*grown, *hung]))

    def tree(self, session: int) -> TokenTree:
        """See Drafter: the outer's tree. What the inner drafter guessed is in it from the start."""
        return self._outer.tree(session)

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.discard(session)
        self._chosen.discard(session)
        self._outer.close(session)
        self._inner.close(session)

    def check(self) -> None:
        """See Drafter."""
        self._outer.check()
        self._inner.check()
        assert self._chosen <= self._sessions, "a closed session is remembered"
        for session in self._sessions:
            outer, inner = self._outer.tree(session), self._inner.tree(session)
            assert outer.token[ROOT] == inner.token[ROOT], "the two trees have different roots"

    def _hang(self, session: int) -> bool:
        """Puts the inner drafter's guesses where the outer hasn't chosen yet; whether any are new."""
        return self._outer.tree(session).adopt(self._inner.tree(session), _TOLD, known=False) > 0
