"""The sessions of a draft: what its targets say is done to its drafter, and what that grew is told when it is due.

No clock, thread or link: a replica's loop runs it in real time, the simulation in its own.
"""

import logging
import time
from collections.abc import Callable, Iterator

from cluster.cadence import Cadence
from cluster.draft_state import MOST_TOLD, CloseSession, Command, CommitTokens, DraftState, OpenSession, resend
from cluster.trace import Trace
from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.types import Down, Growth, InvalidRequest, Up

logger = logging.getLogger(__name__)


class DraftSessions:
    """One drafter for any number of targets, each a stream with a number. All times are in seconds, of whatever clock."""

    def __init__(self, drafter: Drafter, trace: Trace | None = None, most_told: int = MOST_TOLD) -> None:
        """most_told: see DraftState."""
        self._drafter = drafter
        self._trace = trace or Trace()
        self._state = DraftState(most_told)
        self._cadences: dict[int, Cadence] = {}  # by stream
        self._next_stream = 0
        self._fresh: dict[int, None] = {}  # keys with growth to send
        self._urgent: set[int] = set()  # keys that their target has nothing to verify for

    @property
    def count(self) -> int:
        """How many sessions are open."""
        return self._state.sessions

    def check(self) -> None:
        """Audits what is held for them. Raises AssertionError."""
        self._state.check()
        self._drafter.check()

    # targets

    def join(self) -> int:
        """A target is there; its stream."""
        stream = self._next_stream
        self._next_stream += 1
        self._cadences[stream] = Cadence()
        return stream

    def leave(self, stream: int, now: float) -> None:
        """A target is gone, and its sessions with it."""
        del self._cadences[stream]
        self._apply(self._state.stream_closed(stream), now)

    def heard(self, stream: int, message: Down, arrived: float, now: float) -> None:
        """A target's message, which `arrived` a while ago perhaps."""
        commands = self._state.received(stream, message, now)
        self._apply(commands, now)
        self._cadences[stream].heard(commands, arrived, now)

    def expire(self, now: float) -> None:
        """Ends sessions that no target spoke of for long."""
        self._apply(self._state.expire(now), now)

    # growth

    def grow(self) -> list[int]:
        """One draft step; the keys of the sessions that took part, none if there was nothing to do."""
        grown = self._drafter.grow()
        self._fresh.update(dict.fromkeys(grown))
        return grown

    def turned(self, seconds: float) -> None:
        """A draft step, with what belongs to it, took this long."""
        for cadence in self._cadences.values():
            cadence.turned(seconds)

    def due(self, now: float, everything: bool, ready: Callable[[int], bool]) -> Iterator[tuple[int, list[Up]]]:
        """One coalesced message for each target that waits or will look before the next is due; it counts as sent.

        everything: for all targets. ready: whether a stream takes a message now.
        """
        if not self._fresh and not self._state.asks:
            return
        urgent = {self._state.stream_of(key) for key in self._fresh if key in self._urgent}
        waited_for = {stream for stream in urgent if self._cadences[stream].waits}
        for stream, cadence in self._cadences.items():
            if ready(stream) and (everything or stream in waited_for or cadence.due(now)):
                messages = [*self._state.questions(stream), *self._growths(stream)]
                if messages:
                    yield stream, messages
                    cadence.sent(now, stream in waited_for)

    def _growths(self, stream: int) -> list[Growth]:
        growths: list[Growth] = []
        started = time.monotonic()
        for key in [key for key in self._fresh if self._state.stream_of(key) == stream]:
            del self._fresh[key]
            growth = self._state.growth(key, self._drafter.tree(key))
            if growth is not None:
                self._urgent.discard(key)
                growths.append(growth)
        if growths:
            self._trace.add("growth", started, sum(len(growth.tokens) for growth in growths))
        return growths

    # commands

    def _apply(self, commands: list[Command], now: float) -> None:
        for command in commands:
            match command:
                case OpenSession():
                    self._open(command, now)
                case CommitTokens():
                    self._commit(command, now)
                case CloseSession():
                    self._drafter.close(command.key)
                    self._forget(command.key)

    def _open(self, command: OpenSession, now: float) -> None:
        try:
            self._drafter.open(command.key, command.tokens, command.params, command.prompt)
        except (PoolExhausted, InvalidRequest) as error:
            logger.debug("session refused: %s", error)  # it will be tried again and again
            self._state.refused(command.key, now)

    def _commit(self, command: CommitTokens, now: float) -> None:
        started = time.monotonic()
        try:
            moved = self._drafter.commit(command.key, command.tokens)
        except PoolExhausted as error:
            logger.debug("session dropped: %s", error)
            self._drafter.close(command.key)
            self._state.refused(command.key, now)
            self._forget(command.key)
            return
        if command.resend:
            self._urgent.add(command.key)
            if moved.children:
                resend(self._drafter.tree(command.key))
                self._fresh[command.key] = None
        self._trace.add("commit", started, len(command.tokens))

    def _forget(self, key: int) -> None:
        self._fresh.pop(key, None)
        self._urgent.discard(key)
