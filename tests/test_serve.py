"""Targets and drafts under Ray Serve: streams through a handle are those of plain decoding, whoever is killed."""

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

import pytest
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from benchmarks.server import get
from cluster.intake import Overloaded
from cluster.target_stats import TargetStats
from deployments import serve as serving
from deployments.app import INGRESS
from deployments.backend import ServeBackend
from deployments.config import ServeConfig
from deployments.serve import APPLICATION, DeployError, base_url
from deployments.service import ReplicaLost
from engine.decode import decode
from engine.runner import ModelRunner
from engine.types import GenerationRequest, InvalidRequest, TokenChunk
from tests import exact, served
from tests.cluster_fixtures import PATIENCE_S, until
from tests.served import QUEUE, TARGETS, deployed, make_config

pytestmark = pytest.mark.ray

STREAMS, TOKENS = 8, 32
MAX_BATCH = 4
T = TypeVar("T")
_ids = count()


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return make_config(max_batch=MAX_BATCH, kv_tokens=4096, flush_s=0)


@pytest.fixture(scope="module")
def _served(config: ServeConfig) -> Iterator[DeploymentHandle[Any]]:
    with deployed(config) as targets:
        yield targets


@pytest.fixture
def targets(_served: DeploymentHandle[Any]) -> Iterator[DeploymentHandle[Any]]:
    """The targets, audited after every test."""
    yield _served
    _served.broadcast("check", PATIENCE_S).results()


