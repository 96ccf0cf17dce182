"""vLLM inside a target replica: the interface of cluster.target.TargetReplica over vLLM's AsyncLLM.

vLLM batches, samples and verifies by itself, in processes of its own. Drafts reach it through cluster.vllm_proposer, which
is told over vLLM's own `collective_rpc` which draft replicas live. vLLM is imported when a replica starts, and not before.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.intake import MAX_WAITING, TARGET_FAILED, Closed, Overloaded, Sink, Unsent
from cluster.placement import Placement
from cluster.target_state import Counters
from cluster.target_stats import TargetStats
from cluster.trace import Trace
from cluster.vllm_counts import VllmCounts
from cluster.vllm_options import VllmOptions, check_options, engine_arguments
from cluster.vllm_params import check_request, chunk_logprobs, sampling_params
from engine.budget import Window
from engine.checkpoint import ModelError
from engine.types import FinishReason, GenerationRequest, require

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TELL_TIMEOUT_S = 6.0
_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


class VllmTarget:
    """Implements cluster.engines.Target and Links over vLLM. A thread of its own runs the event loop that vLLM needs."""

    def __init__(
        self, model: Path, dtype: str, max_batch: int, flush_s: float, options: VllmOptions, placement: Placement
    ) -> None:
        """Loads the model; see cluster.actors.TargetConfig. Raises ModelError."""
        check_options(options)
        self._max_batch, self._flush_s, self._drafted = max_batch, flush_s, options.drafted
        self.trace = Trace()  # stays empty
        self._counted = VllmCounts()
        self._proposer: dict[str, int] = {}  # what it last said: see RemoteProposer.follow
        self._requests = 0
        self._tasks: dict[str, asyncio.Task[None] | None] = {}  # by request id; None: not begun
        self._lock = threading.Lock()  # of the tasks' ids
        self._closed = False
        self._idle = threading.Event()
        self._idle.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-vllm", daemon=True)
        self._thread.start()
        arguments = engine_arguments(model, dtype, max_batch, options)
        try:
            self._engine: Any = self._run(_start(arguments, self._counted, placement)).result()
        except Exception as error:
            self._stop_loop()
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(f"vLLM can't run {model}: {reason}") from error
        self._config = self._engine.vllm_config

    # from any thread

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """See TargetReplica.submit."""
        self.check_request(request)
        with self._lock:
            if self._closed or not self.alive:
                raise Closed("the target has ended")
            require(request.request_id not in self._tasks, "request_id", "a request with this id is running")
            if len(self._tasks) >= MAX_WAITING + self._max_batch:
                raise Overloaded(f"{MAX_WAITING} requests are waiting already")
            if not self._tasks:
                self._counted.heard = time.monotonic()
            self._tasks[request.request_id] = None
            self._idle.clear()
            self._requests += 1
            self._loop.call_soon_threadsafe(self._begin, request, sink)  # before `close` can ask for the end

    def check_request(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for what vLLM can't run, or not with speculation, or not go on with."""
        check_request(request, self._engine)

    def cancel(self, request_id: str) -> None:
        """See TargetReplica.cancel."""
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def set_window(self, window: Window) -> None:
        """Raises ValueError: vLLM verifies one path."""
        raise ValueError("vLLM has no windows")

    def set_speculation(self, on: bool) -> None:
        """Nothing: the links say whether there are drafts."""

    def stats(self) -> TargetStats:
        """A snapshot; what vLLM doesn't tell is 0."""
        said = dict(self._proposer)
        drafts = said.pop("drafts", 0)
        link = {**asdict(Counters()), **said}
        counted, held = self._counted.stats, len(self._tasks)  # a cancelled request's end is no step of vLLM's
        running, waiting = min(held, counted.running), min(held, counted.waiting)
        return replace(counted, running=running, waiting=waiting, drafts=drafts, requests=self._requests, link=link)

    def accepted_at(self) -> list[int]:
        """See TargetReplica.accepted_at."""
        return list(self._counted.accepted_at)

    @property
    def pages(self) -> tuple[int, int]:
        """See TargetReplica.pages: vLLM's blocks."""
        blocks = int(self._config.cache_config.num_gpu_blocks or 0)
        return round(self._counted.kv_share * blocks) if self._tasks else 0, blocks

    @property
    def alive(self) -> bool:
        """False once it was closed, or vLLM's engine has ended."""
        return not self._closed and self._thread.is_alive() and not self._engine.errored

    @property
    def turn_s(self) -> float:
        """Seconds without a step although there are requests."""
        return time.monotonic() - self._counted.heard if self._tasks else 0.0

    def wait_idle(self, timeout_s: float) -> bool:
        """See TargetReplica.wait_idle."""
        return self._idle.wait(timeout_s)

    def check(self) -> None:
        """Audits what can be seen of an idle vLLM. Raises AssertionError."""
        assert self._tasks or not self._engine.get_num_unfinished_requests(), "vLLM holds a request of nobody"

    def close(self) -> None:
        """Ends all requests, vLLM and its processes."""
        with self._lock:
            self._closed = True
        self._run(self._end_all()).result()
        self._engine.shutdown()
        self._stop_loop()

    # links to drafts: they end in vLLM's process

    def round_trips_s(self) -> list[float]:
        """None: they are not known here."""
        return []

    def follow(self, addresses: Sequence[str] | None) -> None:
        """See cluster.engines.Links."""
        if not self._drafted or not self.alive:
            return
        # No limit for vLLM itself: of several ranks, one that answers after it would be taken to answer the next call.
        telling = self._run(self._engine.collective_rpc("paceline_follow", None, (addresses,)))
        try:
            answers = telling.result(_TELL_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  whether vLLM lives is seen elsewhere; it is told again soon
            telling.cancel()
            logger.info("vLLM could not be told of its drafts: %s", error)
            return
        self._proposer = next(filter(None, answers), {})  # of all ranks, one drafts

    # on the loop's thread

    def _begin(self, request: GenerationRequest, sink: Sink) -> None:
        self._tasks[request.request_id] = self._loop.create_task(self._generate(request, sink))

    def _cancel(self, request_id: str) -> None:
        if task := self._tasks.get(request_id):
            self._loop.call_soon(task.cancel)  # behind its first step: a task that never ran would say nothing

    async def _end_all(self) -> None:
        tasks = [task for task in self._tasks.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine.output_handler is not None:  # it would take the end of vLLM's process for a failure
            self._engine.output_handler.cancel()

    async def _generate(self, request: GenerationRequest, sink: Sink) -> None:
        """Hands out a request's chunks, the last one whatever happens."""
        unsent = Unsent(request.request_id)
        reason, error = None, None
        flushed = 0.0
        try:
            prompt = {"prompt_token_ids": [*request.prompt, *request.resume_tokens], "cache_salt": request.salt.hex()}
            if not request.salt:
                del prompt["cache_salt"]
            async for output in self._engine.generate(prompt, sampling_params(request), request.request_id):
                (completion,) = output.outputs
                new = list(completion.token_ids)  # of a step, the last of them the target's own, or of several merged
                logprobs = chunk_logprobs(new, completion.logprobs, request.params.logprobs)
                unsent.add(new, max(0, len(new) - 1), logprobs)
                unsent.known = output.num_cached_tokens or 0
                reason = _FINISHES.get(completion.finish_reason) if completion.finish_reason is not None else None
                now = time.monotonic()
                if not output.finished and now - flushed >= self._flush_s:
                    flushed = now
                    sink(unsent.flush())
            reason = reason or "error"
        except asyncio.CancelledError:
            reason = "cancelled"
        except Exception:  # whatever it is, the client must be told; when vLLM has ended, others could go on with it
            logger.exception("a request failed in vLLM")
            reason = "error"
        if reason == "error":
            error = TARGET_FAILED if self._engine.errored else "vLLM gave the request up"
        with self._lock:
            del self._tasks[request.request_id]
            if not self._tasks:
                self._idle.set()
        sink(unsent.flush(reason, error))

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(arguments: dict[str, Any], counted: VllmCounts, placement: Placement) -> Any:
    """vLLM's engine, loaded. On the loop that it will run on; blocks that."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
    # As many threads as OMP_NUM_THREADS says, unless they are pinned.
    ranks = arguments["tensor_parallel_size"] * arguments.get("pipeline_parallel_size", 1)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding(placement.cores, ranks))
    from vllm import AsyncEngineArgs  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found,unused-ignore]

    if unknown := sorted(set(arguments) - set(AsyncEngineArgs.__dataclass_fields__)):
        raise ModelError(f"engine_args: vLLM has no argument {unknown[0]}")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda config, index: counted])


def binding(cores: Sequence[int], ranks: int) -> str:
    """How vLLM is told of cores: as many for each rank, ranks apart by bars; "nobind" where they are too few."""
    each = len(cores) // ranks
    shares = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)] if each else []
    return "|".join(",".join(map(str, share)) for share in shares) or "nobind"
