"""Targets and drafts as Ray actors: whoever is killed, the tokens are those of plain decoding."""

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from cluster import actors as actors_module
from cluster import chunk_queue
from cluster.actors import TargetActor, TargetConfig, works
from cluster.draft import DraftReplica, DraftStats
from cluster.drafters import DraftConfig
from cluster.intake import Sink
from cluster.local import LocalCluster
from cluster.target import TargetReplica
from cluster.target_stats import TargetStats
from engine.decode import decode
from engine.drafters.retrieval import Documents
from engine.runner import ModelRunner
from engine.types import GenerationRequest, InvalidRequest, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, GuessingDrafter, until

pytestmark = pytest.mark.ray

KILLS = 5
STREAMS = 8
TOKENS = 32
TARGET = TargetConfig(exact.TARGET, dtype="float32", invariant=True, kv_tokens=4096, flush_s=0.0, places=("separate",))
DRAFT = DraftConfig(exact.DRAFT, dtype="float32", kv_tokens=8192)
_ids = count()


@pytest.fixture(scope="module")
def _single() -> Iterator[LocalCluster]:
    with LocalCluster(TARGET, DRAFT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _double(_single: LocalCluster) -> Iterator[LocalCluster]:
    """Beside the other, since Ray runs once a process."""
    with LocalCluster(TARGET, DRAFT, targets=2, drafts=2) as cluster:
        yield cluster


@pytest.fixture
def single(_single: LocalCluster) -> Iterator[LocalCluster]:
    """One target and one draft, audited after every test."""
    yield _single
    audit(_single)


@pytest.fixture
def double(_double: LocalCluster) -> Iterator[LocalCluster]:
    """Two targets and two drafts, audited after every test."""
    yield _double
    audit(_double)


@pytest.fixture(scope="module")
def _plain() -> dict[float, list[list[int]]]:
    return {}


Case = tuple[list[GenerationRequest], list[list[int]]]


@pytest.fixture
def case(target: ModelRunner, _plain: dict[float, list[list[int]]]) -> Callable[[float], Case]:
    """Requests, and what plain decoding gives for them."""
    prompts = [prompt[: 5 * index + 1] for index, prompt in enumerate(exact.load_prompts(STREAMS))]

    def make(temperature: float) -> Case:
        requests = exact.make_requests(prompts, temperature, TOKENS)
        if temperature not in _plain:
            _plain[temperature] = [generation.tokens for generation in decode(target, requests)]
        return requests, _plain[temperature]

    return make


def audit(cluster: LocalCluster) -> None:
    """Nothing is left anywhere."""
    ray.get([actor.check.remote(PATIENCE_S) for actor in [*cluster.targets, *cluster.drafts]])


def stats(cluster: LocalCluster, target: int = 0) -> TargetStats:
    found: TargetStats = ray.get(cluster.targets[target].stats.remote())
    return found


def read(cluster: LocalCluster, request: GenerationRequest, target: int = 0) -> list[int]:
    """The whole output, under an id of its own."""
    chunks = list(cluster.stream(replace(request, request_id=f"request-{next(_ids)}"), target))
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    return [token for chunk in chunks for token in chunk.tokens]


def reads(cluster: LocalCluster, request: GenerationRequest, expected: list[int]) -> bool:
    """Reads a stream, for those who wait for something to happen in one: False."""
    assert read(cluster, request) == expected
    return False


def read_all(cluster: LocalCluster, requests: Sequence[GenerationRequest], target: int = 0) -> list[list[int]]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: read(cluster, request, target), requests))


class Readers:
    """Streams without pause, each of which must be as expected."""

    def __init__(self, cluster: LocalCluster, case: Case) -> None:
        self._cluster = cluster
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(STREAMS)
        self._done: list[Future[int]] = [self._pool.submit(self._read, *pair) for pair in zip(*case, strict=True)]

    def stop(self) -> int:
        """How many streams were read."""
        self._enough.set()
        self._pool.shutdown()
        return sum(done.result() for done in self._done)

    def _read(self, request: GenerationRequest, expected: list[int]) -> int:
        for finished in count():
            if self._enough.is_set():
                return finished
            assert read(self._cluster, request) == expected
        raise AssertionError


