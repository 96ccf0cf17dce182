"""Another draft service as a drafter, and what becomes of one that is never right."""

import numpy as np
import pytest

from cluster.link import memory_link
from cluster.remote_drafter import RemoteDrafter
from engine.prefix import HandleChain
from engine.types import Close, Down, Growth, Open, SamplingParams

VOCAB = 16
RIGHT, WRONG = 5, 6


class Inner:
    """A drafter whose service is this object, for two sessions with the same text."""

    def __init__(self) -> None:
        self.drafter = RemoteDrafter(VOCAB)
        ours, self._link = memory_link()
        self.drafter.add_link(ours)
        self._text = [1, 2]
        for session in range(2):
            self.drafter.open(session, self._text, SamplingParams())
        self.drafter.grow()
        self._numbers = [message.session for message in self._link.receive() if isinstance(message, Open)]
        assert len(self._numbers) == 2

    def round(self, guess: int) -> list[Down]:
        """Guesses a token in both sessions, which both go on by another or the same; what the service is told then."""
        chain = HandleChain()
        chain.extend(self._text)
        below = np.full(1, -1, np.int32), np.full(1, guess, np.int32), np.ones(1, np.float32)
        self._link.send([Growth(number, chain.handle, *below) for number in self._numbers])
        assert self.drafter.grow() == [0, 1]
        for session in range(2):
            self.drafter.commit(session, [RIGHT])
        self._text.append(RIGHT)
        self.drafter.grow()
        return self._link.receive()


@pytest.fixture
def inner() -> Inner:
    return Inner()


def test_a_service_that_is_never_right_is_left_alone(inner: Inner) -> None:
    closed = [any(isinstance(message, Close) for message in inner.round(WRONG)) for _ in range(128)]
    assert closed.index(True) == 127  # a round is one step, of however many sessions
    inner.drafter.check()


def test_a_service_that_is_right_now_and_then_is_always_asked(inner: Inner) -> None:
    for number in range(500):
        told = inner.round(WRONG if number % 100 else RIGHT)
        assert not any(isinstance(message, Close) for message in told)
    inner.drafter.check()
