"""A stream whose replica falls silent is given up; others are not. With real machines that vanish: test_multinode."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from deployments.backend import MISSED_SIGNS, Listener
from deployments.service import ReplicaLost
from engine.types import TokenChunk

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


CASES: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "heard once": lambda: listen(0.0),
    "after waiting for a place": lambda: listen(LONG_S, 0.0),
    "with a slow client": lambda: listen(0.0, 0.0, 0.0, between_s=LONG_S),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replica_is_given_up_when_it_is_silent_and_no_sooner(case: str) -> None:
    asyncio.run(asyncio.wait_for(CASES[case](), 60.0))
