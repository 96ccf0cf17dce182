"""What an actor needs of the engine that it wraps: our own (cluster.target) or vLLM (cluster.vllm_target)."""

from collections.abc import Sequence
from typing import Protocol

from cluster.grpc_link import connect
from cluster.intake import Sink
from cluster.kept_links import CONNECT_TIMEOUT_S, KeptLinks
from cluster.placement import Placement
from cluster.speculate import LinkOptions
from cluster.target import TargetReplica
from cluster.target_stats import TargetStats
from cluster.trace import Trace
from engine.budget import Window
from engine.types import GenerationRequest

_ROUND_TRIP_TIMEOUT_S = 1.0


class Target(Protocol):
    """A target replica; cluster.target.TargetReplica says what its methods do."""

    trace: Trace

    def submit(self, request: GenerationRequest, sink: Sink) -> None: ...
    def check_request(self, request: GenerationRequest) -> object: ...
    def cancel(self, request_id: str) -> None: ...
    def set_window(self, window: Window) -> None: ...
    def set_speculation(self, on: bool) -> None: ...
    def stats(self) -> TargetStats: ...
    def accepted_at(self) -> list[int]: ...
    @property
    def pages(self) -> tuple[int, int]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def turn_s(self) -> float: ...
    def wait_idle(self, timeout_s: float) -> bool: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class Links(Protocol):
    """A target's links to drafts; one thread calls its methods, again and again."""

    def follow(self, addresses: Sequence[str] | None) -> None:
        """The drafts at these addresses live: links to those that have none yet. None: all links end."""

    def round_trips_s(self) -> list[float]:
        """Of each live link that answers in time, a call and its answer; it blocks. From any thread."""


class DraftLinks:
    """Implements Links for our own engine: a stream to every draft."""

    def __init__(self, replica: TargetReplica, placement: Placement) -> None:
        options = LinkOptions(cores=placement.cores)
        self._links = KeptLinks(lambda address: connect(address, CONNECT_TIMEOUT_S, options), replica.add_link)

    def follow(self, addresses: Sequence[str] | None) -> None:
        """See Links."""
        self._links.follow(addresses)

    def round_trips_s(self) -> list[float]:
        """See Links."""
        trips = [link.round_trip_s(_ROUND_TRIP_TIMEOUT_S) for link in self._links.live()]
        return [trip for trip in trips if trip is not None]
