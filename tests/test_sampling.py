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


def choose(logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor | None) -> torch.Tensor:
    """For rows with the same parameters."""
    return torch.from_numpy(sampling.choose(logits, [params] * len(logits), keys)).long()


def keys_at(position: int) -> torch.Tensor:
    """The keys of one position of many samples: int64 [SEEDS]."""
    return torch.cat([noise.keys(seed, [position]) for seed in range(SEEDS)])


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
    chosen = choose(logits.expand(SEEDS, -1), params, keys_at(11))
    probabilities = torch.tensor(reference(logits, params))
    counts = torch.bincount(chosen, minlength=40)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 4


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.8, top_p=0.95, min_p=0.02)])
def test_pairs_of_tokens_follow_the_product(params: SamplingParams) -> None:
    """The second token's logits depend on the first token, as in a language model."""
    size = 9
    logits, then = some_logits(size, seed=1), some_logits(size, size, seed=2)
    first = choose(logits.expand(SEEDS, -1), params, keys_at(4))
    second = choose(then[first], params, keys_at(5))
    given_first = torch.tensor([reference(row, params) for row in then])
    probabilities = torch.tensor(reference(logits, params))[:, None] * given_first
    counts = torch.bincount(first * size + second, minlength=size * size)
    assert counts[probabilities.flatten() == 0].sum() == 0
    assert chi_square(counts, probabilities.flatten()) < 4


def test_neighbouring_positions_of_one_sample_are_independent() -> None:
    """All positions of one seed, as a long output has them."""
    size, count = 6, 40_000
    logits = some_logits(size, seed=3)
    chosen = choose(logits.expand(count, -1), SamplingParams(1.0), noise.keys(0, range(count)))
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


def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy() -> None:
    assert SamplingParams(1e-50) == SamplingParams(9e-7) == SamplingParams()
    logits = some_logits(20, 300)
    coldest = [SamplingParams(1e-6)] * 20
    chosen = sampling.choose(logits, coldest, noise.keys(3, range(20)))
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_of_no_rows_nothing_is_chosen_nor_compiled_anew() -> None:
    sampling.choose(some_logits(1, 300), [SamplingParams()], None)
    known = list(getattr(sampling.rank, "signatures", ()))
    assert len(sampling.choose(torch.zeros(0, 300), [], None)) == 0
    assert list(getattr(sampling.rank, "signatures", ())) == known


def test_temperature_zero_is_argmax_whatever_else_is_set() -> None:
    logits = some_logits(30, 50)
    params = SamplingParams(0.0, top_k=3, top_p=0.1, min_p=0.5, seed=9)
    assert torch.equal(choose(logits, params, None), logits.argmax(-1))


def test_a_choice_is_the_argmax_of_scaled_logits_plus_noise() -> None:
    logits, keys = some_logits(30, 50), noise.keys(1, range(30))
    values = noise.gumbel(keys[:, None], torch.arange(50))
    assert torch.equal(choose(logits, SamplingParams(0.5), keys), (2 * logits + values).argmax(-1))


def test_the_inputs_are_left_alone() -> None:
    logits = some_logits(3, 50)
    copy = logits.clone()
    for params in FILTERS:
        choose(logits, params, noise.keys(0, range(3)))
        rows = [params, replace(params, temperature=0.0), params]
        sampling.propose(logits, rows, keys_of(rows, [1, 2, 3]), 4)
    assert torch.equal(logits, copy)


def test_margins_are_the_distance_to_the_second_best() -> None:
    logits = torch.tensor([[1.0, 3.5, 3.0], [2.0, 2.0, 0.0]])
    assert sampling.margins(logits, [SamplingParams()] * 2, None).tolist() == [0.5, 0.0]
    keys = noise.keys(0, range(2))
    best = (2 * logits + noise.gumbel(keys[:, None], torch.arange(3))).sort(descending=True).values
    margins = torch.from_numpy(sampling.margins(logits, [SamplingParams(0.5)] * 2, keys))
    assert torch.equal(margins, best[:, 0] - best[:, 1])


LETS_IN = torch.tensor([0.0, 0.0, 5.0])  # noise with which the last of three tokens wins, unless it is filtered out


