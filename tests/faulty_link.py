"""A link that loses, doubles, delays and invents messages."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Generic, TypeVar

import numpy as np

from cluster.link import Link, LinkStats
from cluster.wire import DIGEST_BYTES
from engine.types import Close, Commit, Growth, KVHandle, NeedPrefix, Open, Renew

Out = TypeVar("Out")
In = TypeVar("In")
M = TypeVar("M")


class FaultyLink(Generic[Out, In]):
    """A link that loses, doubles, delays and invents messages, both ways, for tests.

    What happens to a message depends on the seed and on the messages before it, not on time.
    """

    def __init__(
        self,
        inner: Link[Out, In],
        seed: int,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        nonsense: float = 0.0,
        max_delay: int = 8,
    ) -> None:
        """drop, duplicate, delay, nonsense: probabilities per message.

        A delayed message is overtaken by up to `max_delay` later ones, or let go after as many idle calls of `receive`.
        """
        rates = (drop, duplicate, delay, nonsense, max_delay)
        self._inner = inner
        self._notify: Callable[[], None] | None = None
        self._sent: _Faults[Out] = _Faults(Random(f"{seed} sent"), *rates)
        self._received: _Faults[In] = _Faults(Random(f"{seed} received"), *rates)

    def send(self, messages: Sequence[Out]) -> None:
        self._inner.send(self._sent.pass_on(messages))

    def receive(self) -> list[In]:
        self._inner.send(self._sent.pass_on(()))  # else what is held here would wait for the next send
        messages = self._received.pass_on(self._inner.receive())
        if self._held() and self._notify is not None:
            self._notify()
        return messages

    def receive_timed(self) -> list[tuple[float, In]]:
        return [(time.monotonic(), message) for message in self.receive()]

    def wait(self, timeout_s: float) -> bool:
        return self._held() or self._inner.wait(timeout_s)

    def set_notify(self, notify: Callable[[], None] | None) -> None:
        self._notify = notify
        self._inner.set_notify(notify)

    def attend(self) -> int | None:
        return self._inner.attend()

    def _held(self) -> bool:
        """Whether more calls of `receive` would bring something forth."""
        return bool(self._sent.held or self._received.held)

    @property
    def ready_to_send(self) -> bool:
        return self._inner.ready_to_send

    @property
    def alive(self) -> bool:
        return self._inner.alive

    @property
    def stats(self) -> LinkStats:
        return self._inner.stats

    def close(self) -> None:
        self._inner.close()


@dataclass
class _Faults(Generic[M]):
    """The faults of one direction."""

    random: Random
    drop: float
    duplicate: float
    delay: float
    nonsense: float
    max_delay: int
    held: list[tuple[int, M]] = field(default_factory=list)  # (how many steps still, message)

    def pass_on(self, messages: Sequence[M]) -> list[M]:
        """What comes out when `messages` go in. Every message is a step; so is a call without any."""
        passed = [] if messages else self._step()
        for message in messages:
            passed += self._step()
            for _ in range(self._copies()):
                if self.random.random() < self.delay:
                    self.held.append((self.random.randint(1, self.max_delay), message))
                else:
                    passed.append(message)
            if self.random.random() < self.nonsense:
                passed.append(nonsense(message, self.random))
        return passed

    def _copies(self) -> int:
        if self.random.random() < self.drop:
            return 0
        return 2 if self.random.random() < self.duplicate else 1

    def _step(self) -> list[M]:
        due = [message for steps, message in self.held if steps <= 1]
        self.held = [(steps - 1, message) for steps, message in self.held if steps > 1]
        return due


def nonsense(message: M, random: Random) -> M:
    """A well-formed message like this one that says something else: what a broken peer might send."""
    match message:
        case Growth():
            count = len(message.tokens)
            return replace(
                message,
                base=random.choice([message.base, _other_handle(message.base, random)]),
                tokens=np.array(random.choices([-1, 0, 1, 7, 2**31 - 1], k=count), dtype=np.int32),
                confidences=np.array(random.choices([math.nan, math.inf, -1.0, 0.5, 2.0], k=count), dtype=np.float32),
            )
        case Commit():
            return replace(message, handle=_other_handle(message.handle, random), mirrored=not message.mirrored)
        case Open():
            return replace(message, tokens=message.tokens[: random.randint(0, len(message.tokens))])
        case Renew() | Close() | NeedPrefix():
            return replace(message, sessions=(*message.sessions, random.getrandbits(64)))
    return message


def _other_handle(handle: KVHandle, random: Random) -> KVHandle:
    """A handle of a prefix that nobody has, at least as long."""
    return KVHandle(handle.length + random.randint(0, 2), random.randbytes(DIGEST_BYTES))
