"""What replicas report about themselves: names, kinds and units. Plain values, so that whoever keeps them needs no model."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's state."""

    bounds: tuple[float, ...]  # upper ones, ascending; a last bucket has none
    counts: tuple[int, ...]  # of observations in each bucket, one more than there are bounds
    total: float  # sum of all observations

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, observations up to it), the last one "+Inf", as Prometheus writes them."""
        bounds = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Sample:
    """A measure's value. Counters never fall while the replica lives."""

    name: str  # in MEASURES
    value: float | Buckets
    labels: tuple[tuple[str, str], ...] = ()  # beside model and replica


@dataclass(frozen=True, slots=True)
class Measure:
    """What a name stands for."""

    kind: Kind
    text: str


# Names end as Prometheus wants it, without the "_total" of counters.
MEASURES: dict[str, Measure] = {
    # of a target replica
    "paceline_queue": Measure("gauge", "requests that a replica has taken and not begun; others wait in Serve"),
    "paceline_running": Measure("gauge", "requests in the batch"),
    "paceline_drafts": Measure("gauge", "draft replicas that are linked"),
    "paceline_pages_used": Measure("gauge", "KV pages that requests hold"),
    "paceline_pages": Measure("gauge", "KV pages there are"),
    "paceline_hit_rate": Measure("gauge", "share of steps at whose end the mirror held a child below the new root"),
    "paceline_window": Measure("gauge", "draft tokens verified per sequence and step"),
    "paceline_idle": Measure("gauge", "share of the decoding time outside the forward pass"),
    "paceline_link_round_trip_seconds": Measure(
        "gauge", "a ping to a draft and its answer, between steps; the longest"
    ),
    "paceline_requests": Measure("counter", "requests that started"),
    "paceline_tokens": Measure("counter", "tokens committed"),
    "paceline_decoded_tokens": Measure("counter", "tokens committed but for those that came with the end of a prompt"),
    "paceline_steps": Measure("counter", "steps in which somebody decoded"),
    "paceline_place_steps": Measure(
        "counter",
        "of them, by where drafts ran: separate, shared (taking turns), none (only lookups); off: no guesses at all",
    ),
    "paceline_sequence_steps": Measure("counter", "steps in which a sequence decoded, counted for each"),
    "paceline_hits": Measure("counter", "sequence steps at whose end the mirror held a child below the new root"),
    "paceline_expected_tokens": Measure(
        "counter", "draft tokens that windows expected to be accepted; near those that are where confidences hold"
    ),
    "paceline_empty_steps": Measure("counter", "sequence steps that verified nothing although a draft is attached"),
    "paceline_forward_seconds": Measure("counter", "time in forward passes that decoded"),
    "paceline_active_seconds": Measure("counter", "time with at least one decoding sequence"),
    "paceline_wait_seconds": Measure("counter", "time waiting for growth after a miss"),
    "paceline_preemptions": Measure("counter", "times a request gave up its pages and waited again"),
    "paceline_shared_tokens": Measure("counter", "tokens whose KV was known and not computed"),
    "paceline_growth_grafted": Measure("counter", "nodes that drafts guessed and that fitted"),
    "paceline_growth_dropped": Measure("counter", "growth messages that fitted nothing: late, foreign or nonsense"),
    "paceline_link_messages_lost": Measure(
        "counter", "messages between target and drafts that full links or damage lost"
    ),
    "paceline_mirrors_healed": Measure("counter", "commits that asked the draft to send its subtree again"),
    "paceline_sessions_attached": Measure("counter", "times a session was given to a draft"),
    "paceline_sessions_reattached": Measure("counter", "of them, since a draft left or joined"),
    "paceline_prefixes_resent": Measure("counter", "times a draft asked for a prefix"),
    # of a target replica, under the names that tools read
    "vllm:num_requests_running": Measure("gauge", "as paceline_running"),
    "vllm:num_requests_waiting": Measure("gauge", "as paceline_queue"),
    "vllm:kv_cache_usage_perc": Measure("gauge", "share of the KV pages that requests hold, 0 to 1"),
    "vllm:spec_decode_num_drafts": Measure("counter", "sequence steps that verified draft tokens"),
    "vllm:spec_decode_num_draft_tokens": Measure("counter", "draft tokens verified"),
    "vllm:spec_decode_num_accepted_tokens": Measure("counter", "draft tokens accepted"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Measure("counter", "draft tokens accepted, by place in the path"),
    # of a draft replica
    "paceline_draft_sessions": Measure("gauge", "sessions that are open"),
    "paceline_draft_streams": Measure("gauge", "targets that are connected"),
    "paceline_draft_busy_share": Measure("gauge", "share of the time in draft steps"),
    "paceline_draft_steps": Measure("counter", "draft steps"),
    "paceline_draft_busy_seconds": Measure("counter", "time in draft steps"),
    # of an ingress replica
    "paceline_streams": Measure("gauge", "samples that clients are waiting for"),
    "paceline_finished": Measure("counter", "samples that ended, by reason"),
    "paceline_resumed": Measure("counter", "times a sample went on at another target replica, by those that finished"),
    "paceline_prompt_tokens": Measure("counter", "tokens of the prompts of samples that began"),
    "paceline_output_tokens": Measure("counter", "tokens handed to clients"),
    "paceline_time_to_first_token_seconds": Measure("histogram", "from a sample's arrival to its first token"),
    "paceline_inter_token_latency_seconds": Measure("histogram", "between tokens: a piece's time over its tokens"),
    "paceline_request_seconds": Measure(
        "histogram", "from a sample's arrival to its end, without what a slow client takes, of those that ended well"
    ),
}
