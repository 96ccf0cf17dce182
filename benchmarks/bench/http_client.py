"""The client of every server: OpenAI's completions as event streams, in closed and open loops. The same code for all.

Over HTTP come pieces of text and, at the end, how many tokens they were; see streams.by_text.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.bench.streams import Ask, Stream, by_text

_TIMEOUT_S = 600.0
NOTHING = Stream(())  # of a request that failed


@dataclass(frozen=True)
class Server:
    """Where a model is served."""

    url: str
    model: str


async def ask_one(session: aiohttp.ClientSession, server: Server, ask: Ask) -> Stream:
    """One request, read to its end; NOTHING when it failed."""
    body = {
        "model": server.model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    pieces: list[tuple[float, str]] = []
    total = 0
    try:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            if response.status != 200:
                return NOTHING
            async for line in response.content:
                now = time.monotonic() - started
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    choices = event.get("choices", ())
                    text = "".join(choice.get("text") or "" for choice in choices)
                    if text or any(choice.get("finish_reason") for choice in choices):  # an end token has no text
                        pieces.append((now, text))
                    total = (event.get("usage") or {}).get("completion_tokens", total)
    except (aiohttp.ClientError, TimeoutError):  # the session's timeout is no ClientError
        return NOTHING
    return by_text(pieces, total)


def connect() -> aiohttp.ClientSession:
    """A session without limits of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(_TIMEOUT_S), read_bufsize=1 << 20
    )


async def closed_loop(server: Server, asks: Sequence[Ask], clients: int) -> tuple[float, list[Stream]]:
    """So many clients that wait for their answers share the requests; how long it took, and what came."""
    streams: list[Stream] = [NOTHING] * len(asks)
    left = iter(range(len(asks)))
    async with connect() as session:

        async def go_on() -> None:
            for index in left:
                streams[index] = await ask_one(session, server, asks[index])

        started = time.monotonic()
        await asyncio.gather(*(go_on() for _ in range(clients)))
        return time.monotonic() - started, streams


def arrival_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """When requests of an open loop come (Poisson), in seconds from its start; the same for the same seed."""
    rng = random.Random(f"{seed} {rate}")
    due = rng.expovariate(rate)
    while due < seconds:
        yield due
        due += rng.expovariate(rate)


async def open_loop(server: Server, asks: Sequence[Ask], times: Sequence[float]) -> list[Stream]:
    """Requests come at their times, one for each, whatever became of earlier ones; all answers are waited for."""
    tasks: list[asyncio.Task[Stream]] = []
    async with connect() as session:
        started = time.monotonic()
        for ask, due in zip(asks, times, strict=True):
            await asyncio.sleep(max(0.0, started + due - time.monotonic()))
            tasks.append(asyncio.create_task(ask_one(session, server, ask)))
        return list(await asyncio.gather(*tasks))
