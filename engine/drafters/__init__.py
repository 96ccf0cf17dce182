"""Drafters: anything that grows token trees, behind one protocol."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.tree import Moved, TokenTree
from engine.types import IntArray, SamplingParams

if TYPE_CHECKING:
    import torch  # what only looks text up does without it


class Drafter(Protocol):
    """Grows the token tree of each of its sessions. A session is named by an integer that its owner mints."""

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """Holds a session for a prefix (at least one token), whose first `prompt` tokens, or all, are the prompt.

        Raises PoolExhausted when there is no room, InvalidRequest for a grammar that can't be used.
        """

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """Appends newly committed tokens (at least one) and moves the tree's root along them."""

    def grow(self) -> list[int]:
        """Expands the most valuable frontier nodes of all sessions in one batch; the sessions that were worked on."""

    def tree(self, session: int) -> TokenTree:
        """The session's tree; its root is the last committed token.

        Between commits nodes are only added. Others may hang some there; a drafter that can goes on below them.
        """

    def close(self, session: int) -> None:
        """Frees what the session holds; unknown sessions are ignored."""

    def check(self) -> None:
        """Audits what the drafter holds; raises AssertionError."""


@runtime_checkable
class Learner(Protocol):
    """A drafter that learns from all that the target chose: behind wrong guesses as well."""

    def learn(self, session: int, tree: TokenTree, nodes: IntArray, choices: Sequence[int]) -> None:
        """A step verified `nodes` of the session's tree, and is about to be committed.

        choices: the target's token behind the root and behind each of `nodes`, [1 + nodes]; -1 where none is allowed.
        """


@runtime_checkable
class TakesPages(Protocol):
    """A drafter that holds pages of the target's own pool."""

    def pages(self) -> set[int]:
        """Which ones, the shared ones too."""


@runtime_checkable
class ReadsStates(Protocol):
    """A drafter that guesses from the target's own hidden states; it lives in the target's process."""

    def see(self, session: int, state: "torch.Tensor") -> None:
        """The final hidden state [hidden_size] that the target chose the last of its new tokens from; `commit` follows."""
