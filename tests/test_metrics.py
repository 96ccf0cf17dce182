"""Metrics: real numbers after real requests, under the names that tools read; replicas that are gone leave."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast

from benchmarks.server import get
from cluster import registry as registry_module
from cluster.actors import TargetConfig
from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig
from cluster.intake import Overloaded
from cluster.link import memory_link
from cluster.local import LocalCluster
from cluster.measures import MEASURES, Sample
from cluster.registry import LEASE_S, Registry
from cluster.reports import DraftReport, RayExport, TargetReport
from cluster.target import TargetReplica
from deployments.metrics import (
    BETWEEN_TOKENS,
    Latencies,
    MeasuredService,
    Reports,
    gather_reports,
    make_metrics_router,
    render,
)
from deployments.service import DeadlineExceeded, Piece, ServedModel
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.types import GenerationRequest, InvalidRequest, SamplingParams
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.http_fixtures import Hanging, Refusing
from tests.local_backend import LocalBackend

ROOT = Path(__file__).parent.parent
TOKENS = 40
Values = dict[tuple[str, str], float]  # by name and replica


@pytest.fixture
def pair(target: ModelRunner, draft: ModelRunner) -> Iterator[tuple[TargetReplica, DraftReplica]]:
    drafting = DraftReplica(ModelDrafter(draft))
    replica = TargetReplica(target, exact.goodput())
    ours, theirs = memory_link()
    replica.add_link(ours)
    drafting.add_link(theirs)
    yield replica, drafting
    replica.close()
    drafting.close()


@pytest.fixture
def model(pair: tuple[TargetReplica, DraftReplica], tokenizer: PreTrainedTokenizerFast) -> ServedModel:
    backend = LocalBackend(pair[0])
    return ServedModel(
        name="code", tokenizer=tokenizer, context=1024, vocab_size=4096, fingerprint="", created=0, backend=backend
    )


def run(model: ServedModel, latencies: Latencies, tokens: int = TOKENS, upto: int | None = None) -> list[Piece]:
    """The first pieces of an output, all without `upto`."""

    async def read() -> list[Piece]:
        request = GenerationRequest(
            f"r{time.monotonic_ns()}", exact.load_prompts(1)[0], SamplingParams(max_tokens=tokens)
        )
        pieces: list[Piece] = []
        async with aclosing(MeasuredService({"code": latencies}).run(model, request)) as stream:
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) == upto:
                    break
        return pieces

    return asyncio.run(read())


def speculate(replica: TargetReplica, model: ServedModel) -> int:
    """Runs requests until most steps verify draft tokens: the draft's first word may come after a short request's last.

    Returns how many.
    """
    deadline, requests = time.monotonic() + PATIENCE_S, 0
    while True:
        run(model, Latencies())
        assert replica.wait_idle(PATIENCE_S)
        requests, stats = requests + 1, replica.stats()
        if stats.verified > stats.sequence_steps and stats.accepted > 0:
            return requests
        assert time.monotonic() < deadline, f"hardly anything is verified: {stats}"


def parsed(text: str) -> Values:
    """Every sample of a Prometheus answer, added up over the labels beside model and replica."""
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels["replica"]
            values[key] = values.get(key, 0.0) + sample.value
    return values


def shown(**replicas: list[Sample]) -> Values:
    return parsed(render({"code": replicas}).decode())


def test_what_a_target_and_a_draft_did_is_told(pair: tuple[TargetReplica, DraftReplica], model: ServedModel) -> None:
    replica, drafting = pair
    report = TargetReport(replica)
    before = shown(t=report([0.25, 0.5]), d=DraftReport(drafting.stats)())
    requests = speculate(replica, model)
    stats = replica.stats()
    after = shown(t=report(), d=DraftReport(drafting.stats)())
    assert before["paceline_link_round_trip_seconds", "t"] == 0.5
    assert before["paceline_tokens_total", "t"] == 0
    assert after["paceline_tokens_total", "t"] == TOKENS * requests == stats.tokens
    assert after["paceline_hit_rate", "t"] == stats.hits / stats.sequence_steps
    assert after["paceline_window", "t"] == stats.verified / stats.sequence_steps > 1
    assert 0 < after["paceline_idle", "t"] < 1
    assert after["paceline_running", "t"] == after["paceline_queue", "t"] == after["paceline_pages_used", "t"] == 0
    assert after["vllm:num_requests_running", "t"] == after["vllm:kv_cache_usage_perc", "t"] == 0
    assert after["paceline_pages", "t"] > 0
    assert after["paceline_draft_steps_total", "d"] > 0
    assert 0 < after["paceline_draft_busy_share", "d"] <= 1
    assert after["vllm:spec_decode_num_drafts_total", "t"] + stats.empty == stats.sequence_steps
    assert after["vllm:spec_decode_num_draft_tokens_total", "t"] == stats.verified
    assert after["vllm:spec_decode_num_accepted_tokens_total", "t"] == stats.accepted > 0
    assert after["vllm:spec_decode_num_accepted_tokens_per_pos_total", "t"] == stats.accepted


def test_places_in_the_path_are_counted_from_the_root(
    pair: tuple[TargetReplica, DraftReplica], model: ServedModel
) -> None:
    speculate(pair[0], model)
    counts = pair[0].accepted_at()
    assert counts == sorted(counts, reverse=True)
    assert 0 < counts[0] <= pair[0].stats().drafted


def test_counters_never_fall_while_a_replica_lives(
    pair: tuple[TargetReplica, DraftReplica], model: ServedModel
) -> None:
    report = TargetReport(pair[0])
    before = shown(t=report())
    for _ in range(3):
        run(model, Latencies(), tokens=12)
        after = shown(t=report())
        fallen = [key for key, value in before.items() if key[0].endswith("_total") and after[key] < value]
        assert not fallen
        before = after


def test_every_measure_has_a_name_that_prometheus_takes(
    pair: tuple[TargetReplica, DraftReplica], model: ServedModel
) -> None:
    latencies = Latencies()
    run(model, latencies)
    samples = [*TargetReport(pair[0])([0.1]), *DraftReport(pair[1].stats)(), *latencies.samples()]
    assert {sample.name for sample in samples} == set(MEASURES)
    text = render({"code": {"r": samples}}).decode()
    assert len(list(text_string_to_metric_families(text))) == len(MEASURES)
    assert "_created" not in text  # tools add up everything that begins with a counter's name


def test_refusals_are_counted_with_those_that_were_not_looked_at(model: ServedModel) -> None:
    latencies = Latencies()
    service = MeasuredService({"code": latencies}, full_s=PATIENCE_S)
    full = replace(model, backend=Refusing(Overloaded("full")))
    request = GenerationRequest("r", exact.load_prompts(1)[0], SamplingParams(max_tokens=1))
    with pytest.raises(Overloaded):
        asyncio.run(anext(service.run(full, request)))
    with pytest.raises(Overloaded):
        service.admit(full)
    assert latencies.finished == {**dict.fromkeys(latencies.finished, 0), "refused": 2}


def test_what_clients_brought_about_is_no_error(model: ServedModel) -> None:
    """A request that the target refuses, and a time that the client gave it; the server's own limit is one."""
    latencies = Latencies()
    service = MeasuredService({"code": latencies}, timeout_s=0.05)
    request = GenerationRequest("r", exact.load_prompts(1)[0], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest):
        asyncio.run(anext(service.run(replace(model, backend=Refusing(InvalidRequest("seed", "no"))), request)))
    for timeout_s in (0.001, None, 5.0):
        with pytest.raises(DeadlineExceeded):
            asyncio.run(anext(service.run(replace(model, backend=Hanging(0)), request, timeout_s)))
    assert latencies.finished == {**dict.fromkeys(latencies.finished, 0), "error": 2, "cancelled": 1, "invalid": 1}


