"""Who is alive, and where: draft replicas announce themselves under a lease, targets ask for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from cluster.measures import Sample

LEASE_S = 3.0  # an announcement is believed for this long
T = TypeVar("T")
# Ray's name for what only the head has: a registry on another node would end when load falls and the node is given back.
_HEAD, _A_LITTLE = "node:__internal_head__", 0.001


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A live draft replica."""

    name: str  # unique for each start of a replica
    address: str  # host:port of its DraftService


class Registry:
    """A plain class; the cluster runs one as a named actor. Times are seconds of this process's monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[DraftEntry, float]] = {}
        self._reports: dict[str, tuple[tuple[Sample, ...], float]] = {}

    def announce(self, entry: DraftEntry) -> None:
        """A draft is alive, for another LEASE_S seconds."""
        self._entries[entry.name] = (entry, time.monotonic())

    def withdraw(self, name: str) -> None:
        """A replica stops; unknown names are ignored."""
        self._entries.pop(name, None)
        self._reports.pop(name, None)

    def report(self, replica: str, samples: Sequence[Sample]) -> None:
        """A replica (its name is unique for each start) says what it measured; shown for another LEASE_S seconds."""
        self._reports = {**_alive(self._reports), replica: (tuple(samples), time.monotonic())}

    def reports(self) -> dict[str, tuple[Sample, ...]]:
        """The last report of each replica whose lease has not run out, by its name."""
        return {name: samples for name, (samples, _) in _alive(self._reports).items()}

    def drafts(self) -> list[DraftEntry]:
        """The drafts whose lease has not run out."""
        self._entries = _alive(self._entries)
        return [entry for entry, _ in self._entries.values()]


def _alive(held: dict[str, tuple[T, float]]) -> dict[str, tuple[T, float]]:
    """Those whose lease has not run out."""
    now = time.monotonic()
    return {name: (value, since) for name, (value, since) in held.items() if now - since <= LEASE_S}


@dataclass(frozen=True, slots=True)
class RegistryName:
    """Where a cluster's Registry actor is. By name: an actor that got a handle could not be restarted once that is gone."""

    name: str
    namespace: str | None = None  # Ray's; None: the caller's own
    detached: bool = False  # it outlives who starts it

    def open(self) -> Any:
        """The actor, started if there is none."""
        lifetime = {"lifetime": "detached"} if self.detached else {}
        options = {
            "name": self.name,
            "namespace": self.namespace,
            "get_if_exists": True,
            "max_restarts": -1,
            "resources": {_HEAD: _A_LITTLE},
            **lifetime,
        }
        return ray.remote(Registry).options(num_cpus=0, **options).remote()
