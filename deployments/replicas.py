"""Targets and drafts as replicas of Ray Serve, which starts, checks, scales and drains them.

A replica whose loop failed or hangs ends its process, as it does outside Serve: its streams break at once and go on
elsewhere, no further request is sent to it, and Serve starts another. Waiting for Serve's health checks to fail would
hold up all of that. They are the second line, for a process that can't even do this.
"""

import secrets

from cluster.actors import DraftActor, TargetActor, TargetConfig, works
from cluster.draft import DraftStats
from cluster.drafters import DraftConfig
from cluster.placement import Placement
from cluster.registry import RegistryName
from deployments.scaling import BUSY, SESSIONS, STREAMS

_REPLICA_IDS = 2**20  # session ids have room for so many replicas of a model


class Unhealthy(RuntimeError):
    """A replica does not work; Serve replaces it."""


class TargetDeployment(TargetActor):
    """A target replica: `generate` streams a request's chunks, up to its last one also while it is being replaced.

    Serve drains it: no new requests, then `close` once its streams have ended, or its time is up and others take them over.
    """

    _loaded = False

    def __init__(self, config: TargetConfig, placement: Placement, registry: RegistryName) -> None:
        """Raises ModelError."""
        super().__init__(config, placement, registry, secrets.randbelow(_REPLICA_IDS))
        self._loaded = True

    def check_health(self) -> None:
        """For Serve; raises Unhealthy."""
        if not works(self._replica):
            raise Unhealthy("the loop of the target failed or hangs")

    def __del__(self) -> None:
        """For Serve: the replica has drained."""
        if self._loaded:
            self._loaded = False
            self.close()


class DraftDeployment(DraftActor):
    """A draft replica: targets talk to it over gRPC, which Serve doesn't see, so it tells Serve how busy it is.

    It has no streams to drain: it hands its sessions back, and they move to other drafts.
    """

    _loaded = False

    def __init__(self, config: DraftConfig, placement: Placement, registry: RegistryName) -> None:
        """Raises ModelError, or LinkError when no port can be had."""
        super().__init__(config, placement, registry)
        self._last = self._replica.stats()
        self._loaded = True

    def check_health(self) -> None:
        """For Serve; raises Unhealthy."""
        if not works(self._replica):
            raise Unhealthy("the loop of the draft failed or hangs")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve's policies: load since the last call."""
        before, self._last = self._last, self._replica.stats()
        return reported_load(before, self._last)

    def __del__(self) -> None:
        """For Serve: the replica goes away."""
        if self._loaded:
            self._loaded = False
            self.close()


def reported_load(before: DraftStats, now: DraftStats) -> dict[str, float]:
    """What a draft tells Serve: the share of time in draft steps between two snapshots; sessions and targets now."""
    wall_s = now.wall_s - before.wall_s
    busy = (now.busy_s - before.busy_s) / wall_s if wall_s > 0 else 0.0
    return {BUSY: busy, SESSIONS: float(now.sessions), STREAMS: float(now.streams)}
