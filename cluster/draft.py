"""A draft replica: one loop that listens to its targets, grows their sessions' trees and sends the growth."""

import time
from dataclasses import dataclass

from cluster.draft_sessions import DraftSessions
from cluster.link import Link
from cluster.loop import Loop
from cluster.placement import Placement
from cluster.trace import Trace
from engine.drafters import Drafter
from engine.types import Down, Up

_EXPIRE_EVERY_S = 1.0
# It always finds something to guess, and its guesses only save time: HTTP servers and targets that want its core go first.
_NICE = 10


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
        self.trace = Trace()
        self._sessions = DraftSessions(drafter, self.trace)
        self._links: dict[int, Link[Up, Down]] = {}  # by stream
        self._steps, self._busy_s, self._started = 0, 0.0, time.monotonic()
        self._next_expiry = self._started + _EXPIRE_EVERY_S
        placement = placement or Placement()
        self._loop = Loop("paceline-draft", placement, _EXPIRE_EVERY_S, self._turn, self._end, _NICE)
        self._loop.start()

    def add_link(self, link: Link[Up, Down]) -> None:
        """A target connected. May be called from any thread."""
        self._loop.do(lambda: self._join(link))

    def stats(self) -> DraftStats:
        """What it did so far; may be called from any thread."""
        wall_s = time.monotonic() - self._started
        return DraftStats(len(self._links), self._sessions.count, self._steps, self._busy_s, wall_s)

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
        self._loop.ask(self._sessions.check)

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
            self._sessions.turned(time.monotonic() - started)
        self._send(everything=not grown)
        return heard or grown

    def _end(self, failure: Exception | None) -> None:
        for stream, link in self._links.items():
            link.close()
            self._sessions.leave(stream, time.monotonic())
        self._links.clear()

    def _join(self, link: Link[Up, Down]) -> None:
        self._links[self._sessions.join()] = link
        self._loop.hear(link)

    def _listen(self) -> bool:
        """Takes in messages and ends of links; whether there were any."""
        now = time.monotonic()
        heard = False
        for stream, link in list(self._links.items()):
            alive = link.alive
            for arrived, message in link.receive_timed():
                heard = True
                self._sessions.heard(stream, message, arrived, now)
            if not alive:
                heard = True
                self._loop.forget(link)
                del self._links[stream]
                self._sessions.leave(stream, now)
        if now > self._next_expiry:
            self._next_expiry = now + _EXPIRE_EVERY_S
            self._sessions.expire(now)
        return heard

    def _grow(self) -> bool:
        """One draft step; whether there was anything to do."""
        started = time.monotonic()
        grown = self._sessions.grow()
        if grown:
            self._steps += 1
            self._busy_s += time.monotonic() - started
            self.trace.add("draft step", started, len(grown))
        return bool(grown)

    def _send(self, everything: bool = False) -> None:
        """To each target that took the last message."""
        for stream, messages in self._sessions.due(time.monotonic(), everything, self._is_ready):
            self._links[stream].send(messages)

    def _is_ready(self, stream: int) -> bool:
        return self._links[stream].ready_to_send
