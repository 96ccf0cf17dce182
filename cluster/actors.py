"""The plain replicas as Ray actors: loading, announcing, attaching. Ray starts, places and restarts them."""

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import ray
import torch

from cluster.best_place import PLACES, Place
from cluster.chunk_queue import ChunkQueue
from cluster.draft import DraftReplica, DraftStats
from cluster.drafters import DraftConfig, LocalConfig, make_drafter, make_local, make_shared
from cluster.engines import DraftLinks, Links, Target
from cluster.grpc_server import DraftServer
from cluster.link import LinkError
from cluster.measures import Sample
from cluster.own_guesses import LocalDrafter
from cluster.placement import Placement
from cluster.registry import DraftEntry, RegistryName
from cluster.reports import DraftReport, Reporter, TargetReport
from cluster.speculate import LinkOptions
from cluster.target import TargetReplica
from cluster.target_stats import TargetStats
from cluster.trace import Span
from cluster.vllm_options import VllmOptions
from cluster.vllm_target import VllmTarget
from cluster.warm import warm_up, warm_up_drafter
from engine.automatic import SHARED
from engine.budget import CostModel
from engine.checkpoint import ModelError
from engine.drafters.retrieval import Documents, RetrievalDrafter
from engine.kv import PoolExhausted
from engine.runner import Dtype, ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, TokenChunk
from engine.window_choice import NamedWindows, WindowName, make_window

logger = logging.getLogger(__name__)
_ANNOUNCE_EVERY_S = 1.0
_LOOK_EVERY_S = 1.0  # for drafts, while nothing changes: each look takes 2 ms of three processes
_LOOK_SOON_S = 0.25  # ... and while there are none, or others than before
_RELINK_S = 10.0  # for a first draft, once there is to be one again
_ANSWERS_S = 10.0  # a registry that takes longer hangs: who asks it watches a replica, too
_WITHDRAW_TIMEOUT_S = 2.0
_STUCK_S = 60.0  # a turn of a replica's loop that takes longer will never end
_LAST_WORDS_S = 0.5  # for the errors that end a failed replica's streams


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """How a target replica runs."""

    model: Path
    dtype: Dtype = "auto"
    invariant: bool = False
    kv_tokens: int = 32768
    max_batch: int = 64
    window: WindowName = "goodput"
    window_size: int = 31  # draft tokens per step, at most, of each sequence; goodput: of all, see there
    lookup: int = 8  # tokens looked up after each step, which drafts can't be faster with; 0: none
    flush_s: float = 0.05  # tokens are handed out at most this often: each chunk goes through Ray
    compile: bool = False  # the model, by torch.compile
    served_as: str = ""  # its model's name in metrics; none: the checkpoint's
    local: LocalConfig = field(default_factory=LocalConfig)  # the drafter in its own process
    vllm: VllmOptions | None = None  # it runs the model, with its dtype, max_batch and flush_s; None: our own engine
    earlier: int = SHARED  # our own engine: tokens of outputs that have ended in which is looked up too; 0: none
    draft: DraftConfig | None = None  # our own engine: for "shared" among the places, which needs it
    places: tuple[Place, ...] = PLACES  # our own engine: where drafts may run; see cluster.best_place


