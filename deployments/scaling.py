"""How many replicas there should be: functions of load, and the policies with which Serve asks them.

Imports nothing of ours: Serve hands this module to its controller by value. Serve applies the delays and bounds of each
deployment's autoscaling_config to what a policy wants (deployments/config.py says why they are as they are).
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)  # of a deployment
BUSY, SESSIONS, STREAMS = "paceline_busy", "paceline_sessions", "paceline_streams"  # what drafts report


@dataclass(frozen=True, slots=True)
class DraftRule:
    """How drafts follow their targets."""

    target: str  # name of the target's deployment
    ratio: float  # drafts per target, rounded up
    busy: float  # share of time in draft steps above which sessions count
    sessions: float  # that one busy draft should hold at most


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """What the drafts of a model report, taken together."""

    replicas: int  # that run
    busy: float = 0.0  # mean share of their time in draft steps, 0 to 1
    sessions: float = 0.0  # all that they hold


def targets_wanted(requests: float, per_replica: float) -> int:
    """Target replicas for so many requests, running and queued; none for none."""
    return math.ceil(requests / per_replica)


def drafts_wanted(targets: int, load: DraftLoad, rule: DraftRule) -> int:
    """Draft replicas for so many targets: their share, and more while they are busy and hold many sessions.

    Sessions alone add none: with a slow target, one draft serves many. Those that were added stay as long as there are
    sessions for them, though no longer busy: it is their work that made the others idle.
    """
    if targets == 0:
        return 0
    for_sessions = math.ceil(load.sessions / rule.sessions)
    if load.busy < rule.busy:
        for_sessions = min(for_sessions, load.replicas)
    return max(math.ceil(rule.ratio * targets), for_sessions)


class TargetPolicy:
    """Serve's policy of one target deployment."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: ray.serve.config.AutoscalingContext."""
        return targets_wanted(context.total_num_requests, context.config.target_ongoing_requests), {}


class DraftPolicy:
    """Serve's policy of one draft deployment, where no ApplicationPolicy is set: it sees only targets that are linked.

    At zero it would hear of none, so one draft stays.
    """

    def __init__(self, **rule: Any) -> None:
        """rule: of a DraftRule."""
        self._rule = DraftRule(**rule)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: ray.serve.config.AutoscalingContext."""
        streams = _reported(context, STREAMS)  # each draft has one of every target
        targets = round(max(streams, default=1))
        return max(1, drafts_wanted(targets, draft_load(context), self._rule)), {}


class ApplicationPolicy:
    """Serve's policy of the application: sees targets and drafts together, so that drafts follow their targets."""

    def __call__(self, contexts: Mapping[Key, Any]) -> tuple[dict[Key, int], dict[Key, Any]]:
        """contexts: ray.serve.config.AutoscalingContext by deployment."""
        wanted: dict[Key, int] = {}
        targets: dict[str, int] = {}  # by deployment: those there will be soon
        for deployment, context in contexts.items():
            if not draft_rule(context):
                wanted[deployment] = targets_wanted(context.total_num_requests, context.config.target_ongoing_requests)
                woken = context.target_num_replicas == 0 and wanted[deployment] > 0
                targets[context.deployment_name] = 1 if woken else context.target_num_replicas
        for deployment, context in contexts.items():
            if rule := draft_rule(context):
                wanted[deployment] = drafts_wanted(targets.get(rule.target, 0), draft_load(context), rule)
        return wanted, {}


def draft_rule(context: Any) -> DraftRule | None:
    """The rule of a draft deployment, which its own policy has as arguments; None for a target's."""
    arguments = context.config.policy.policy_kwargs
    return DraftRule(**arguments) if arguments else None


def draft_load(context: Any) -> DraftLoad:
    """What the replicas of a draft deployment report."""
    busy, sessions = _reported(context, BUSY), _reported(context, SESSIONS)
    return DraftLoad(context.current_num_replicas, sum(busy) / max(1, len(busy)), sum(sessions))


def _reported(context: Any, name: str) -> list[float]:
    return [value for value in (context.aggregated_metrics or {}).get(name, {}).values() if value is not None]