@pytest.fixture
def drafts(_served: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    return serve.get_deployment_handle("code-draft", APPLICATION)


Case = tuple[list[GenerationRequest], list[list[int]]]


@pytest.fixture
def case(target: ModelRunner) -> Case:
    """Requests, and what plain decoding gives for them."""
    prompts = [prompt[: 5 * index + 1] for index, prompt in enumerate(exact.load_prompts(STREAMS))]
    requests = exact.make_requests(prompts, 1.0, TOKENS)
    return requests, [generation.tokens for generation in decode(target, requests)]


def stats(handle: DeploymentHandle[Any]) -> list[Any]:
    """Of every replica."""
    return handle.broadcast("stats").results()


def pids(handle: DeploymentHandle[Any]) -> list[int]:
    """Of every replica that answers."""
    with suppress(RayActorError, DeploymentUnavailableError):
        return handle.broadcast("pid").results()
    return []


def renamed(request: GenerationRequest) -> GenerationRequest:
    return replace(request, request_id=f"request-{next(_ids)}")


async def tokens_of(chunks: AsyncGenerator[TokenChunk]) -> list[int]:
    held: list[int] = []
    async for chunk in chunks:
        held += chunk.tokens
        assert chunk.error is None
    return held


async def read(handle: DeploymentHandle[Any], request: GenerationRequest) -> list[int]:
    """The whole output, going on elsewhere whenever a replica is lost."""
    held = list(request.resume_tokens)
    while True:
        with suppress(ReplicaLost):
            async for chunk in ServeBackend(handle).generate(renamed(replace(request, resume_tokens=tuple(held)))):
                held += chunk.tokens
            return held


def read_all(handle: DeploymentHandle[Any], requests: list[GenerationRequest]) -> list[list[int]]:
    async def reads() -> list[list[int]]:
        return await asyncio.gather(*(read(handle, request) for request in requests))

    return run(reads())


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def longer(request: GenerationRequest, tokens: int) -> GenerationRequest:
    return renamed(replace(request, params=replace(request.params, max_tokens=tokens)))


def kill_ours(title: str) -> None:
    """Kills the process with this in its title, of those that this one's Ray has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    def titled(pid: int) -> bool:
        with suppress(OSError):
            return title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    (found,) = [pid for pid in parents if titled(pid) and ours(pid)]
    os.kill(found, signal.SIGKILL)


def linked(handle: DeploymentHandle[Any]) -> bool:
    """Whether every target has its draft."""
    with suppress(RayActorError, DeploymentUnavailableError):
        found: list[TargetStats] = stats(handle)
        return len(found) == TARGETS and all(each.drafts == 1 for each in found)
    return False


def test_the_application_answers_over_http(targets: DeploymentHandle[Any], config: ServeConfig) -> None:
    for path in ("health", "ready"):
        with urllib.request.urlopen(f"{base_url(config.http)}/{path}") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("given", [None, "of-mine.1"])
def test_every_answer_has_one_id(targets: DeploymentHandle[Any], config: ServeConfig, given: str | None) -> None:
    for path, found in (("v1/completions", 200), ("v1/nothing", 404)):
        body = json.dumps({"model": "code", "prompt": "x", "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json", **({"X-Request-Id": given} if given else {})}
        asked = urllib.request.Request(f"{base_url(config.http)}/{path}", body, headers)
        try:
            answer = urllib.request.urlopen(asked)
        except HTTPError as error:
            answer = error
        with answer:
            (known_by,) = answer.headers.get_all("X-Request-Id")
            assert (answer.status, given or known_by) == (found, known_by)
            if found == 200:
                assert json.load(answer)["id"] == f"cmpl-{known_by}"


def test_what_others_have_deployed_is_not_taken_away(
    targets: DeploymentHandle[Any], config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve ends every application that a new configuration doesn't name: here ours, for one of another name."""
    monkeypatch.setattr(serving, "APPLICATION", "another")
    with pytest.raises(DeployError, match="the cluster serves paceline by a configuration"):
        serving.prepare(config, lambda text: None)
    monkeypatch.setattr(serving, "_join", lambda address: False)
    monkeypatch.setattr(serving, "_let_interrupt", lambda: None)
    monkeypatch.setattr(serving, "withdraw", lambda config: pytest.fail("what was not deployed is taken back"))
    with pytest.raises(DeployError, match="the cluster serves paceline by a configuration"):
        serving.run_server(config, "there:6379", Console(quiet=True))
    assert list(serve.status().applications) == [APPLICATION]


def test_what_is_served_already_is_neither_replaced_nor_taken_back(
    targets: DeploymentHandle[Any], config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_join", lambda address: False)
    monkeypatch.setattr(serving, "_let_interrupt", lambda: None)
    monkeypatch.setattr(serving, "withdraw", lambda config: pytest.fail("another's application is taken back"))
    before = set(pids(targets))
    with pytest.raises(DeployError, match="the cluster serves models like this already"):
        serving.run_server(config, "there:6379", Console(quiet=True))
    assert set(pids(targets)) == before


def test_addresses_that_serve_would_not_take_are_told(
    targets: DeploymentHandle[Any], config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs already, and would leave its proxies where they are."""
    http = config.http.model_copy(update={"port": config.http.port + 1})
    grpc = config.grpc.model_copy(update={"port": None})
    monkeypatch.setattr(serving, "_deployed", dict)
    serving.prepare(config, lambda text: None)
    for changed, told in (({"http": http}, f"http.port is {config.http.port}"), ({"grpc": grpc}, "grpc.port is")):
        with pytest.raises(DeployError, match=told):
            serving.prepare(config.model_copy(update=changed), lambda text: None)


def test_streams_through_serve_equal_plain_decoding(targets: DeploymentHandle[Any], case: Case) -> None:
    requests, expected = case
    until(lambda: linked(targets), "every target finds its draft")
    assert read_all(targets, 2 * requests) == 2 * expected  # more than one target may have at a time
    until(lambda: sum(each.accepted for each in stats(targets)) > 0, "a draft token is accepted")
    assert all(each.requests > 0 for each in stats(targets)), "both targets had work"


def test_a_reader_that_goes_away_stops_the_work(targets: DeploymentHandle[Any], case: Case) -> None:
    request = longer(case[0][1], 900)

    async def look_at_some(close: Callable[[AsyncGenerator[TokenChunk]], Coroutine[Any, Any, None]]) -> int:
        """How many tokens were made at all."""
        before: list[TargetStats] = await targets.broadcast("stats").results_async()
        chunks = ServeBackend(targets).generate(renamed(request))
        await anext(chunks)
        await close(chunks)
        after: list[TargetStats] = await targets.broadcast("stats").results_async()
        while any(each.running for each in after):
            after = await targets.broadcast("stats").results_async()
        return sum(each.tokens for each in after) - sum(each.tokens for each in before)

    async def close(chunks: AsyncGenerator[TokenChunk]) -> None:
        await chunks.aclose()

    async def cancel_reader(chunks: AsyncGenerator[TokenChunk]) -> None:
        reader = asyncio.create_task(tokens_of(chunks))
        await asyncio.sleep(0.02)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    assert run(look_at_some(close)) < 900
    assert run(look_at_some(cancel_reader)) < 900


def test_a_bad_request_is_refused_by_name(targets: DeploymentHandle[Any], case: Case) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(tokens_of(ServeBackend(targets).generate(replace(case[0][0], prompt=()))))
    assert (type(caught.value), caught.value.param) == (InvalidRequest, "prompt")


def test_more_than_can_wait_is_refused_at_once(targets: DeploymentHandle[Any], case: Case) -> None:
    request = longer(case[0][1], 64)
    more_than_fit = TARGETS * 2 * MAX_BATCH + QUEUE + 30

    async def ask_all() -> list[list[int] | BaseException]:
        asked = (tokens_of(ServeBackend(targets).generate(renamed(request))) for _ in range(more_than_fit))
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = run(ask_all())
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert {(type(error), str(error)) for error in refused} == {(Overloaded, f"{QUEUE} requests are waiting already")}
    assert all(len(answer) == 64 for answer in answers if isinstance(answer, list))
    assert all(each.running == each.waiting == 0 for each in stats(targets))


def test_a_request_goes_on_when_its_target_is_killed(
    targets: DeploymentHandle[Any], target: ModelRunner, case: Case
) -> None:
    request = longer(case[0][2], 900)  # more than is read before the target is gone
    (whole,) = decode(target, [request])
    before = pids(targets)

    async def lose_it() -> list[int]:
        victims = await targets.broadcast("pid").results_async()
        chunks = ServeBackend(targets).generate(request)
        held = list((await anext(chunks)).tokens)
        found = await targets.broadcast("stats").results_async()
        os.kill(next(pid for pid, each in zip(victims, found, strict=True) if each.running), signal.SIGKILL)
        try:
            async for chunk in chunks:
                held += chunk.tokens
        except ReplicaLost:
            return held
        raise AssertionError("the stream did not break")

    held = run(lose_it())
    assert held == whole.tokens[: len(held)]
    assert run(read(targets, replace(request, resume_tokens=tuple(held)))) == whole.tokens
    until(lambda: len(pids(targets)) == TARGETS and pids(targets) != before, "Serve starts another target")


def test_streams_go_on_when_the_draft_is_killed_or_drained(
    targets: DeploymentHandle[Any], drafts: DeploymentHandle[Any], case: Case
) -> None:
    requests, expected = case

    async def read_while(event: Callable[[], Coroutine[Any, Any, None]]) -> list[list[int]]:
        readers = asyncio.gather(*(read(targets, request) for request in requests))
        await event()
        return await readers

    async def kill() -> None:
        os.kill((await drafts.broadcast("pid").results_async())[0], signal.SIGKILL)

    async def drain() -> None:
        with suppress(RayActorError, DeploymentUnavailableError):
            await drafts.broadcast("close").results_async()

    for event in (kill, drain):
        until(lambda: linked(targets), "every target finds its draft")
        before = pids(drafts)
        assert run(read_while(event)) == expected
        until(lambda: bool(pids(drafts)) and pids(drafts) != before, "Serve starts another draft")  # noqa: B023
    until(lambda: linked(targets), "every target finds its draft")


def test_clients_get_plain_decodings_streams_also_when_a_target_is_killed(
    targets: DeploymentHandle[Any], target: ModelRunner, config: ServeConfig
) -> None:
    requests = served.make_requests(exact.load_prompts(8), 0.8, 96)
    wrong = {case.name: case.run()[1] for case in served.compare(config, targets, target, requests)}
    assert len(wrong) == 4
    assert not any(wrong.values()), wrong


def test_a_target_stops_when_the_ingress_is_killed(
    targets: DeploymentHandle[Any], config: ServeConfig, case: Case
) -> None:
    before = sum(each.tokens for each in stats(targets))
    began = threading.Event()
    with ThreadPoolExecutor(1) as reader:
        stream = reader.submit(served.OverHttp(config).read, longer(case[0][1], 900), lambda said: began.set())
        assert began.wait(PATIENCE_S)
        kill_ours(f"ServeReplica:{APPLICATION}:{INGRESS}")
        until(lambda: all(each.running == 0 for each in stats(targets)), "the work of its streams ends")
        assert 0 < sum(each.tokens for each in stats(targets)) - before < 900
        assert stream.exception(PATIENCE_S) is not None, "the client is not told that all is well"
    until(lambda: get(f"{base_url(config.http)}/ready") is not None, "Serve starts another ingress")


def test_serving_goes_on_when_serves_controller_is_killed(
    targets: DeploymentHandle[Any], config: ServeConfig, target: ModelRunner
) -> None:
    first, second = served.make_requests(exact.load_prompts(2), 0.8, 400)
    first, second = (replace(each, params=replace(each.params, logprobs=0)) for each in (first, second))
    api = served.OverHttp(config)
    expected = [api.expected(generation).promised for generation in decode(target, [first, second])]
    began = threading.Event()
    with ThreadPoolExecutor(1) as reader:
        stream = reader.submit(api.read, first, lambda said: began.set())
        assert began.wait(PATIENCE_S)
        kill_ours("ServeController")
        assert api.read(second).promised == expected[1]
        assert stream.result().promised == expected[0]
    until(answers_again, "Serve's controller is there again")
    assert len(pids(targets)) == TARGETS


def test_another_configuration_is_rolled_out_without_a_gap(
    targets: DeploymentHandle[Any], target: ModelRunner, config: ServeConfig
) -> None:
    """Every target is started anew. What was begun before ends as it should, and others are answered meanwhile."""
    requests = served.make_requests(exact.load_prompts(2), 0.8, 600)
    first, second = (replace(each, params=replace(each.params, logprobs=0)) for each in requests)
    second = replace(second, params=replace(second.params, max_tokens=8))
    api = served.OverHttp(config)
    expected = [api.expected(generation).promised for generation in decode(target, [first, second])]
    before = set(pids(targets))
    changed = config.model_copy(update={"limits": config.limits.model_copy(update={"queue": QUEUE + 1})})
    began, done = threading.Event(), threading.Event()

    def ask_on() -> int:
        answers = 0
        while not done.is_set():
            assert api.read(second).promised == expected[1]
            answers += 1
        return answers

    with ThreadPoolExecutor(2) as readers:
        stream = readers.submit(api.read, first, lambda said: began.set())
        assert began.wait(PATIENCE_S)
        asking = readers.submit(ask_on)
        try:
            serving.deploy(serving.serve_schema(changed), lambda text: None)
            until(lambda: len(now := set(pids(targets))) == TARGETS and not before & now, "all targets are new ones")
        finally:
            done.set()
        assert stream.result().promised == expected[0]
        assert asking.result() > 0


def answers_again() -> bool:
    """Whether Serve says that the application runs."""
    with suppress(RayActorError, RayServeException):
        return serve.status().applications[APPLICATION].status == ApplicationStatus.RUNNING
    return False


def test_while_streams_end_the_server_refuses_in_its_own_words(
    targets: DeploymentHandle[Any], target: ModelRunner, config: ServeConfig
) -> None:
    """The last one here: nothing but taking the application back comes after draining."""
    (request,) = exact.make_requests(exact.load_prompts(1), 0.0, 400)
    request = replace(request, params=replace(request.params, logprobs=0))
    api = served.OverHttp(config)
    with ThreadPoolExecutor(1) as reader:
        stream = reader.submit(api.read, request)
        until(lambda: sum(each.running for each in stats(targets)) > 0, "the stream runs")
        assert serve.get_deployment_handle(INGRESS, APPLICATION).broadcast("drain").results() == [1]
        with pytest.raises(HTTPError) as refused:
            api.read(request)
        assert refused.value.code == 503
        assert refused.value.headers["Retry-After"]
        assert json.loads(refused.value.read())["error"]["code"] == "unavailable"
        with pytest.raises(HTTPError):
            urllib.request.urlopen(f"{base_url(config.http)}/ready")
        assert stream.result().promised == api.expected(*decode(target, [request])).promised
