"""What vLLM says of its steps and its tokens, as ours; it is pretended here."""

from types import SimpleNamespace

import pytest

from cluster.vllm_counts import VllmCounts
from cluster.vllm_params import chunk_logprobs
from engine.types import TokenLogprobs


def scheduler(drafts: SimpleNamespace | None, hits: int = 0, preempted_hits: int = 0) -> SimpleNamespace:
    """Of one step, with two requests that run and one that waits."""
    cache = SimpleNamespace(hits=hits, preempted_hits=preempted_hits)
    return SimpleNamespace(
        num_running_reqs=2,
        num_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=cache,
        spec_decoding_stats=drafts,
    )


def iteration(tokens: int, first: int, later: int, preempted: int = 0) -> SimpleNamespace:
    """Of one step: tokens that came, of them requests' first ones; and requests that had some before."""
    return SimpleNamespace(
        num_generation_tokens=tokens,
        num_preempted_reqs=preempted,
        time_to_first_tokens_iter=[0.1] * first,
        inter_token_latencies_iter=[0.1] * later,
    )


def test_steps_are_counted_as_a_target_counts_its_own() -> None:
    counts = VllmCounts()
    counts.record(scheduler(None, hits=16), iteration(tokens=2, first=2, later=0))
    drafts = SimpleNamespace(
        num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1, 0]
    )
    counts.record(scheduler(drafts, preempted_hits=4), iteration(tokens=5, first=0, later=2, preempted=1))
    counts.record(scheduler(drafts), iteration(tokens=6, first=1, later=2))
    stats = counts.stats
    assert (stats.running, stats.waiting, stats.shared, stats.preempted) == (2, 1, 20, 1)
    assert (stats.tokens, stats.decoded) == (13, 10)
    assert (stats.steps, stats.sequence_steps) == (2, 4)
    assert (stats.drafted, stats.hits, stats.verified, stats.accepted) == (4, 4, 12, 6)
    assert counts.accepted_at == [4, 2, 0]
    assert counts.kv_share == 0.25


def test_a_step_of_which_nothing_is_said_counts_nothing_but_that_vllm_lives() -> None:
    counts = VllmCounts()
    before, counts.heard = VllmCounts().stats, 0.0
    counts.record(None, None)
    assert counts.stats == before
    assert counts.heard > 0


@pytest.mark.parametrize(("number", "top"), [(0, ()), (1, ((8, -0.1),)), (2, ((8, -0.1), (6, -2.5)))])
def test_log_probabilities_are_those_of_the_token_and_of_the_likeliest(
    number: int, top: tuple[tuple[int, float], ...]
) -> None:
    given = {
        5: SimpleNamespace(rank=3, logprob=-3.0),  # the chosen one
        6: SimpleNamespace(rank=2, logprob=-2.5),
        8: SimpleNamespace(rank=1, logprob=-0.1),
    }
    assert chunk_logprobs([5], [given], number) == [TokenLogprobs(-3.0, top)]


def test_log_probabilities_that_were_not_asked_for_are_none() -> None:
    assert chunk_logprobs([5], None, None) == []