def test_latencies_are_those_of_the_tokens(model: ServedModel) -> None:
    latencies = Latencies()
    for _ in range(2):
        run(model, latencies)
    run(model, latencies, tokens=500, upto=2)
    values = shown(i=latencies.samples())
    assert values["paceline_time_to_first_token_seconds_count", "i"] == 3
    tokens = values["paceline_output_tokens_total", "i"]
    assert values["paceline_finished_total", "i"] == 3
    assert latencies.finished == {**dict.fromkeys(latencies.finished, 0), "length": 2, "cancelled": 1}
    assert latencies.open == 0
    assert 0 < values["paceline_inter_token_latency_seconds_count", "i"] < tokens
    assert 0 < values["paceline_time_to_first_token_seconds_sum", "i"] < PATIENCE_S
    assert values["paceline_request_seconds_count", "i"] == 2
    parts = ("paceline_time_to_first_token_seconds_sum", "paceline_inter_token_latency_seconds_sum")
    assert 0 < values["paceline_request_seconds_sum", "i"] <= sum(values[part, "i"] for part in parts) * 1.5
    assert values["paceline_prompt_tokens_total", "i"] == 3 * len(exact.load_prompts(1)[0])


def test_the_first_token_is_waited_for_since_the_request_came(model: ServedModel) -> None:
    latencies = Latencies()
    service = MeasuredService({"code": latencies})
    request = GenerationRequest("r", exact.load_prompts(1)[0], SamplingParams(max_tokens=2))

    async def read() -> None:
        async for _ in service.run_all(model, [request], arrived=time.monotonic() - 100.0):
            pass

    asyncio.run(read())
    values = shown(i=latencies.samples())
    assert values["paceline_time_to_first_token_seconds_sum", "i"] > 100
    assert values["paceline_request_seconds_sum", "i"] > 100
    assert values["paceline_inter_token_latency_seconds_sum", "i"] < 100