class TargetActor:
    """A target replica in its own process; it looks for drafts by itself."""

    def __init__(self, config: TargetConfig, placement: Placement, registry: RegistryName, index: int = 0) -> None:
        """index: of this replica among those of its model. Raises ModelError."""
        placement.check()
        placement.apply_to_process()
        self._replica: Target
        self._links: Links
        self._cost = CostModel()
        if config.vllm is not None:
            self._replica = self._links = VllmTarget(
                config.model, config.dtype, config.max_batch, config.flush_s, config.vllm, placement
            )
        else:
            self._replica, self._cost = own_target(config, placement, index)
            self._links = DraftLinks(self._replica, placement)
        self._registry = registry.open()
        self._speculate = True
        self._closing = threading.Event()
        threading.Thread(target=self._keep_linked, name="paceline-links", daemon=True).start()
        self._report = TargetReport(self._replica, linked="separate" in config.places)
        name = config.served_as or config.model.name
        self._reporter = Reporter(self._registry, name, f"target-{uuid.uuid4().hex[:12]}", self._measure)

    async def generate(self, request: GenerationRequest, sign_s: float | None = None) -> AsyncIterator[TokenChunk]:
        """Streams a request's chunks. When the reader goes away, the work stops within a step.

        sign_s: empty chunks as signs of life, one at the beginning and one whenever nothing came for so long: without
        them, a machine that is lost looks like one that is busy. Raises InvalidRequest, Overloaded or Closed.
        """
        chunks = ChunkQueue(lambda: self._replica.cancel(request.request_id))
        if request.params.grammar is not None:
            await asyncio.to_thread(self._replica.check_request, request)  # compiles it, which others need not wait for
        if request.documents:
            await self._submit_aside(request, chunks)  # makes an index of them
        else:
            self._replica.submit(request, chunks.put)
        finished = False
        sign = TokenChunk(request.request_id, (), ())
        try:
            if sign_s is not None:
                yield sign
            while not finished:
                chunk = await _next(chunks, sign_s) or sign
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                self._replica.cancel(request.request_id)

    async def _submit_aside(self, request: GenerationRequest, chunks: ChunkQueue) -> None:
        """Submits on another thread. It can't be stopped there: where nobody waits any more, the request ends after it."""
        submitting = asyncio.create_task(asyncio.to_thread(self._replica.submit, request, chunks.put))

        def give_up(done: "asyncio.Task[None]") -> None:
            if done.cancelled() or done.exception() is None:  # what it was refused for, nobody wants to know
                self._replica.cancel(request.request_id)

        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(give_up)
            raise

    async def cancel(self, request_id: str) -> None:
        """Ends a request within one step."""
        self._replica.cancel(request_id)

    async def stats(self) -> TargetStats:
        """What the replica did so far."""
        return self._replica.stats()

    async def set_window(self, name: WindowName, size: int) -> None:
        """Another window from the next step on, for requests that name none."""
        self._replica.set_window(make_window(name, size, self._cost))

    async def set_speculation(self, on: bool) -> None:
        """Drops all links and makes no more (the target decodes alone), or goes back to using drafts and lookups.

        Drafts that don't come within seconds are not waited for.
        """
        self._speculate = on
        self._replica.set_speculation(on)
        if on:
            await self.wait_linked(1, _RELINK_S)
        else:
            while self._replica.stats().drafts:
                await asyncio.sleep(0.01)

    async def wait_linked(self, drafts: int, timeout_s: float) -> bool:
        """Waits until this many drafts are linked: True; False after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._replica.stats().drafts < drafts:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def check(self, timeout_s: float = 10.0) -> None:
        """Audits the replica once it is idle; raises AssertionError."""
        assert await asyncio.to_thread(self._replica.wait_idle, timeout_s), "the target did not become idle"
        await asyncio.to_thread(self._replica.check)

    async def trace(self, on: bool) -> list[Span]:
        """Switches tracing; the spans recorded so far."""
        self._replica.trace.on = on
        return self._replica.trace.take()

    async def pid(self) -> int:
        """Of this actor's process."""
        return os.getpid()

    def _measure(self) -> list[Sample]:
        """For the reporter: what it counted, and how long the links take."""
        return self._report(self._links.round_trips_s())

    def close(self) -> None:
        """Ends all requests and links, and the loop."""
        self._closing.set()
        self._reporter.stop()
        self._replica.close()

    def _keep_linked(self) -> None:
        """Attaches to every live draft, again and again, as long as the replica runs."""
        known: set[str] = set()
        while works(self._replica) and not self._closing.is_set():
            before = known
            try:
                if self._speculate:
                    known = self._link_to_new(before)
                else:
                    self._links.follow(None)
            except Exception:  # whatever it is: who watches the replica must not end before it
                logger.exception("drafts could not be linked")
            self._closing.wait(_LOOK_EVERY_S if known and known == before else _LOOK_SOON_S)
        if not self._closing.is_set():
            _give_up()

    def _link_to_new(self, known: set[str]) -> set[str]:
        """The names of the drafts there are."""
        try:
            entries: list[DraftEntry] = ray.get(self._registry.drafts.remote(), timeout=_ANSWERS_S)
        except ray.exceptions.RayError:
            return known  # the registry restarts, or hangs; links that stand need it not
        self._links.follow([entry.address for entry in entries])
        return {entry.name for entry in entries}


