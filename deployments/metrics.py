"""Prometheus metrics at /metrics: what every replica of every model reported, and what clients waited for.

Replicas report to their model's registry once a second, each ingress does too, and whichever ingress is asked shows all
of it: so the answer doesn't depend on where a request or a scrape lands. A replica that is gone leaves with its lease.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from ray.exceptions import RayError

from cluster.intake import Overloaded
from cluster.measures import MEASURES, Buckets, Sample
from deployments.service import DeadlineExceeded, Piece, ServedModel, Service
from engine.types import GenerationRequest, InvalidRequest

FIRST_TOKEN = "paceline_time_to_first_token_seconds"
BETWEEN_TOKENS = "paceline_inter_token_latency_seconds"
WHOLE = "paceline_request_seconds"
# Upper bounds in seconds.
BOUNDS: dict[str, tuple[float, ...]] = {
    FIRST_TOKEN: (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    BETWEEN_TOKENS: (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    WHOLE: (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
}
_LABELS = ["model_name", "replica"]
_REGISTRY_TIMEOUT_S = 2.0

Reports = Mapping[str, Mapping[str, Sequence[Sample]]]  # by model, by replica


class Histogram:
    """Counts observations; cheap enough for every piece of every stream."""

    def __init__(self, name: str) -> None:
        self._name, self._bounds = name, BOUNDS[name]
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """The same value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def sample(self) -> Sample:
        """As it is now."""
        return Sample(self._name, Buckets(self._bounds, tuple(self._counts), self._total))


class Latencies:
    """What the clients of one model experienced at one ingress replica."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.first_token, self.between_tokens = Histogram(FIRST_TOKEN), Histogram(BETWEEN_TOKENS)
        self.whole = Histogram(WHOLE)
        self.open = 0
        self.prompt_tokens = 0
        self.tokens = 0
        self.resumed = 0
        self.finished = {"stop": 0, "length": 0, "error": 0, "cancelled": 0, "refused": 0, "invalid": 0}

    def tokens_came(self, histogram: Histogram, waited_s: float, count: int) -> None:
        """A piece's tokens, so many seconds after what came before."""
        self.tokens += count
        if histogram is self.first_token:
            histogram.observe(waited_s)
        else:
            histogram.observe(waited_s / count, count)

    def samples(self) -> list[Sample]:
        """For the ingress replica's report."""
        finished = [Sample("paceline_finished", count, (("reason", name),)) for name, count in self.finished.items()]
        counts = {
            "streams": self.open,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "resumed": self.resumed,
        }
        counted = [Sample(f"paceline_{name}", count) for name, count in counts.items()]
        histograms = (self.first_token, self.between_tokens, self.whole)
        return [*counted, *finished, *(histogram.sample() for histogram in histograms)]


class MeasuredService(Service):
    """A service that notes what its clients experience."""

    def __init__(self, latencies: Mapping[str, Latencies], timeout_s: float = 600.0, full_s: float = 0.1) -> None:
        """latencies: by model."""
        super().__init__(timeout_s, full_s=full_s)
        self._latencies = latencies

    def admit(self, model: ServedModel) -> None:
        """See Service."""
        try:
            super().admit(model)
        except Overloaded:
            self._latencies[model.name].finished["refused"] += 1
            raise

    async def run(
        self,
        model: ServedModel,
        request: GenerationRequest,
        timeout_s: float | None = None,
        arrived: float | None = None,
    ) -> AsyncGenerator[Piece]:
        """See Service."""
        latencies = self._latencies[model.name]
        latencies.open += 1
        reason = "cancelled"
        try:
            output = super().run(model, request, timeout_s, arrived)
            async with aclosing(_timed(output, latencies, len(request.prompt), arrived)) as pieces:
                async for piece in pieces:
                    reason = piece.finish_reason or reason
                    latencies.resumed += piece.speculation.resumed if piece.speculation is not None else 0
                    yield piece
        except Overloaded:
            reason = "refused"
            raise
        except InvalidRequest:
            reason = "invalid"
            raise
        except DeadlineExceeded:
            theirs = timeout_s is not None and timeout_s <= self._timeout_s  # the client's deadline
            reason = "cancelled" if theirs else "error"
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            latencies.open -= 1
            latencies.finished[reason] += 1


async def _timed(
    pieces: AsyncGenerator[Piece], latencies: Latencies, prompt: int, arrived: float | None
) -> AsyncGenerator[Piece]:
    """The same pieces. Until one is asked for, its time does not run: a slow client is not the model's latency.

    prompt: tokens of it. arrived: when the request came; the time of the first piece runs since then.
    """
    histogram = latencies.first_token
    async with aclosing(pieces):
        whole = waited = 0.0 if arrived is None else time.monotonic() - arrived
        while True:
            started = time.monotonic()
            piece = await anext(pieces, None)
            if piece is None:
                return
            spent = time.monotonic() - started
            waited, whole = waited + spent, whole + spent
            if count := len(piece.tokens):
                latencies.prompt_tokens += prompt if histogram is latencies.first_token else 0
                latencies.tokens_came(histogram, waited, count)
                histogram, waited = latencies.between_tokens, 0.0
            if piece.finish_reason is not None:
                latencies.whole.observe(whole)
            yield piece


class _Shown(Collector):
    """Reports as Prometheus's families of metrics."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, replicas in self._reports.items():
            for replica, samples in replicas.items():
                for sample in samples:
                    if sample.name not in MEASURES:
                        continue  # of a replica that is newer than this one: an upgrade is under way
                    family = families.get(sample.name) or families.setdefault(sample.name, _family(sample))
                    _add(family, [model, replica, *(value for _, value in sample.labels)], sample.value)
        return families.values()


def _family(sample: Sample) -> Metric:
    measure = MEASURES[sample.name]
    labels = [*_LABELS, *(name for name, _ in sample.labels)]
    if measure.kind == "counter":
        return CounterMetricFamily(sample.name, measure.text, labels=labels)
    if measure.kind == "gauge":
        return GaugeMetricFamily(sample.name, measure.text, labels=labels)
    return HistogramMetricFamily(sample.name, measure.text, labels=labels)


def _add(family: Any, labels: list[str], value: float | Buckets) -> None:
    if isinstance(value, Buckets):
        family.add_metric(labels, value.cumulative(), value.total)
    else:
        family.add_metric(labels, value)


def render(reports: Reports) -> bytes:
    """Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Shown(reports))
    return generate_latest(registry)


async def gather_reports(registries: Mapping[str, Any]) -> dict[str, dict[str, tuple[Sample, ...]]]:
    """What the Registry actors hold, by model; one that doesn't answer is left out."""

    async def ask(registry: Any) -> dict[str, tuple[Sample, ...]]:
        try:
            async with asyncio.timeout(_REGISTRY_TIMEOUT_S):
                held: dict[str, tuple[Sample, ...]] = await registry.reports.remote()
                return held
        except (TimeoutError, RayError):
            return {}

    held = await asyncio.gather(*(ask(registry) for registry in registries.values()))
    return dict(zip(registries, held, strict=True))


def make_metrics_router(reports: Callable[[], Awaitable[Reports]]) -> APIRouter:
    """GET /metrics. reports: asked at each scrape, such as `lambda: gather_reports(registries)`."""
    router = APIRouter()

    @router.get("/metrics", response_class=Response, summary="Metrics in Prometheus's text format")
    async def show() -> Response:
        return Response(render(await reports()), media_type=CONTENT_TYPE_LATEST)

    return router
