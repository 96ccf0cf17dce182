"""Gumbel noise: a pure function of (seed, position, token), finite everywhere, and distributed as it should be."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import noise

EULER = 0.5772156649015329
LOWEST, HIGHEST = -math.log(53 * math.log(2)), 53 * math.log(2)  # of uniforms 2^-53 and 1 - 2^-53
EXTREME_SEEDS = (0, 1, 2**31, 2**63 - 1)
EXTREME_POSITIONS = (0, 1, 2**20, 2**31 - 1)
EXTREME_TOKENS = (0, 1, 262_143, 2**31 - 1)


def reference_bits(seed: int, position: int, token: int) -> int:
    """The counter-based generator in Python integers."""
    return noise._mix_int(noise.key(seed, position) + token * noise._GOLDEN)


def reference(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log(((reference_bits(seed, position, token) >> 12) + 0.5) * 2.0**-52))


def row(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    return noise.gumbel(noise.keys(seed, [position]), tokens)


def signed(values: list[int]) -> torch.Tensor:
    return torch.tensor([noise._signed(value) for value in values], dtype=torch.int64)


def test_tensors_mix_to_the_integers_of_plain_python() -> None:
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(noise._mix_int(value) for value in range(1000))]
    assert torch.equal(noise._mix(signed(values)), signed([noise._mix_int(value) for value in values]))


def test_the_mixer_is_splitmix64() -> None:
    """The published first outputs for seed 0 (Vigna's splitmix64.c)."""
    outputs = [noise._mix_int((i + 1) * noise._GOLDEN) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_mixes_to_the_same_integers() -> None:
    values = torch.arange(100_000) * 0x9E3779B97F4A7C
    assert torch.equal(noise._mix(values.cuda()).cpu(), noise._mix(values))


def test_extreme_counters_give_the_reference_value() -> None:
    for seed, position in product(EXTREME_SEEDS, EXTREME_POSITIONS):
        expected = [reference(seed, position, token) for token in EXTREME_TOKENS]
        values = row(seed, position, torch.tensor(EXTREME_TOKENS))
        torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_extreme_counters_give_different_values() -> None:
    values = [reference_bits(*counter) for counter in product(EXTREME_SEEDS, EXTREME_POSITIONS, EXTREME_TOKENS)]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize(("bits", "expected"), [(0, LOWEST), (-1, HIGHEST)])
def test_the_formula_is_finite_at_both_ends(bits: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda value: torch.full_like(value, bits))
    value = noise.gumbel(torch.zeros(9, dtype=torch.int64), torch.arange(9))
    torch.testing.assert_close(value, torch.full((9,), expected), rtol=1e-5, atol=0)


def test_every_value_is_finite_and_within_the_bounds() -> None:
    tokens = torch.arange(262_144)
    for seed, position in product(EXTREME_SEEDS, EXTREME_POSITIONS[::3]):
        values = row(seed, position, tokens)
        assert values.dtype == torch.float32
        assert bool(torch.isfinite(values).all())
        assert LOWEST - 1e-3 <= values.min().item() < values.max().item() <= HIGHEST + 1e-3


def test_shape_and_order_do_not_matter() -> None:
    keys, tokens = noise.keys(5, [3, 9, 4]), torch.arange(1003)
    whole = noise.gumbel(keys[:, None], tokens)
    assert torch.equal(torch.stack([noise.gumbel(key, tokens) for key in keys]), whole)
    shuffled = torch.randperm(1003, generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise.gumbel(keys[:, None], tokens[shuffled]), whole[:, shuffled])
    assert torch.equal(noise.gumbel(keys.flip(0)[None, :], tokens[:, None]), whole.flip(0).T)
    for token in (0, 1, 500, 1002):
        assert torch.equal(noise.gumbel(keys, torch.tensor([token])), whole[:, token])


def test_the_inputs_are_left_alone() -> None:
    keys, tokens = noise.keys(5, [3, 9]), torch.arange(2)
    noise.gumbel(keys, tokens)
    assert torch.equal(keys, noise.keys(5, [3, 9]))
    assert torch.equal(tokens, torch.arange(2))


def many(counter: str, count: int) -> torch.Tensor:
    """Values where only one of seed, position and token differs."""
    if counter == "token":
        return row(1, 2, torch.arange(count))
    if counter == "position":
        return noise.gumbel(noise.keys(1, list(range(count))), torch.tensor(3))
    return noise.gumbel(torch.cat([noise.keys(seed, [2]) for seed in range(count)]), torch.tensor(3))


@pytest.mark.parametrize("counter", ["token", "position", "seed"])
def test_mean_and_variance_are_those_of_gumbel(counter: str) -> None:
    values = many(counter, 100_000).double()
    variance = math.pi**2 / 6
    assert abs(values.mean().item() - EULER) < 5 * math.sqrt(variance / len(values))
    assert abs(values.var().item() - variance) < 5 * variance * math.sqrt((5.4 - 1) / len(values))  # kurtosis 5.4


@pytest.mark.parametrize("counter", ["token", "position", "seed"])
def test_the_distribution_is_gumbel(counter: str) -> None:
    """Chi-square of exp(-exp(-x)), which is uniform, in 256 bins."""
    uniform = many(counter, 100_000).double().neg().exp().neg().exp()
    counts = torch.histc(uniform, 256, 0, 1)
    expected = len(uniform) / 256
    assert ((counts - expected) ** 2 / expected).sum().item() < 255 + 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("counter", ["token", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_not_correlated(counter: str, lag: int) -> None:
    values = many(counter, 100_000).double()
    values = (values - values.mean()) / values.std()
    assert abs((values[lag:] * values[:-lag]).mean().item()) < 5 / math.sqrt(len(values))


def test_compiled_loops_mix_to_the_integers_of_plain_python() -> None:
    for seed, position, token in product(EXTREME_SEEDS, EXTREME_POSITIONS, EXTREME_TOKENS):
        bits = noise._bits(np.uint64(noise.key(seed, position)), np.uint64(token))
        assert int(bits) == reference_bits(seed, position, token) >> 12


@pytest.mark.parametrize("size", [3, 511, 512, 513, 5_000])
def test_the_loudest_tokens_are_those_with_the_most_noise(size: int) -> None:
    key = noise.key(7, 11)
    bits = [reference_bits(7, 11, token) >> 12 for token in range(size)]
    least = sorted(bits)[-(size // 2) - 1]
    loud = np.empty(size + 1, np.int32)
    held = noise._find_loud(np.uint64(key), size, np.uint64(least), loud)
    assert loud[:held].tolist() == [token for token in range(size) if bits[token] >= least]


@given(st.floats(-1e9, 1e9), st.floats(-4, 36))
def test_no_logit_below_the_limit_reaches_the_worst_score(worst: float, bound: float) -> None:
    limit = noise._limit(worst, bound)
    value = np.nextafter(limit, np.float32(-np.inf), dtype=np.float32)
    assert float(value) + bound < worst


def test_what_was_filtered_out_is_below_every_limit() -> None:
    assert -np.inf < noise._limit(-np.inf, 3.0)


@pytest.mark.parametrize("room", [0, 256, 384])
def test_kept_noise_changes_no_choice(room: int) -> None:
    """With room for no position, for some of them or for all; 24 of them share 3 places, and come back."""
    generator = np.random.default_rng(5)
    kept = noise.make_loud(3, room)
    for _ in range(20):
        values = (3 * generator.standard_normal((4, 2_000))).astype(np.float32)
        keys = noise.keys(7, generator.integers(24, size=4).tolist()).numpy()
        for found, expected in zip(
            noise.best_within_rounding(values, keys, 5, kept),
            noise.best_within_rounding(values, keys, 5, noise.NONE_KEPT),
            strict=True,
        ):
            assert np.array_equal(found, expected)
    assert bool(kept.held.any()) == (room > 0)


def test_noise_that_is_kept_is_found_again() -> None:
    keys = noise.keys(7, [1, 2]).numpy()
    kept = noise.make_loud(256, 384)
    values = np.zeros((2, 2_000), np.float32)
    noise.best_within_rounding(values, keys, 5, kept)
    places = np.flatnonzero(kept.held)
    assert sorted(kept.keys[places].tolist()) == sorted(keys.tolist())
    kept.noise[:] = 100.0  # which shows when it is used
    _, scores, _ = noise.best_within_rounding(values, keys, 5, kept)
    assert bool((scores == 100.0).all())