def kill(actor: Any, *, with_signal: signal.Signals = signal.SIGKILL) -> int:
    """Signals an actor's process; its id."""
    pid: int = ray.get(actor.pid.remote())
    os.kill(pid, with_signal)
    return pid


def lives_again(actor: Any, killed: int) -> bool:
    """Whether Ray has started the actor anew."""
    with suppress(RayActorError):
        return bool(ray.get(actor.pid.remote()) != killed)
    return False


def until_replaced(actor: Any, killed: int) -> None:
    until(lambda: lives_again(actor, killed), "Ray starts another actor")


def until_noticed(cluster: LocalCluster, killed: int) -> None:
    """The target has missed its draft, if only until the next one came."""
    until(lambda: stats(cluster).drafts == 0 or lives_again(cluster.drafts[0], killed), "the target notices")


def until_hits_rise(cluster: LocalCluster) -> None:
    before = stats(cluster).hits
    until(lambda: stats(cluster).hits > before + 10, "the mirrors hold what comes next")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_equal_plain_decoding(single: LocalCluster, case: Callable[[float], Case], temperature: float) -> None:
    requests, expected = case(temperature)
    assert read_all(single, requests) == expected
    until(lambda: stats(single).accepted > 0 or reads(single, requests[0], expected[0]), "a draft token is accepted")


def test_closing_a_stream_cancels_its_request(single: LocalCluster, case: Callable[[float], Case]) -> None:
    requests, expected = case(1.0)
    streams = [single.stream(replace(request, request_id=f"request-{next(_ids)}")) for request in requests]
    for stream, tokens in zip(streams, expected, strict=True):
        first = next(stream).tokens
        assert first == tuple(tokens[: len(first)])
        stream.close()
    audit(single)
    assert stats(single).running == stats(single).waiting == 0
    assert read(single, requests[0]) == expected[0]


def test_a_bad_request_is_refused_by_name(single: LocalCluster, case: Callable[[float], Case]) -> None:
    request = replace(case(0.0)[0][0], prompt=())
    with pytest.raises(InvalidRequest, match="prompt: must not be empty"):
        list(single.stream(request))
    copy = pickle.loads(pickle.dumps(InvalidRequest("prompt", "is odd")))
    assert (copy.param, copy.message, str(copy)) == ("prompt", "is odd", "prompt: is odd")