@pytest.mark.parametrize(
    ("shares", "of_noise", "params", "chosen", "margin"),
    [
        ([0.5, 0.45, 0.44], LETS_IN, SamplingParams(1.0, top_k=2), 0, math.log(0.45 / 0.44)),
        ([0.5, 0.45, 0.24], LETS_IN, SamplingParams(1.0, min_p=0.5), 0, math.log(0.25 / 0.24)),
        ([0.5, 0.3, 0.2], LETS_IN, SamplingParams(1.0, top_p=0.79), 0, math.log(4) - math.log(0.79 / 0.21)),
        ([0.5, 0.3, 0.2], LETS_IN.roll(-1), SamplingParams(1.0, top_p=0.51), 1, math.log(0.51 / 0.49)),  # left out
        ([0.5, 0.45, 0.44], -LETS_IN, SamplingParams(1.0, top_k=2), 0, math.log(0.5 / 0.45)),  # the last would not win
        ([0.9, 0.05, 0.05], torch.zeros(3), SamplingParams(1.0, min_p=1.0), 0, math.log(18)),
        ([0.5, 0.3, 0.11, 0.109], torch.tensor([0, 0, 0, 5.0]), SamplingParams(1.0, 3, 0.87), 0, 0.083173),
        (
            [0.5, 0.45, 0, 0],
            torch.zeros(4),
            SamplingParams(1.0, 3, 0.99, 0.01),
            0,
            math.log(0.5 / 0.45),
        ),  # two are forbidden
    ],
)
def test_margins_know_what_filters_nearly_let_in_or_left_out(
    shares: list[float], of_noise: torch.Tensor, params: SamplingParams, chosen: int, margin: float
) -> None:
    values = torch.tensor(shares).log()
    assert sampling.scores(values[None], params, of_noise[None]).argmax() == chosen
    assert sampling.margin_of_filters(values, of_noise, params, chosen) == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize("params", FILTERS)
def test_choices_stay_while_logits_move_within_their_margins(params: SamplingParams) -> None:
    logits, keys = some_logits(400, 60), noise.keys(3, range(400))
    chosen = choose(logits, params, keys)
    margins = torch.from_numpy(sampling.margins(logits, [params] * 400, keys))
    distances = torch.from_numpy(sampling.margins(logits, [SamplingParams(params.temperature)] * 400, keys))
    part = 0.9 if params.top_p == 1 else 0.5  # of a margin: each logit moves by half of that, either way
    moved = 0.5 * part * params.temperature * margins[:, None]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        signs = torch.randint(0, 2, logits.shape, generator=generator) * 2 - 1
        assert torch.equal(choose(logits + moved * signs, params, keys), chosen)
    assert margins.median() > 0.1 * distances.median()


# a draft's guesses


