"""Logits to tokens: filters against a plain reference, and chi-square tests against the target's distribution."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import noise, sampling
from engine.types import SamplingParams

SEEDS = 20_000
FILTERS = [
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(2.5),
    SamplingParams(1.0, top_k=7),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(1.0, min_p=0.15),
    SamplingParams(0.8, top_k=12, top_p=0.9, min_p=0.05),
]


def some_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_at(position: int) -> torch.Tensor:
    """The keys of one position of many samples: int64 [SEEDS, 1]."""
    return torch.cat([noise.keys(seed, [position]) for seed in range(SEEDS)])[:, None]


def reference(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Probabilities of one row, step by step: top-k, then top-p, then min-p, each on what the one before left."""
    weights = {token: math.exp(value / params.temperature) for token, value in enumerate(logits.double().tolist())}
    if params.top_k:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[: params.top_k])
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if sum(kept.values()) >= params.top_p * total:
            break
        kept[token] = weight
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p * max(kept.values())}
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(logits))]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How far counts are from what is expected, in standard deviations (Wilson and Hilferty 1931).

    Cells with an expected count below 8 are taken together.
    """
    expected = probabilities * counts.sum()
    small = expected < 8
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).double()
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    deviation = math.sqrt(2 / (9 * freedom))
    return float((statistic / freedom) ** (1 / 3) - 1 + deviation**2) / deviation


# the distribution


@pytest.mark.parametrize("params", FILTERS)
def test_single_tokens_follow_the_filtered_softmax(params: SamplingParams) -> None:
    logits = some_logits(40)
    chosen = sampling.choose(logits.expand(SEEDS, -1), params, noise.gumbel(keys_at(11), torch.arange(40)))
    probabilities = torch.tensor(reference(logits, params))
    counts = torch.bincount(chosen, minlength=40)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 4


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.8, top_p=0.95, min_p=0.02)])
def test_pairs_of_tokens_follow_the_product(params: SamplingParams) -> None:
    """The second token's logits depend on the first token, as in a language model."""
    size = 9
    logits, then = some_logits(size, seed=1), some_logits(size, size, seed=2)
    tokens = torch.arange(size)
    first = sampling.choose(logits.expand(SEEDS, -1), params, noise.gumbel(keys_at(4), tokens))
    second = sampling.choose(then[first], params, noise.gumbel(keys_at(5), tokens))
    given_first = torch.tensor([reference(row, params) for row in then])
    probabilities = torch.tensor(reference(logits, params))[:, None] * given_first
    counts = torch.bincount(first * size + second, minlength=size * size)
    assert counts[probabilities.flatten() == 0].sum() == 0
    assert chi_square(counts, probabilities.flatten()) < 4


def test_neighbouring_positions_of_one_sample_are_independent() -> None:
    """All positions of one seed, as a long output has them."""
    size, count = 6, 40_000
    logits = some_logits(size, seed=3)
    values = noise.gumbel(noise.keys(0, list(range(count)))[:, None], torch.arange(size))
    chosen = sampling.choose(logits.expand(count, -1), SamplingParams(1.0), values)
    single = logits.double().softmax(-1)
    counts = torch.bincount(chosen[0::2] * size + chosen[1::2], minlength=size * size)
    assert chi_square(counts, torch.outer(single, single).flatten()) < 4


# the filters


