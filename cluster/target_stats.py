"""What a target replica counts while it runs, and the rates that follow from it (docs/ARCHITECTURE.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cluster.best_place import PLACES
from engine.step import MAX_WINDOW, Outcome, Plan, rows_of


@dataclass
class TargetStats:
    """Since the replica started. Rates follow from these; they are defined in docs/ARCHITECTURE.md."""

    running: int = 0  # now
    waiting: int = 0  # now
    drafts: int = 0  # linked now
    requests: int = 0
    preempted: int = 0  # times a request gave up its pages to older ones, and waited again
    shared: int = 0  # tokens whose KV was known and not computed, after a preemption too
    steps: int = 0  # in which somebody decoded
    tokens: int = 0  # committed
    decoded: int = 0  # of them, in sequence steps: without those that came with the end of a prompt
    sequence_steps: int = 0  # steps in which a sequence decoded, counted for each
    drafted: int = 0  # sequence steps that verified something
    verified: int = 0  # draft tokens in steps
    tried: int = 0  # of them, along the walked path
    accepted: int = 0
    expected: float = 0.0  # of them, what the window expected of its choices; near `accepted` when it is calibrated
    hits: int = 0  # sequence steps at whose end the mirror held a child below the new root
    empty: int = 0  # sequence steps of attached sessions that verified nothing
    forward_s: float = 0.0  # in steps
    wait_s: float = 0.0  # waiting for growth after a miss
    active_s: float = 0.0  # with at least one decoding sequence
    prefill_s: float = 0.0  # in steps that only prefilled
    places: dict[str, int] = field(default_factory=dict)  # of `steps`, by where drafts ran: see cluster.best_place
    link: dict[str, int] = field(default_factory=dict)  # cluster.target_state.Counters


class Tally:
    """The statistics of a replica, and its sequence steps by how many draft tokens they accepted."""

    def __init__(self) -> None:
        self.stats = TargetStats(places=dict.fromkeys(PLACES, 0))
        self._accepted = [0] * (MAX_WINDOW + 1)

    def step(self, plans: Sequence[Plan], outcomes: Sequence[Outcome], forward_s: float) -> None:
        """Counts a step."""
        stats = self.stats
        decoding = [outcome for outcome in outcomes if outcome.decoded]
        stats.tokens += sum(len(outcome.tokens) for outcome in outcomes)
        stats.decoded += sum(len(outcome.tokens) for outcome in decoding)
        if not decoding:
            stats.prefill_s += forward_s
            return
        stats.steps += 1
        stats.sequence_steps += len(decoding)
        stats.forward_s += forward_s
        stats.accepted += sum(outcome.accepted for outcome in decoding)
        stats.tried += sum(outcome.tried for outcome in decoding)
        for outcome in decoding:
            self._accepted[outcome.accepted] += 1
        stats.verified += rows_of(plans) - len(plans)

    def accepted_at(self) -> list[int]:
        """At index i, in how many sequence steps the draft token i of the path was accepted, and those before it."""
        return list(accumulate(reversed(self._accepted[1:])))[::-1]