def keys_of(rows: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """The keys of each row's noise."""
    return torch.cat([noise.keys(row.seed, [position]) for row, position in zip(rows, positions, strict=True)])


@pytest.mark.parametrize("params", [SamplingParams(), *FILTERS])
def test_a_draft_with_the_targets_logits_guesses_the_targets_token(params: SamplingParams) -> None:
    logits = some_logits(64, 60)
    rows = [replace(params, seed=seed) for seed in range(64)]
    positions = list(range(3, 67))
    tokens, _ = sampling.propose(logits, rows, keys_of(rows, positions), 4)
    for i, row in enumerate(rows):
        assert tokens[i, 0] == choose(logits[i : i + 1], row, noise.keys(row.seed, [positions[i]]))[0]


def test_guesses_of_mixed_rows_are_those_of_each_row_alone() -> None:
    logits = some_logits(len(FILTERS) + 1, 300)
    rows = [SamplingParams(), *FILTERS]
    tokens, confidences = sampling.propose(logits, rows, keys_of(rows, range(len(rows))), 5)
    for i, row in enumerate(rows):
        alone = sampling.propose(logits[i : i + 1], [row], keys_of([row], [i]), 5)
        assert np.array_equal(tokens[i], alone[0][0])
        assert np.array_equal(confidences[i], alone[1][0])


def test_beside_noise_a_draft_is_less_sure() -> None:
    scores = np.array([[3.0, 2.0, 1.0]] * 2, np.float32)
    sampled, greedy = sampling.shares(scores, np.array([True, False]), 3)
    assert greedy[0] > sampled[0] > 1 / 3
    assert sampled.sum() == pytest.approx(greedy.sum()) == pytest.approx(1)


def test_guesses_are_distinct_with_falling_confidences_below_one() -> None:
    rows = [SamplingParams(1.0)] * 50
    tokens, confidences = sampling.propose(some_logits(50, 300), rows, keys_of(rows, [0] * 50), 6)
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


# noise where it matters: nothing but the time differs


def dense(values: torch.Tensor, keys: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` best of values + noise over whole rows, the lowest of equal ones first, without those at -inf."""
    scores = (values + noise.gumbel(keys[:, None], torch.arange(values.shape[1]))).numpy()
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    best = np.take_along_axis(scores, order, 1)
    return np.where(best > -np.inf, order, 0).tolist(), best.tolist()


SHAPES = {
    "random": lambda rows, size: some_logits(rows, size),
    "peaked": lambda rows, size: 12 * some_logits(rows, size),
    "flat": lambda rows, size: torch.zeros(rows, size),
    "rising": lambda rows, size: torch.linspace(-30, 30, size).expand(rows, -1).contiguous(),
    "few allowed": lambda rows, size: some_logits(rows, size).masked_fill(
        torch.arange(size) % (size // 3) != 1, -torch.inf
    ),
    "none allowed": lambda rows, size: torch.full((rows, size), -torch.inf),
    "large, so that noise is rounded away": lambda rows, size: (1e7 * some_logits(rows, size)).round(),
    "large and equal": lambda rows, size: torch.full((rows, size), -3e8),
}


@pytest.mark.parametrize(("size", "rows"), [(512, 40), (262_144, 2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_are_those_of_noise_over_the_whole_vocabulary(shape: str, size: int, rows: int) -> None:
    values, keys = SHAPES[shape](rows, size), noise.keys(2, range(rows))
    for count in (1, 2, 16):
        tokens, best = sampling._largest_with_noise(values.numpy(), keys.numpy(), count)
        assert (tokens.tolist(), best.tolist()) == dense(values, keys, count)
    first = sampling.choose(values, [SamplingParams(1.0)] * len(values), keys)
    assert first[:, None].tolist() == dense(values, keys, 1)[0]


@given(
    st.lists(st.sampled_from([0.0, 0.5, -1.0, 3.0, -40.0, 36.0, 1e8, -1e30, -math.inf]), min_size=17, max_size=60),
    st.integers(0, 2**63 - 1),
    st.integers(1, 17),
)
def test_the_best_of_any_few_are_those_of_all_noise(row: list[float], seed: int, count: int) -> None:
    values, keys = torch.tensor([row]), noise.keys(seed, [5])
    tokens, best = sampling._largest_with_noise(values.numpy(), keys.numpy(), count)
    assert (tokens.tolist(), best.tolist()) == dense(values, keys, count)
    first = sampling.choose(values, [SamplingParams(1.0)] * len(values), keys)
    assert first[:, None].tolist() == dense(values, keys, 1)[0]


def test_most_noise_is_never_computed() -> None:
    """Of 262,144 tokens few more than those asked for, however the logits look."""
    for shape in ("random", "peaked", "flat"):
        values, keys = SHAPES[shape](2, 262_144), noise.keys(2, range(2))
        tokens, _, sure = noise.contenders(values.numpy(), keys.numpy(), 16)
        assert tokens.shape[1] == 20
        assert sure.all()


def test_no_ties_and_no_bias_over_256_thousand_tokens() -> None:
    """Every sixteenth of a flat vocabulary wins equally often, and the two best scores are never the same."""
    size, count = 262_144, 1_600
    values, keys = np.zeros((1, size), np.float32), noise.keys(3, range(count)).numpy()
    best = [sampling._largest_with_noise(values, keys[i : i + 1], 2) for i in range(count)]
    winners = torch.tensor([int(tokens[0, 0]) for tokens, _ in best])
    assert chi_square(torch.bincount(winners * 16 // size, minlength=16), torch.full((16,), 1 / 16)) < 4
    assert all(scores[0, 0] > scores[0, 1] for _, scores in best)
