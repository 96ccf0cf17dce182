"""Paceline's contenders inside this process tree: plain and sequential in one process, pipelined in two actors."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.bench.checkpoints import Pair
from benchmarks.bench.servers import KV_TOKENS
from benchmarks.bench.streams import Ask, Stream
from benchmarks.pipeline import GROWING
from cluster.actors import TargetActor, TargetConfig
from cluster.drafters import DraftConfig
from cluster.local import LocalCluster
from cluster.placement import Placement
from cluster.sequential import SequentialProcess
from engine.types import GenerationRequest, SamplingParams, TokenChunk

CHAINS = tuple((k, lookup) for k in (2, 3, 4, 5, 6, 8) for lookup in (0, GROWING.lookup))  # of sequential drafts
FEW_CHAINS = ((3, 0), (5, 0))  # where time is short


class TimedTarget(TargetActor):
    """Notes when tokens come where they come: handing each step's out through Ray would cost more than it tells."""

    async def timed(self, requests: Sequence[GenerationRequest]) -> list[Stream]:
        """All requests at the same time."""
        return list(await asyncio.gather(*(self._time(request, time.monotonic()) for request in requests)))

    async def _time(self, request: GenerationRequest, started: float) -> Stream:
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def sink(chunk: TokenChunk) -> None:
            if chunk.tokens:
                arrivals.append((time.monotonic() - started, len(chunk.tokens)))
                tokens.extend(chunk.tokens)
            if chunk.finish_reason is not None:
                loop.call_soon_threadsafe(ended.set)

        self._replica.submit(request, sink)
        await ended.wait()
        return Stream(tuple(arrivals), tuple(tokens))


def request_of(ask: Ask, name: str) -> GenerationRequest:
    """It as a request of ours."""
    return GenerationRequest(name, ask.prompt, SamplingParams(ask.temperature, seed=ask.seed, max_tokens=ask.tokens))


class Turns:
    """One process, target and draft taking turns. k = 0 is plain decoding, None the automatic choice."""

    def __init__(self, pair: Pair, where: Placement) -> None:
        self._process = SequentialProcess(pair.target, pair.draft, pair.dtype, where)
        self._asked = 0

    def wait_ready(self) -> None:
        """Blocks until the models are loaded."""
        self._process.run(request_of(Ask((0,), 0, 0.0, 1), "ready"), 0)

    def run(self, asks: Sequence[Ask], k: int | None, lookup: int = 0) -> list[Stream]:
        """One prompt after the other."""
        return [self._run(ask, k, lookup) for ask in asks]

    def _run(self, ask: Ask, k: int | None, lookup: int) -> Stream:
        self._asked += 1
        timed = self._process.run(request_of(ask, str(self._asked)), k, lookup)
        return Stream(timed.arrivals, tuple(timed.generation.tokens))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


class Pipelined:
    """Target and draft as two actors, a core each; a context manager."""

    def __init__(self, pair: Pair, cores: Sequence[int]) -> None:
        places = ([Placement(cores=(cores[0],))], [Placement(cores=(cores[-1],))])
        self._cluster = LocalCluster(
            TargetConfig(pair.target, pair.dtype, kv_tokens=KV_TOKENS, flush_s=0.0, places=("separate",)),
            DraftConfig(pair.draft, pair.dtype),
            placements=places,
            target_actor=TimedTarget,
        )
        self._asked = 0

    def run(self, asks: Sequence[Ask]) -> list[Stream]:
        """All prompts at the same time."""
        self._asked += 1
        requests = [request_of(ask, f"{self._asked}-{index}") for index, ask in enumerate(asks)]
        actor: Any = self._cluster.targets[0]
        streams: list[Stream] = ray.get(actor.timed.remote(requests))
        return streams

    def close(self) -> None:
        """Ends both actors."""
        self._cluster.close()