@given(st.integers(0, 10_000), st.integers(0, 14), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.2, 3))
def test_filters_keep_what_the_reference_keeps(seed: int, top_k: int, top_p: float, min_p: float, t: float) -> None:
    logits = some_logits(12, seed=seed)
    params = SamplingParams(t, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = sampling.restrict(logits[None] / t, params)[0].softmax(-1)
    expected = torch.tensor(reference(logits, params))
    torch.testing.assert_close(kept.float(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("params", FILTERS)
def test_something_is_always_left(params: SamplingParams) -> None:
    rows = torch.stack([torch.zeros(20), torch.full((20,), -1e30), 100 * some_logits(20), torch.arange(20.0) * 1e4])
    left = sampling.restrict(rows / params.temperature, params)
    assert bool(torch.isfinite(left).any(-1).all())
    assert not bool(left.isnan().any())


def test_a_nucleus_larger_than_the_head_is_found_too() -> None:
    logits = 0.1 * some_logits(3000)
    kept = sampling.restrict(logits[None], SamplingParams(1.0, top_p=0.9))[0].isfinite()
    expected = torch.tensor(reference(logits, SamplingParams(1.0, top_p=0.9))) > 0
    assert int((kept != expected).sum()) <= 1  # rounding at the edge
    assert int(kept.sum()) > 2000


@pytest.mark.parametrize("params", FILTERS)
def test_a_row_does_not_depend_on_its_neighbours(params: SamplingParams) -> None:
    rows = torch.stack([some_logits(700, seed=1), 0.01 * some_logits(700, seed=2), 9 * some_logits(700, seed=3)])
    values = noise.gumbel(noise.keys(0, [5, 6, 7])[:, None], torch.arange(700))
    together = sampling.scores(rows, params, values)
    alone = [sampling.scores(rows[i : i + 1], params, values[i : i + 1]) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_no_filter_changes_nothing() -> None:
    logits = some_logits(3, 50)
    assert torch.equal(sampling.restrict(logits, SamplingParams(1.0, top_k=50)), logits)


# the choice


def test_temperature_zero_is_argmax_whatever_else_is_set() -> None:
    logits = some_logits(30, 50)
    params = SamplingParams(0.0, top_k=3, top_p=0.1, min_p=0.5, seed=9)
    assert torch.equal(sampling.choose(logits, params, None), logits.argmax(-1))


def test_a_choice_is_the_argmax_of_scaled_logits_plus_noise() -> None:
    logits, values = some_logits(30, 50), some_logits(30, 50, seed=1)
    assert torch.equal(sampling.choose(logits, SamplingParams(0.5), values), (2 * logits + values).argmax(-1))


def test_the_inputs_are_left_alone() -> None:
    logits = some_logits(3, 50)
    copy = logits.clone()
    for params in FILTERS:
        sampling.choose(logits, params, torch.zeros(3, 50))
        rows = [params, replace(params, temperature=0.0), params]
        sampling.propose(logits, rows, noise_of(rows, [1, 2, 3], 50), 4)
    assert torch.equal(logits, copy)


def test_margins_are_the_distance_to_the_second_best() -> None:
    logits = torch.tensor([[1.0, 3.5, 3.0], [2.0, 2.0, 0.0]])
    assert sampling.margins(logits, SamplingParams(), None).tolist() == [0.5, 0.0]
    values = torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    assert sampling.margins(logits, SamplingParams(0.5), values).tolist() == [1.0, 1.0]


# a draft's guesses


def noise_of(rows: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int) -> torch.Tensor:
    """The noise of each row, zeros where it is greedy."""
    drawn = [
        noise.gumbel(noise.keys(row.seed, [position])[:, None], torch.arange(vocab_size))[0] * (row.temperature > 0)
        for row, position in zip(rows, positions, strict=True)
    ]
    return torch.stack(drawn)


@pytest.mark.parametrize("params", [SamplingParams(), *FILTERS])
def test_a_draft_with_the_targets_logits_guesses_the_targets_token(params: SamplingParams) -> None:
    logits = some_logits(64, 60)
    rows = [replace(params, seed=seed) for seed in range(64)]
    positions = list(range(3, 67))
    tokens, _ = sampling.propose(logits, rows, noise_of(rows, positions, 60), 4)
    for i, row in enumerate(rows):
        values = noise.gumbel(noise.keys(row.seed, [positions[i]])[:, None], torch.arange(60))
        assert tokens[i, 0] == sampling.choose(logits[i : i + 1], row, values)[0]


def test_guesses_of_mixed_rows_are_those_of_each_row_alone() -> None:
    logits = some_logits(len(FILTERS) + 1, 300)
    rows = [SamplingParams(), *FILTERS]
    tokens, confidences = sampling.propose(logits, rows, noise_of(rows, range(len(rows)), 300), 5)
    for i, row in enumerate(rows):
        alone = sampling.propose(logits[i : i + 1], [row], noise_of([row], [i], 300), 5)
        assert np.array_equal(tokens[i], alone[0][0])
        assert np.array_equal(confidences[i], alone[1][0])


def test_guesses_are_distinct_with_falling_confidences_below_one() -> None:
    rows = [SamplingParams(1.0)] * 50
    tokens, confidences = sampling.propose(some_logits(50, 300), rows, noise_of(rows, [0] * 50, 300), 6)
    assert all(len(set(row)) == 6 for row in tokens.tolist())
    assert bool((confidences[:, 1:] <= confidences[:, :-1]).all())
    assert bool((confidences.sum(-1) <= 1 + 1e-5).all())
    assert bool((confidences >= 0).all())


def test_guesses_are_the_largest_logits() -> None:
    logits = some_logits(50, 300)
    tokens, _ = sampling.propose(logits, [SamplingParams()] * 50, None, 6)
    assert tokens.tolist() == logits.topk(6).indices.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_draft_whose_logits_are_no_numbers_is_sure_of_nothing(value: float) -> None:
    tokens, confidences = sampling.propose(torch.full((1, 300), value), [SamplingParams()], None, 6)
    assert not confidences.any()
    assert all(0 <= token < 300 for token in tokens[0])