def test_a_reader_that_falls_behind_loses_its_stream_alone(
    target: ModelRunner, case: Callable[[float], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_queue, "MAX_CHUNKS", 3)
    requests, expected = case(1.0)
    request = replace(requests[0], params=replace(requests[0].params, max_tokens=200))
    replica = TargetReplica(target, exact.goodput())
    actor = TargetActor.__new__(TargetActor)  # without Ray
    actor._replica = replica

    async def read_late() -> list[TokenChunk]:
        stream = actor.generate(request)
        first = await anext(stream)
        assert await asyncio.to_thread(replica.wait_idle, PATIENCE_S)
        return [first, *[chunk async for chunk in stream]]

    *chunks, last = asyncio.run(read_late())
    assert (last.finish_reason, last.error, last.tokens) == ("error", "the reader fell behind", ())
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert 3 <= len(tokens) < 200
    assert tokens[:TOKENS] == expected[0][: len(tokens)]
    replica.check()
    replica.close()


def test_who_leaves_while_documents_are_read_leaves_nothing_behind(
    target: ModelRunner, case: Callable[[float], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, _ = case(0.0)
    replica = TargetReplica(target, exact.goodput())
    actor = TargetActor.__new__(TargetActor)  # without Ray
    actor._replica = replica
    reading, left, submitted = threading.Event(), threading.Event(), threading.Event()
    read, submit = Documents.__init__, replica.submit

    def read_slowly(self: Documents, texts: Sequence[Sequence[int]]) -> None:
        reading.set()
        assert left.wait(PATIENCE_S)
        read(self, texts)

    def submit_and_say(request: GenerationRequest, sink: Sink) -> None:
        submit(request, sink)
        submitted.set()

    monkeypatch.setattr(Documents, "__init__", read_slowly)
    monkeypatch.setattr(replica, "submit", submit_and_say)

    async def leave() -> None:
        long = replace(requests[0].params, max_tokens=900)
        stream = actor.generate(replace(requests[0], params=long, documents=((1, 2, 3),)))
        asking = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(reading.wait, PATIENCE_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left.set()
        assert await asyncio.to_thread(submitted.wait, PATIENCE_S)
        assert await asyncio.to_thread(replica.wait_idle, PATIENCE_S)

    asyncio.run(leave())
    assert replica.stats().tokens < 900
    replica.check()
    replica.close()


def test_a_draft_killed_again_and_again_changes_nothing(single: LocalCluster, case: Callable[[float], Case]) -> None:
    readers = Readers(single, case(1.0))
    attached = stats(single).link["attached"]
    for index in range(KILLS):
        until_hits_rise(single)
        pid = kill(single.drafts[0])
        until_noticed(single, pid)
        if index == 1:
            ray.kill(single.registry, no_restart=False)
        until_replaced(single.drafts[0], pid)
        single.wait_linked(1)
    until_hits_rise(single)
    assert readers.stop() >= STREAMS
    assert stats(single).link["attached"] - attached > KILLS


def test_a_frozen_draft_is_noticed_and_found_again(single: LocalCluster, case: Callable[[float], Case]) -> None:
    readers = Readers(single, case(1.0))
    until_hits_rise(single)
    pid = kill(single.drafts[0], with_signal=signal.SIGSTOP)
    try:
        until(lambda: stats(single).drafts == 0, "the target notices")
    finally:
        os.kill(pid, signal.SIGCONT)
    single.wait_linked(1)
    until_hits_rise(single)
    assert readers.stop() >= STREAMS


def test_a_draft_that_hangs_while_its_server_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor ends itself then, and Ray starts another."""
    monkeypatch.setattr(actors_module, "_STUCK_S", 0.02)
    go_on = threading.Event()

    class HangingDrafter(GuessingDrafter):
        def grow(self) -> list[int]:
            go_on.wait(PATIENCE_S)
            return []

    replica = DraftReplica(HangingDrafter())
    until(lambda: not works(replica), "the hanging turn shows")
    assert replica.alive
    go_on.set()
    until(lambda: works(replica), "the turn ended")
    replica.close()
    assert not works(replica)


def test_speculation_can_be_switched_off_and_on(single: LocalCluster, case: Callable[[float], Case]) -> None:
    requests, expected = case(0.0)
    (target,) = single.targets
    ray.get(target.set_speculation.remote(False))
    before = stats(single)
    assert before.drafts == 0
    assert read_all(single, requests[:2]) == expected[:2]
    assert stats(single).verified == before.verified
    ray.get(target.set_speculation.remote(True))
    ray.get(target.set_window.remote("chain", 4))
    until(
        lambda: stats(single).verified > before.verified or reads(single, requests[0], expected[0]),
        "draft tokens are verified",
    )
    ray.get(target.set_window.remote("goodput", 31))


def test_several_targets_share_several_drafts(double: LocalCluster, case: Callable[[float], Case]) -> None:
    requests, expected = case(1.0)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda target: read_all(double, requests, target), range(2)))
    assert outputs == [expected, expected]

    def helped() -> list[DraftStats]:
        found: list[DraftStats] = ray.get([draft.stats.remote() for draft in double.drafts])
        return found

    def helped_again() -> bool:
        assert read_all(double, requests) == expected
        return all(each.steps for each in helped())

    assert [each.streams for each in helped()] == [2, 2]
    until(lambda: all(each.steps for each in helped()) or helped_again(), "both drafts take part")


def test_a_request_resumes_on_another_target(
    double: LocalCluster, target: ModelRunner, case: Callable[[float], Case]
) -> None:
    requests, expected = case(1.0)
    params = replace(requests[0].params, max_tokens=300)  # more than is read before the target is gone
    request = replace(requests[0], request_id=f"request-{next(_ids)}", params=params)
    (whole,) = decode(target, [request])
    pid: int = ray.get(double.targets[0].pid.remote())
    stream = double.stream(request)
    held = list(next(stream).tokens)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError):
        held.extend(token for chunk in stream for token in chunk.tokens)
    assert held == whole.tokens[: len(held)]
    assert held + read(double, replace(request, resume_tokens=tuple(held)), target=1) == whole.tokens
    until_replaced(double.targets[0], pid)
    double.wait_linked(2)
    assert read(double, requests[1]) == expected[1]
