"""How many replicas: functions of load, and the policies with what Serve hands them."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.draft import DraftStats
from deployments.replicas import reported_load
from deployments.scaling import (
    BUSY,
    SESSIONS,
    STREAMS,
    ApplicationPolicy,
    DraftLoad,
    DraftPolicy,
    DraftRule,
    TargetPolicy,
    drafts_wanted,
    targets_wanted,
)

RULE = {"target": "code-target", "ratio": 0.5, "busy": 0.9, "sessions": 10.0}


def target(requests: float, replicas: int = 1, name: str = "code-target") -> Any:
    """What Serve tells of a target deployment."""
    config = SimpleNamespace(target_ongoing_requests=4.0, policy=SimpleNamespace(policy_kwargs={}))
    return SimpleNamespace(
        deployment_name=name, total_num_requests=requests, target_num_replicas=replicas, config=config
    )


def draft(*reports: dict[str, float], replicas: int = 1) -> Any:
    """What Serve tells of a draft deployment."""
    metrics = {
        name: {index: report[name] for index, report in enumerate(reports)} for name in (BUSY, SESSIONS, STREAMS)
    }
    config = SimpleNamespace(policy=SimpleNamespace(policy_kwargs=RULE))
    return SimpleNamespace(
        deployment_name="code-draft", current_num_replicas=replicas, aggregated_metrics=metrics, config=config
    )


def report(busy: float, sessions: float, streams: float = 1) -> dict[str, float]:
    return {BUSY: busy, SESSIONS: sessions, STREAMS: streams}


@pytest.mark.parametrize(("requests", "wanted"), [(0, 0), (0.1, 1), (4, 1), (4.1, 2), (40, 10)])
def test_targets_follow_the_requests_that_run_and_wait(requests: float, wanted: int) -> None:
    assert targets_wanted(requests, 4.0) == wanted
    assert TargetPolicy()(target(requests)) == (wanted, {})


@pytest.mark.parametrize(
    ("targets", "load", "wanted"),
    [
        (0, DraftLoad(2, 1.0, 50), 0),  # nobody to draft for
        (1, DraftLoad(0), 1),
        (4, DraftLoad(2), 2),  # half as many
        (5, DraftLoad(2), 3),
        (1, DraftLoad(1, 0.5, 50), 1),  # many sessions, but time to spare
        (1, DraftLoad(1, 0.95, 5), 1),  # busy, but with few
        (1, DraftLoad(1, 0.95, 50), 5),  # both
        (1, DraftLoad(5, 0.3, 50), 5),  # the five made each other idle: they stay
        (1, DraftLoad(5, 0.3, 12), 2),  # until sessions end
    ],
)
def test_drafts_follow_their_targets_and_their_load(targets: int, load: DraftLoad, wanted: int) -> None:
    assert drafts_wanted(targets, load, DraftRule("code-target", 0.5, 0.9, 10.0)) == wanted


def test_a_draft_reports_the_load_since_its_last_report() -> None:
    before = DraftStats(streams=1, sessions=9, steps=100, busy_s=50.0, wall_s=100.0)
    now = DraftStats(streams=2, sessions=3, steps=120, busy_s=51.5, wall_s=102.0)
    assert reported_load(before, now) == report(0.75, 3.0, 2.0)
    assert reported_load(now, now)[BUSY] == 0.0


def test_the_application_scales_each_pair_by_its_own_load() -> None:
    contexts = {"t": target(30, replicas=6), "d": draft(report(0.1, 3)), "o": target(0, name="other-target")}
    assert ApplicationPolicy()(contexts) == ({"t": 8, "d": 3, "o": 0}, {})  # drafts follow the targets there are


def test_a_draft_sleeps_and_wakes_with_its_target() -> None:
    asleep = draft(replicas=0)
    assert ApplicationPolicy()({"t": target(0, replicas=0), "d": asleep})[0] == {"t": 0, "d": 0}
    assert ApplicationPolicy()({"t": target(1, replicas=0), "d": asleep})[0] == {"t": 1, "d": 1}
    assert ApplicationPolicy()({"t": target(0, replicas=1), "d": draft(report(0, 0))})[0] == {"t": 0, "d": 1}


def test_without_an_application_policy_drafts_count_the_targets_that_are_linked() -> None:
    policy = DraftPolicy(**RULE)
    assert policy(draft(report(0.1, 3, streams=5), report(0.1, 3, streams=5), replicas=2)) == (3, {})
    assert policy(draft(report(0.95, 40), report(0.95, 40), replicas=2)) == (8, {})
    assert policy(draft(replicas=0)) == (1, {}), "at zero it would hear of no target"
