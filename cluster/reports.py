"""How replicas report: once a second each says what it measured, to the registry of its model and to Ray's exporter."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.util import metrics

from cluster.draft import DraftStats
from cluster.engines import Target
from cluster.measures import MEASURES, Buckets, Sample
from cluster.target_stats import TargetStats

logger = logging.getLogger(__name__)
REPORT_EVERY_S = 1.0
_STOP_TIMEOUT_S = 2.0
_LABELS = ("model_name", "replica")


class TargetReport:
    """Makes a target replica's reports. Shares are of the time since the report before, or as they were."""

    def __init__(self, replica: Target, linked: bool = True) -> None:
        """linked: whether it looks for draft replicas; else it has no figure for how many there are."""
        self._replica, self._linked = replica, linked
        self._before = TargetStats()
        self._shares: dict[str, float] = {}

    def __call__(self, round_trips_s: Sequence[float] = ()) -> list[Sample]:
        """round_trips_s: of the links to drafts."""
        stats, before = self._replica.stats(), self._before
        self._before = stats
        active_s = stats.active_s - before.active_s
        self._share("paceline_hit_rate", stats.hits - before.hits, stats.sequence_steps - before.sequence_steps)
        self._share("paceline_window", stats.verified - before.verified, stats.sequence_steps - before.sequence_steps)
        self._share("paceline_idle", active_s - (stats.forward_s - before.forward_s), active_s)
        used, pages = self._replica.pages
        values = {**_target_values(stats), **self._shares, "paceline_pages_used": used, "paceline_pages": pages}
        values["vllm:kv_cache_usage_perc"] = used / max(1, pages)
        if self._linked:
            values["paceline_drafts"] = stats.drafts
        if round_trips_s:
            values["paceline_link_round_trip_seconds"] = max(round_trips_s)
        per_position = [
            Sample("vllm:spec_decode_num_accepted_tokens_per_pos", count, (("position", str(position)),))
            for position, count in enumerate(self._replica.accepted_at())
            if count or position == 0
        ]
        places = [Sample("paceline_place_steps", count, (("place", place),)) for place, count in stats.places.items()]
        return [*(Sample(name, value) for name, value in values.items()), *places, *per_position]

    def _share(self, name: str, part: float, whole: float) -> None:
        if whole > 0:
            self._shares[name] = max(0.0, part / whole)


def _target_values(stats: TargetStats) -> dict[str, float]:
    return {
        "paceline_queue": stats.waiting,
        "paceline_running": stats.running,
        "paceline_requests": stats.requests,
        "paceline_tokens": stats.tokens,
        "paceline_decoded_tokens": stats.decoded,
        "paceline_steps": stats.steps,
        "paceline_sequence_steps": stats.sequence_steps,
        "paceline_hits": stats.hits,
        "paceline_expected_tokens": stats.expected,
        "paceline_empty_steps": stats.empty,
        "paceline_forward_seconds": stats.forward_s,
        "paceline_active_seconds": stats.active_s,
        "paceline_wait_seconds": stats.wait_s,
        "paceline_preemptions": stats.preempted,
        "paceline_shared_tokens": stats.shared,
        "paceline_growth_grafted": stats.link["grown"],
        "paceline_growth_dropped": stats.link["dropped"],
        "paceline_link_messages_lost": stats.link["lost"],
        "paceline_mirrors_healed": stats.link["healed"],
        "paceline_sessions_attached": stats.link["attached"],
        "paceline_sessions_reattached": stats.link["reattached"],
        "paceline_prefixes_resent": stats.link["reopened"],
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:spec_decode_num_drafts": stats.drafted,
        "vllm:spec_decode_num_draft_tokens": stats.verified,
        "vllm:spec_decode_num_accepted_tokens": stats.accepted,
    }


class DraftReport:
    """Makes a draft replica's reports."""

    def __init__(self, stats: Callable[[], DraftStats]) -> None:
        self._stats = stats
        self._before = DraftStats(0, 0, 0, 0.0, 0.0)

    def __call__(self) -> list[Sample]:
        stats, before = self._stats(), self._before
        self._before = stats
        values: dict[str, float] = {
            "paceline_draft_sessions": stats.sessions,
            "paceline_draft_streams": stats.streams,
            "paceline_draft_busy_share": (stats.busy_s - before.busy_s) / max(1e-9, stats.wall_s - before.wall_s),
            "paceline_draft_steps": stats.steps,
            "paceline_draft_busy_seconds": stats.busy_s,
        }
        return [Sample(name, value) for name, value in values.items()]


class RayExport:
    """Shows samples through Ray's own metrics exporter as well: `ray_paceline_...`, the same names but for colons."""

    def __init__(self, model: str, replica: str) -> None:
        self._tags = {"model_name": model, "replica": replica}
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, object], float] = {}

    def show(self, samples: Sequence[Sample]) -> None:
        """Gauges as they are, counters by what they gained.

        Histograms as Prometheus's series of them, each a gauge: Ray's own have to be told every single observation, which
        takes 0.1 ms.
        """
        for sample in samples:
            text = MEASURES[sample.name].text
            if isinstance(sample.value, Buckets):
                series = sample.value.cumulative()
                for bound, count in series:
                    self._set(f"{sample.name}_bucket", text, count, {"le": bound})
                self._set(f"{sample.name}_count", text, series[-1][1], {})
                self._set(f"{sample.name}_sum", text, sample.value.total, {})
            elif MEASURES[sample.name].kind == "gauge":
                self._set(sample.name, text, sample.value, dict(sample.labels))
            else:
                key = (sample.name, sample.labels)
                gained = sample.value - self._counted.get(key, 0.0)
                if gained > 0:
                    self._counted[key] = sample.value
                    labels = dict(sample.labels)
                    self._metric(sample.name, text, labels, metrics.Counter).inc(gained, {**self._tags, **labels})

    def _set(self, name: str, text: str, value: float, labels: dict[str, str]) -> None:
        self._metric(name, text, labels, metrics.Gauge).set(value, {**self._tags, **labels})

    def _metric(self, name: str, text: str, labels: Iterable[str], kind: type) -> Any:
        if name not in self._metrics:
            keys = (*_LABELS, *labels)
            self._metrics[name] = kind(name.replace(":", "_"), description=text, tag_keys=keys)
        return self._metrics[name]


class Reporter:
    """Reports from a thread of its own until it is stopped: nothing waits for a registry that is away."""

    def __init__(self, registry: Any, model: str, replica: str, samples: Callable[[], list[Sample]]) -> None:
        """registry: the Registry actor. replica: unique for each start."""
        self._registry, self._replica, self._samples = registry, replica, samples
        self._export = RayExport(model, replica)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-report", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it; its last report stays for its lease."""
        self._stopped.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(REPORT_EVERY_S):
            try:
                samples = self._samples()
                self._registry.report.remote(self._replica, samples)
                self._export.show(samples)
            except Exception:  # whatever it is, the next report may succeed
                logger.exception("a report could not be made")