def own_target(config: TargetConfig, placement: Placement, index: int) -> tuple[TargetReplica, CostModel]:
    """A target replica with our own engine, warmed up; what its steps cost, as it learns it. Raises ModelError."""
    runner = ModelRunner(
        config.model,
        kv_tokens=config.kv_tokens,
        dtype=config.dtype,
        device=placement.device,
        invariant=config.invariant,
        compile=config.compile,
    )
    cost = CostModel(runner.called_with)
    warm_up(runner, cost)
    warm_up_drafter(RetrievalDrafter(Documents([[0, 0]])))  # for requests that come with documents
    tokenizer = load_tokenizer(config.model)
    shared = _shared(config, placement, cost)
    replica = TargetReplica(
        runner,
        make_window(config.window, config.window_size, cost),
        tokenizer,
        placement,
        replica=index + 1,
        max_batch=config.max_batch,
        flush_s=config.flush_s,
        lookup=config.lookup,
        on_step=cost.observe,
        local=make_local(config.local, runner, tokenizer),
        named=NamedWindows(cost, config.window_size, config.window),
        shared=shared,
        earlier=config.earlier,
        places=config.places,
    )
    return replica, cost


def _shared(config: TargetConfig, placement: Placement, cost: CostModel) -> LocalDrafter | None:
    """The draft in the target's process, if it is to have one there; raises ModelError if it can be nowhere else."""
    if config.draft is None or "shared" not in config.places:
        return None
    try:
        return make_shared(config.draft, placement, cost.again(), config.window_size)
    except (ModelError, PoolExhausted, torch.OutOfMemoryError) as error:
        if "separate" not in config.places:
            raise
        logger.warning("the draft runs in replicas of its own only: %s", error)
        return None


async def _next(chunks: ChunkQueue, timeout_s: float | None) -> TokenChunk | None:
    """The next chunk; None when it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await chunks.get()
    except TimeoutError:
        return None


class DraftActor:
    """A draft replica in its own process; it serves DraftService and announces itself."""

    def __init__(self, config: DraftConfig, placement: Placement, registry: RegistryName) -> None:
        """Raises ModelError, or LinkError when no port can be had."""
        placement.check()
        placement.apply_to_process()
        self._registry = registry.open()
        self._replica = DraftReplica(make_drafter(config, placement), placement)
        self._server = _serve(config, placement, self._replica)
        self._name = f"draft-{uuid.uuid4().hex[:12]}"
        self._closing = threading.Event()
        self._announcing = threading.Thread(target=self._keep_announced, name="paceline-announce", daemon=True)
        self._announcing.start()
        self._reporter = Reporter(self._registry, config.name, self._name, DraftReport(self._replica.stats))

    async def stats(self) -> DraftStats:
        """What the replica did so far."""
        return self._replica.stats()

    async def check(self, timeout_s: float = 10.0) -> None:
        """Audits the replica once it holds no session; raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while self._replica.stats().sessions:
            assert time.monotonic() < deadline, "a session is left behind"
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(self._replica.wait_idle, timeout_s), "the draft did not become idle"
        await asyncio.to_thread(self._replica.check)

    async def trace(self, on: bool) -> list[Span]:
        """Switches tracing; the spans recorded so far."""
        self._replica.trace.on = on
        return self._replica.trace.take()

    async def pid(self) -> int:
        """Of this actor's process."""
        return os.getpid()

    def close(self) -> None:
        """Hands its sessions back: no target finds it any more, those that are linked turn to other drafts."""
        self._closing.set()
        self._reporter.stop()
        self._announcing.join()  # or it would announce itself behind its withdrawal
        with suppress(ray.exceptions.RayError):  # without a registry, its lease runs out
            ray.get(self._registry.withdraw.remote(self._name), timeout=_WITHDRAW_TIMEOUT_S)
        self._replica.close()
        self._server.stop()

    def _keep_announced(self) -> None:
        while works(self._replica) and not self._closing.is_set():
            try:
                entry = DraftEntry(self._name, self._server.address)
                self._registry.announce.remote(entry)
            except Exception:  # whatever it is: who watches the replica must not end before it
                logger.exception("the draft could not be announced")
            self._closing.wait(_ANNOUNCE_EVERY_S)
        if not self._closing.is_set():
            _give_up()


def _serve(config: DraftConfig, placement: Placement, replica: DraftReplica) -> DraftServer:
    """A server for a draft, on the first port that is free; raises LinkError."""
    options = LinkOptions(cores=placement.cores)
    host: str = config.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    first, last = config.ports
    for port in range(first, last):
        with suppress(LinkError):
            return DraftServer(host, port, replica.add_link, options)
    return DraftServer(host, last, replica.add_link, options)


def works(replica: Target | DraftReplica) -> bool:
    """Whether a replica neither failed nor hangs."""
    return replica.alive and replica.turn_s < _STUCK_S


def _give_up() -> NoReturn:
    """Ends the process of a replica that failed or hangs, so that Ray starts another."""
    time.sleep(_LAST_WORDS_S)
    os._exit(1)
