"""Draft and targets on machines of their own, some of which are lost: no stream changes or ends.

One after the other, on one cluster: machines don't come back.
"""

import secrets
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.local import HEAD_LOSS_CHECKS, MACHINE_LOSS, SERVE_TRANSPORT
from deployments.config import ServeConfig
from deployments.config_load import parse_config
from deployments.serve import base_url
from engine.runner import ModelRunner
from engine.types import GenerationRequest
from tests import exact
from tests.cluster_fixtures import until
from tests.manifests import ROOT
from tests.nodes import GCS_PORT, Machine, Network, why_no_machines
from tests.served import MODEL, OverHttp, Said, parted

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]  # machines start slowly where others work as well

STREAMS, TOKENS = 8, 320
FIRST_TOKENS = 16  # that every stream has when a machine is lost
DRAFT_PORTS = set(range(26500, 26600))
KINDS = {"head": "ingress", "draft": "draft", "target-1": "target", "target-2": "target"}
# Far less than two minutes, after which Ray itself would notice; idle machines take 12 s at most.
LONGEST_SILENCE_S = 60.0


@dataclass
class Cluster:
    """A head with the ingress on it, a machine for the draft, and two for targets."""

    network: Network
    environment: Mapping[str, str]  # of Ray's processes
    logs: Path
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def head(self) -> Machine:
        """Where the application is deployed from, and clients go."""
        return self.machines["head"]

    @property
    def config(self) -> ServeConfig:
        """As clients see it."""
        return parse_config(settings(self.head.address))

    def add(self, name: str, kind: str) -> None:
        """Another machine, with room for one replica of a kind; the first one is the head, which deploys the application.

        One after the other: Ray gives each of them 30 s to start, which many at a time don't keep on few cores.
        """
        machine = self.machines[name] = self.network.add(name)
        machine.start_raylet(self.head, {kind: 1}, self.environment, self.logs)
        wait(lambda: machine.joined(self.logs), f"the raylet of {name} runs")
        if machine is self.head:
            self._serve()

    def _serve(self) -> None:
        """As a user would."""
        file = self.logs / "serve.yaml"
        file.write_text(yaml.safe_dump(settings("0.0.0.0")))
        command = (sys.executable, "-m", "deployments.cli", "serve", "--config", str(file))
        address = f"{self.head.address}:{GCS_PORT}"
        self.head.start((*command, "--address", address), self.logs / "serve.log", self.environment)

    def samples(self, name: str) -> list[float]:
        """The values of a measure, of all replicas; none while the registry is away."""
        with suppress(OSError), urllib.request.urlopen(f"{base_url(self.config.http)}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return [sample.value for each in families for sample in each.samples if sample.name == name]
        return []

    def ready(self) -> bool:
        """Whether it answers."""
        with suppress(OSError), urllib.request.urlopen(f"{base_url(self.config.http)}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    def lose(self, name: str) -> None:
        """A machine is gone."""
        self.network.lose(self.machines.pop(name))

    def idle(self) -> bool:
        """Whether nothing of a stream is left."""
        left = ("paceline_running", "paceline_queue", "paceline_draft_sessions", "paceline_streams")
        return bool(self.samples("paceline_running")) and not any(sum(self.samples(name)) for name in left)


def settings(host: str) -> dict[str, Any]:
    """The bundled pair in invariant mode, two targets and a draft, each where its kind is."""
    own = {"checkpoint": str(exact.TARGET), "dtype": "float32", "invariant": True, "max_batch": STREAMS}
    targets = {"replicas": {"resources": {"target": 1}}, "scaling": {"min_replicas": 2, "max_replicas": 2}}
    draft = {"checkpoint": str(exact.DRAFT), "dtype": "float32", "kv_tokens": 16384}
    one = {"replicas": {"resources": {"draft": 1}}, "scaling": {"ratio": 0.5}}
    model = {"name": MODEL, "target": {**own, "kv_tokens": 8192, **targets}, "draft": {**draft, **one}}
    return {"models": [model], "http": {"host": host, "resources": {"ingress": 1}}}


@pytest.fixture(scope="module")
def _starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Machines that start, and the application as `paceline serve --address` deploys it."""
    if reason := why_no_machines():
        pytest.skip(reason)
    logs = tmp_path_factory.mktemp("machines")
    ours = {**SERVE_TRANSPORT, **MACHINE_LOSS, **HEAD_LOSS_CHECKS}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Machines that share cores are slow; others do not go before their models.
    slow = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}
    environment = {**ours, **token, **slow, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Network() as network:
        cluster = Cluster(network, environment, logs)
        for name, kind in KINDS.items():
            cluster.add(name, kind)
        yield cluster


Case = tuple[list[GenerationRequest], list[Said]]


@pytest.fixture(scope="module")
def case(_starting: Cluster, _target: ModelRunner) -> Case:
    """Requests, greedy ones and seeded ones, and what clients should get for them; made while the machines start."""
    made = [
        request
        for temperature in (0.0, 0.8)
        for request in exact.make_requests(exact.load_prompts(STREAMS // 2), temperature, TOKENS)
    ]
    requests = [
        replace(request, request_id=str(index), params=replace(request.params, logprobs=0))
        for index, request in enumerate(made)
    ]
    api = OverHttp(_starting.config)
    return requests, [api.expected(generation) for generation in exact.run(_target, requests, batch=4)]


@pytest.fixture
def cluster(_starting: Cluster, case: Case) -> Iterator[Cluster]:
    """The cluster when it answers; after each test, nothing of its streams is left."""
    wait(_starting.ready, "the server answers")
    yield _starting
    wait(_starting.idle, "all streams are gone")


@pytest.fixture
def streams(cluster: Cluster, case: Case) -> "Streams":
    return Streams(OverHttp(cluster.config), *case)


def wait(condition: Callable[[], bool], what: str) -> None:
    """Asking costs a process or a request."""
    until(condition, what, patience_s=600.0, every_s=0.2)


@dataclass
class Streams:
    """Streams that are read at the same time."""

    api: OverHttp
    requests: Sequence[GenerationRequest]
    expected: Sequence[Said]
    tokens: list[int] = field(default_factory=lambda: [0] * STREAMS)  # that each has so far
    heard: list[float] = field(default_factory=lambda: [0.0] * STREAMS)  # when each had a token the last time
    silence_s: float = 0.0  # the longest of any of them
    _read: list[Future[Said]] = field(default_factory=list)

    def __enter__(self) -> "Streams":
        self._readers = ThreadPoolExecutor(STREAMS)
        self._read = [self._readers.submit(self._follow, index) for index in range(STREAMS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown()

    def begun(self) -> bool:
        """Whether all have some tokens, and none has all of them."""
        assert not any(each.done() for each in self._read), "a stream ended before anything happened"
        return min(self.tokens) >= FIRST_TOKENS

    def said(self) -> list[Said]:
        """All of them, when they have ended, which are as they should be."""
        said = [each.result() for each in self._read]
        assert list(parted(said, self.expected)) == []
        return said

    def _follow(self, index: int) -> Said:
        def heard(said: Said) -> None:
            now = time.monotonic()
            if self.heard[index]:
                self.silence_s = max(self.silence_s, now - self.heard[index])
            self.tokens[index], self.heard[index] = len(said.tokens), now

        return self.api.read(self.requests[index], heard)


def accepted(said: Sequence[Said]) -> int:
    return sum(each.accepted for each in said)


def linked(cluster: Cluster, targets: int) -> bool:
    """Whether there are so many targets, and each has its draft."""
    return cluster.samples("paceline_drafts") == targets * [1.0]


def test_the_draft_is_reached_at_another_address_and_helps(cluster: Cluster, streams: Streams) -> None:
    wait(lambda: linked(cluster, 2), "both targets have the draft")
    with streams:
        assert accepted(streams.said()) > 0
    draft = cluster.machines["draft"]
    assert draft.runs(f"ServeReplica:paceline:{MODEL}-draft")
    for name in ("target-1", "target-2"):
        target = cluster.machines[name]
        assert target.runs(f"ServeReplica:paceline:{MODEL}-target")
        assert target.ports_at(draft.address) & DRAFT_PORTS, f"{name} has no link to {draft.address}"


def test_streams_go_on_unchanged_when_the_drafts_machine_is_lost(cluster: Cluster, streams: Streams) -> None:
    with streams:
        until(streams.begun, "all streams have tokens")
        cluster.lose("draft")
        assert sum(each.resumed for each in streams.said()) == 0
    assert streams.silence_s < LONGEST_SILENCE_S


def test_no_stream_is_changed_or_lost_when_a_targets_machine_is(cluster: Cluster, streams: Streams) -> None:
    with streams:
        until(streams.begun, "all streams have tokens")
        cluster.lose("target-1")
        assert sum(each.resumed for each in streams.said()) > 0
    assert streams.silence_s < LONGEST_SILENCE_S


def test_another_machine_takes_the_drafts_place(cluster: Cluster, streams: Streams) -> None:
    cluster.add("another", "draft")
    wait(lambda: linked(cluster, 1), "the target that is left has a draft")
    with streams:
        assert accepted(streams.said()) > 0
