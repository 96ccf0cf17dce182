"""A draft replica: one loop that listens to its targets, grows their sessions' trees and sends the growth."""

import logging
import time
from dataclasses import dataclass

from cluster.cadence import Cadence
from cluster.draft_state import CloseSession, Command, CommitTokens, DraftState, OpenSession, resend
from cluster.link import Link
from cluster.loop import Loop
from cluster.placement import Placement
from cluster.trace import Trace
from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.types import Down, Growth, InvalidRequest, Up

logger = logging.getLogger(__name__)
_EXPIRE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Since the replica started."""

    streams: int  # open now
    sessions: int  # open now
    steps: int
    busy_s: float  # in draft steps
    wall_s: float


class DraftReplica:
    """Runs a drafter for any number of targets. A plain class: actors and tests wrap it."""

    def __init__(self, drafter: Drafter, placement: Placement | None = None) -> None:
        self._drafter = drafter
        self._state = DraftState()
        self._links: dict[int, Link[Up, Down]] = {}  # by stream
        self._cadences: dict[int, Cadence] = {}  # by stream
        self._next_stream = 0
        self._fresh: dict[int, None] = {}  # keys with growth to send
        self._urgent: set[int] = set()  # keys that their target has nothing to verify for
        self._steps, self._busy_s, self._started = 0, 0.0, time.monotonic()
        self._next_expiry = self._started + _EXPIRE_EVERY_S
        self.trace = Trace()
        self._loop = Loop("paceline-draft", placement or Placement(), _EXPIRE_EVERY_S, self._turn, self._end)
        self._loop.start()

    def add_link(self, link: Link[Up, Down]) -> None:
        """A target connected. May be called from any thread."""
        self._loop.do(lambda: self._join(link))

    def stats(self) -> DraftStats:
        """What it did so far; may be called from any thread."""
        wall_s = time.monotonic() - self._started
        return DraftStats(len(self._links), self._state.sessions, self._steps, self._busy_s, wall_s)

    @property
    def alive(self) -> bool:
        """False once it was closed, or failed for good."""
        return self._loop.alive

    @property
    def turn_s(self) -> float:
        """How many seconds the present turn of its loop has taken: one that hangs never ends."""
        return self._loop.turn_s

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until there is nothing to do (no message, nothing to grow): True; False after `timeout_s`."""
        return self._loop.wait_idle(timeout_s)

    def check(self) -> None:
        """Audits everything it holds, between two steps. Raises AssertionError."""
        self._loop.ask(self._audit)

    def close(self) -> None:
        """Ends the loop, all sessions and all links."""
        self._loop.stop()

    def _turn(self) -> bool:
        started = time.monotonic()
        heard = self._listen()
        if heard:
            self._send()  # what a miss made worth telling again doesn't wait for a draft step
        grown = self._grow()
        if grown:
            for cadence in self._cadences.values():
                cadence.turned(time.monotonic() - started)
        self._send(everything=not grown)
        return heard or grown

    def _end(self, failure: Exception | None) -> None:
        for stream, link in self._links.items():
            link.close()
            self._apply(self._state.stream_closed(stream))
        self._links.clear()

    def _audit(self) -> None:
        self._state.check()
        self._drafter.check()

    def _join(self, link: Link[Up, Down]) -> None:
        self._links[self._next_stream] = link
        self._cadences[self._next_stream] = Cadence()
        self._next_stream += 1
        self._loop.hear(link)

    def _listen(self) -> bool:
        """Takes in messages and ends of links; whether there were any."""
        now = time.monotonic()
        heard = False
        for stream, link in list(self._links.items()):
            alive = link.alive
            for arrived, message in link.receive_timed():
                heard = True
                commands = self._state.received(stream, message, now)
                self._apply(commands)
                self._cadences[stream].heard(commands, arrived, now)
            if not alive:
                heard = True
                self._loop.forget(link)
                del self._links[stream], self._cadences[stream]
                self._apply(self._state.stream_closed(stream))
        if now > self._next_expiry:
            self._next_expiry = now + _EXPIRE_EVERY_S
            self._apply(self._state.expire(now))
        return heard

    def _apply(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case OpenSession():
                    self._open(command)
                case CommitTokens():
                    self._commit(command)
                case CloseSession():
                    self._drafter.close(command.key)
                    self._forget(command.key)

    def _open(self, command: OpenSession) -> None:
        try:
            self._drafter.open(command.key, command.tokens, command.params, command.prompt)
        except (PoolExhausted, InvalidRequest) as error:
            logger.debug("session refused: %s", error)  # it will be tried again and again
            self._state.refused(command.key, time.monotonic())

    def _commit(self, command: CommitTokens) -> None:
        started = time.monotonic()
        try:
            moved = self._drafter.commit(command.key, command.tokens)
        except PoolExhausted as error:
            logger.debug("session dropped: %s", error)
            self._drafter.close(command.key)
            self._state.refused(command.key, time.monotonic())
            self._forget(command.key)
            return
        if command.resend:
            self._urgent.add(command.key)
            if moved.children:
                resend(self._drafter.tree(command.key))
                self._fresh[command.key] = None
        self.trace.add("commit", started, len(command.tokens))

    def _forget(self, key: int) -> None:
        self._fresh.pop(key, None)
        self._urgent.discard(key)

    def _grow(self) -> bool:
        """One draft step; whether there was anything to do."""
        started = time.monotonic()
        grown = self._drafter.grow()
        if grown:
            self._fresh.update(dict.fromkeys(grown))
            self._steps += 1
            self._busy_s += time.monotonic() - started
            self.trace.add("draft step", started, len(grown))
        return bool(grown)

    def _send(self, everything: bool = False) -> None:
        """One coalesced message for each target that took the last one, and waits or will look before the next is due."""
        if not self._fresh and not self._state.asks:
            return
        now = time.monotonic()
        urgent = {self._state.stream_of(key) for key in self._fresh if key in self._urgent}
        waited_for = {stream for stream in urgent if self._cadences[stream].waits}
        for stream, link in self._links.items():
            cadence = self._cadences[stream]
            if link.ready_to_send and (everything or stream in waited_for or cadence.due(now)):
                messages = [*self._state.questions(stream), *self._growths(stream)]
                if messages:
                    link.send(messages)
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
            self.trace.add("growth", started, sum(len(growth.tokens) for growth in growths))
        return growths
