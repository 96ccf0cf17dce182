"""A stream whose replica falls silent is given up; others are not. With real machines that vanish: test_multinode."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

from cluster.intake import Overloaded
from deployments.backend import MISSED_SIGNS, Listener
from deployments.service import ReplicaLost
from engine.types import InvalidRequest, TokenChunk

SIGN_S = 0.01
LONG_S = 3 * MISSED_SIGNS * SIGN_S
CHUNK = TokenChunk("0", (1,), ("target",))


class Response:
    """Of a replica: chunks, each after so many seconds, then silence, which breaking the connection alone would end."""

    def __init__(self, *delays_s: float) -> None:
        self._delays_s = list(delays_s)
        self._broken = asyncio.get_running_loop().create_future()

    async def __anext__(self) -> TokenChunk:
        if not self._delays_s:
            await self._broken
        await asyncio.sleep(self._delays_s.pop(0))
        return CHUNK

    def cancel(self) -> None:
        self._broken.cancel()


async def listen(*delays_s: float, between_s: float = 0.0) -> None:
    """Reads as many chunks as there are delays, with pauses between them, and then one more."""
    listener = Listener(cast(Any, Response(*delays_s)), SIGN_S)
    try:
        for _ in delays_s:
            assert await listener.next() == CHUNK
            await asyncio.sleep(between_s)
        with pytest.raises(ReplicaLost):
            await listener.next()
    finally:
        listener.close()


class Failing:
    """A response that ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __anext__(self) -> TokenChunk:
        raise self._error


CASES: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "heard once": lambda: listen(0.0),
    "after waiting for a place": lambda: listen(LONG_S, 0.0),
    "with a slow client": lambda: listen(0.0, 0.0, 0.0, between_s=LONG_S),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replica_is_given_up_when_it_is_silent_and_no_sooner(case: str) -> None:
    asyncio.run(asyncio.wait_for(CASES[case](), 60.0))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Unexpected error (StatusCode.UNAVAILABLE): gone."),  # Serve's, where the first answer never came
        OutOfMemoryError("the machine had none left"),  # type: ignore[no-untyped-call]
        NodeDiedError("its machine is gone"),  # type: ignore[no-untyped-call]
        RayActorError(),
    ],
)
def test_whatever_ends_a_replica_its_stream_can_go_on_elsewhere(error: Exception) -> None:
    async def read() -> None:
        with pytest.raises(ReplicaLost):
            await Listener(cast(Any, Failing(error)), SIGN_S).next()

    asyncio.run(read())


def test_what_a_replica_says_of_a_request_comes_through() -> None:
    async def read(error: Exception) -> None:
        await Listener(cast(Any, Failing(error)), SIGN_S).next()

    for said in (Overloaded("full"), KeyError("a bug"), RuntimeError("another")):
        with pytest.raises(type(said)):
            asyncio.run(read(said))
    bad = InvalidRequest("prompt", "must not be empty")
    for error in (bad, RayTaskError("generate", "", bad)):  # type: ignore[no-untyped-call]
        with pytest.raises(InvalidRequest, match="must not be empty"):
            asyncio.run(read(error))