def test_a_replica_that_reports_no_more_is_shown_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(registry_module, "time", clock)
    registry = Registry()
    registry.report("a", [Sample("paceline_running", 1)])
    clock.now += LEASE_S
    registry.report("b", [Sample("paceline_running", 2)])
    assert set(registry.reports()) == {"a", "b"}
    clock.now += 0.1
    assert set(registry.reports()) == {"b"}
    registry.withdraw("b")
    assert registry.reports() == {}


def test_what_a_newer_replica_reports_hides_nothing_of_the_others() -> None:
    new = Sample("paceline_not_yet_known", 1)
    shown = render({"m": {"new": (new, Sample("paceline_running", 2)), "old": (Sample("paceline_running", 3),)}})
    assert b"not_yet_known" not in shown
    assert shown.count(b"paceline_running{") == 2


@pytest.mark.ray
def test_a_cluster_reports_by_itself_and_through_ray() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        _system_config={"metrics_report_interval_ms": 500},
    )
    target = TargetConfig(
        exact.TARGET, dtype="float32", kv_tokens=2048, flush_s=0.0, places=("separate",), served_as="code"
    )
    draft = DraftConfig(exact.DRAFT, dtype="float32", kv_tokens=4096, served_as="code")
    try:
        with LocalCluster(target, draft) as cluster:
            request = GenerationRequest("r", exact.load_prompts(1)[0], SamplingParams(max_tokens=TOKENS))
            assert sum(len(chunk.tokens) for chunk in cluster.stream(request)) == TOKENS
            check_scrape(lambda: gather_reports({"code": cluster.registry}))
            (node,) = ray.nodes()  # type: ignore[no-untyped-call]
            check_export(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics")
    finally:
        ray.shutdown()


def check_scrape(reports: Callable[[], Any]) -> None:
    """/metrics shows the target and the draft."""

    async def ask() -> Reports:
        found: Reports = await reports()
        return found

    app = FastAPI()
    app.include_router(make_metrics_router(ask))
    values: dict[str, float] = {}

    def complete() -> bool:
        with TestClient(app) as client:
            answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        values.update({name: value for (name, _), value in parsed(answer.text).items()})
        told = values.get("paceline_tokens_total") == TOKENS and "paceline_draft_steps_total" in values
        return told and "paceline_link_round_trip_seconds" in values

    until(complete, "the replicas report")
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert 0 < values["paceline_link_round_trip_seconds"] < 1


def check_export(url: str) -> None:
    """Ray's own exporter shows the same counter, and histograms as Prometheus's series of them."""
    latencies = Latencies()
    for seconds, times in ((0.004, 1), (0.02, 3), (99.0, 1)):
        latencies.tokens_came(latencies.between_tokens, seconds * times, times)
    export = RayExport("code", "ingress-1")
    for _ in range(2):  # the same again changes nothing
        export.show([latencies.between_tokens.sample()])
    name = f"ray_{BETWEEN_TOKENS}"
    expected = {
        **{f'{name}_bucket le="{bound}"': count for bound, count in (("0.0025", 0), ("0.005", 1), ("0.02", 4))},
        f'{name}_bucket le="+Inf"': 5,
        f"{name}_count": 5,
        f"{name}_sum": 99.064,
    }

    def exported() -> bool:
        lines = [line for line in (get(url) or "").splitlines() if 'model_name="code"' in line]

        def shows(series: str, value: float) -> bool:
            parts = series.split()
            found = [line for line in lines if line.startswith(f"{parts[0]}{{") and parts[-1] in line]
            return any(float(line.rsplit(" ", 1)[1]) == pytest.approx(value) for line in found)

        tokens = any(line.startswith("ray_paceline_tokens") and line.endswith(f" {TOKENS}.0") for line in lines)
        return tokens and all(shows(series, value) for series, value in expected.items())

    until(exported, "Ray exports the tokens and the latencies")


def test_the_page_on_operating_has_every_metric() -> None:
    page = (ROOT / "docs" / "OPERATING.md").read_text()
    rows = {
        f"| `{name}{'_total' if measure.kind == 'counter' else ''}` | {measure.kind} | {measure.text} |"
        for name, measure in MEASURES.items()
    }
    assert not [row for row in rows if row not in page]
    named = {line for line in page.splitlines() if re.match(r"\| `\S+` \| (counter|gauge|histogram) ", line)}
    assert named == rows
