"""What a target guesses by itself, in its own process, beside what its drafts grow: all of it hangs in the same mirrors."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.drafters import Drafter, Learner, ReadsStates, TakesPages
from engine.drafters.ngram import DOUBTFUL
from engine.drafters.retrieval import Documents, RetrievalDrafter
from engine.effort import EffortWindow, draft_steps
from engine.kv import PoolExhausted
from engine.step import Outcome, Plan
from engine.tree import TokenTree
from engine.types import InvalidRequest, SamplingParams

logger = logging.getLogger(__name__)
_OPENED = 4  # sessions at most in a step: drafters read their texts between two steps of the target
_HUNG = 64  # nodes of a session that are hung into its mirror at a time


@dataclass(frozen=True)
class LocalDrafter:
    """A drafter in the target's process, and how many steps it takes before each step of the target."""

    drafter: Drafter
    steps: int = 1
    effort: EffortWindow | None = None  # says before each of them whether it pays: `steps` is then the most
    doubtful: float = DOUBTFUL  # what the target looks up and is right less often is no help to it

    @property
    def learner(self) -> Learner | None:
        """The drafter, if it learns from what the target chose behind every verified node."""
        return self.drafter if isinstance(self.drafter, Learner) else None

    @property
    def reader(self) -> ReadsStates | None:
        """The drafter, if it reads the target's states."""
        return self.drafter if isinstance(self.drafter, ReadsStates) else None

    @property
    def taker(self) -> TakesPages | None:
        """The drafter, if it holds pages of the target's pool."""
        return self.drafter if isinstance(self.drafter, TakesPages) else None


class OwnGuesses:
    """The sessions of a local drafter, and those with documents of their own. For the replica's loop alone.

    A session begins with the first tokens of its sequence: the prefix is in the pool by then, where early exit finds it.
    Who finds no room does without, and so do all when a request needs the pages that a drafter holds.
    """

    def __init__(self, local: LocalDrafter | None = None) -> None:
        """local: none guesses nothing."""
        self._local = local
        self._learner = local.learner if local is not None else None
        self._reader = local.reader if local is not None else None
        self._taker = local.taker if local is not None else None
        self._open: set[int] = set()
        self._opened = 0  # in this step
        self._without: set[int] = set()  # sessions that found no room
        self._grounded: dict[int, RetrievalDrafter] = {}  # by session: each in the documents of its request

    @property
    def works(self) -> bool:
        """Whether there is a drafter, which has not failed."""
        return self._local is not None

    @property
    def reads_states(self) -> bool:
        """Whether the target's hidden states are needed."""
        return self._reader is not None

    @property
    def pages(self) -> set[int]:
        """Of the target's pool, that it holds."""
        return self._taker.pages() if self._taker is not None else set()

    def ground(self, session: int, tokens: Sequence[int], params: SamplingParams, documents: Documents) -> None:
        """A sequence with these tokens starts, whose request came with documents."""
        self._grounded[session] = RetrievalDrafter(documents)
        self._grounded[session].open(session, tokens, params)

    def committed(self, session: int, plan: Plan, outcome: Outcome) -> None:
        """A step committed tokens; the session's mirror, in `plan.tree`, has not moved yet."""
        if session in self._grounded:
            self._grounded[session].commit(session, outcome.tokens)
        if self._local is None or session in self._without:
            return
        try:
            self._follow(self._local.drafter, session, plan, outcome)
        except (PoolExhausted, InvalidRequest):
            self._do_without(session)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target decodes on
            self._give_up(error)

    def _follow(self, drafter: Drafter, session: int, plan: Plan, outcome: Outcome) -> None:
        if session not in self._open:
            if self._opened == _OPENED:
                return
            self._opened += 1
            request, before = plan.sequence.request, plan.sequence.tokens[: -len(outcome.tokens)]
            drafter.open(session, before, request.params, len(request.prompt))
            self._open.add(session)
        if self._learner is not None and plan.tree is not None and plan.nodes is not None:
            self._learner.learn(session, plan.tree, plan.nodes, outcome.choices)
        if self._reader is not None and outcome.state is not None:
            self._reader.see(session, outcome.state)
        drafter.commit(session, outcome.tokens)

    def hang(self, mirror: Callable[[int], TokenTree]) -> None:
        """Guesses on, and hangs what is new into the mirrors; what hangs there already stays as it is."""
        self._opened = 0
        try:
            self._grow(mirror)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target decodes on
            self._give_up(error)
        for session, retrieval in self._grounded.items():
            if retrieval.grow():
                mirror(session).adopt(retrieval.tree(session), _HUNG, known=False)

    def _grow(self, mirror: Callable[[int], TokenTree]) -> None:
        if self._local is None or not self._open:
            return
        drafter, effort = self._local.drafter, self._local.effort
        if effort is not None:  # it weighs what it could add to what is there
            for session in self._open:
                drafter.tree(session).adopt(mirror(session), _HUNG, known=False)
        for session in draft_steps(drafter, list(self._open), self._local.steps, effort):
            mirror(session).adopt(drafter.tree(session), _HUNG, known=False)

    def stepped(self, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
        """A step of the target ended: what it brought, for a drafter that weighs its own steps against that.

        No outcomes: it failed.
        """
        effort = self._local.effort if self._local is not None else None
        if effort is not None and self._open:
            effort.ended(plans, outcomes)

    def rest(self) -> None:
        """Forgets all sessions, until something is committed again."""
        for session in list(self._open):
            self.close(session)
        self._without.clear()

    def give_way(self) -> bool:
        """Gives back all pages that it holds in the target's pool, for good; whether there were any."""
        giving = self._open.copy() if self._taker is not None else set()
        for session in giving:
            self._do_without(session)
        return bool(giving)

    def close(self, session: int) -> None:
        """A sequence ended, or left the batch; it may not be known here."""
        self._grounded.pop(session, None)
        self._without.discard(session)
        if self._local is not None and session in self._open:
            self._open.remove(session)
            self._local.drafter.close(session)

    def check(self, sessions: set[int]) -> None:
        """Raises AssertionError unless all is in order, and held for some of these sessions."""
        held = self._open | self._without | self._grounded.keys()
        assert held <= sessions, "a session of the target's own guesses is left behind"
        for retrieval in self._grounded.values():
            retrieval.check()
        if self._local is not None:
            self._local.drafter.check()

    def _give_up(self, error: Exception) -> None:
        logger.error("the drafter in the target's process failed, and is left alone from now on", exc_info=error)
        if self._local is not None:
            for session in self._open:
                with suppress(Exception):
                    self._local.drafter.close(session)
        self._open.clear()
        self._local = None

    def _do_without(self, session: int) -> None:
        if self._local is not None:
            self._open.discard(session)
            self._local.drafter.close(session)
        self._without.add(session)
