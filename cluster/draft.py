"""A draft replica: one loop that listens to its targets, grows their sessions' trees and sends the growth."""

import logging
import threading
import time
from dataclasses import dataclass

from cluster.draft_state import CloseSession, Command, CommitTokens, DraftState, OpenSession, resend
from cluster.link import Link
from cluster.placement import Placement
from cluster.trace import Trace
from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.types import Down, Growth, Up

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
        self._placement = placement or Placement()
        self._state = DraftState()
        self._links: dict[int, Link[Up, Down]] = {}
        self._joining: list[Link[Up, Down]] = []
        self._next_stream = 0
        self._fresh: dict[int, None] = {}  # keys with growth to send
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._closed = False
        self._steps, self._busy_s, self._started = 0, 0.0, time.monotonic()
        self._next_expiry = self._started + _EXPIRE_EVERY_S
        self.trace = Trace()
        self._thread = threading.Thread(target=self._run, name="paceline-draft", daemon=True)
        self._thread.start()

    def add_link(self, link: Link[Up, Down]) -> None:
        """A target connected. May be called from any thread."""
        self._joining.append(link)
        link.set_notify(self._wake.set)
        self._wake.set()

    def stats(self) -> DraftStats:
        """What it did so far; may be called from any thread."""
        wall_s = time.monotonic() - self._started
        return DraftStats(len(self._links), self._state.sessions, self._steps, self._busy_s, wall_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until there is nothing to do (no message, nothing to grow): True; False after `timeout_s`."""
        return self._idle.wait(timeout_s)

    def check(self) -> None:
        """Audits everything it holds; for when it is idle. Raises AssertionError."""
        self._state.check()
        self._drafter.check()

    def close(self) -> None:
        """Ends the loop and all links."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        for link in self._links.values():
            link.close()

    def _run(self) -> None:
        self._placement.apply_to_thread()
        while not self._closed:
            self._wake.clear()
            heard = self._listen()
            grown = self._grow()
            self._send()
            if not heard and not grown:
                self._idle.set()
                self._wake.wait(_EXPIRE_EVERY_S)
                self._idle.clear()

    def _listen(self) -> bool:
        """Takes in new links, messages and ends of links; whether there were any."""
        now = time.monotonic()
        heard = False
        while self._joining:
            self._links[self._next_stream] = self._joining.pop(0)
            self._next_stream += 1
        for stream, link in list(self._links.items()):
            alive = link.alive
            for message in link.receive():
                heard = True
                self._apply(self._state.received(stream, message, now))
            if not alive:
                heard = True
                del self._links[stream]
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
                    self._fresh.pop(command.key, None)

    def _open(self, command: OpenSession) -> None:
        try:
            self._drafter.open(command.key, command.tokens, command.params)
        except PoolExhausted as error:
            logger.warning("session refused: %s", error)
            self._state.refused(command.key)

    def _commit(self, command: CommitTokens) -> None:
        started = time.monotonic()
        try:
            moved = self._drafter.commit(command.key, command.tokens)
        except PoolExhausted as error:
            logger.warning("session dropped: %s", error)
            self._drafter.close(command.key)
            self._state.refused(command.key)
            return
        if command.resend and moved.children:
            resend(self._drafter.tree(command.key))
            self._fresh[command.key] = None
        self.trace.add("commit", started, len(command.tokens))

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

    def _send(self) -> None:
        """One coalesced message for each target whose link took the last one."""
        for stream, link in self._links.items():
            if link.ready_to_send:
                messages = [*self._state.questions(stream), *self._growths(stream)]
                if messages:
                    link.send(messages)

    def _growths(self, stream: int) -> list[Growth]:
        growths: list[Growth] = []
        started = time.monotonic()
        for key in [key for key in self._fresh if self._state.stream_of(key) == stream]:
            del self._fresh[key]
            growth = self._state.growth(key, self._drafter.tree(key))
            if growth is not None:
                growths.append(growth)
        if growths:
            self.trace.add("growth", started, sum(len(growth.tokens) for growth in growths))
        return growths
