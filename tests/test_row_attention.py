"""Rows that attend one by one: the same as torch's arithmetic, whatever rows are beside them."""

import numpy as np
import pytest
import torch

from engine.row_attention import Paths
from engine.types import IntArray

KV_HEADS, HEADS, DIM, SLOTS = 2, 6, 16, 200


@pytest.fixture(scope="module")
def layer() -> torch.Tensor:
    """Keys and values [2, kv_heads, slots, head_dim]."""
    return torch.randn(2, KV_HEADS, SLOTS, DIM, generator=torch.Generator().manual_seed(1))


def queries(rows: int) -> torch.Tensor:
    return 2 * torch.randn(HEADS, rows, DIM, generator=torch.Generator().manual_seed(2))


def paths(*lengths: int) -> list[IntArray]:
    generator = np.random.default_rng(3)
    return [generator.permutation(SLOTS)[:length].astype(np.int32) for length in lengths]


def expected(
    query: torch.Tensor, layer: torch.Tensor, path: IntArray, cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One row by the definition, in float64: query [heads, head_dim]."""
    keys, values = layer.double()[:, :, path].repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("hd,hkd->hk", query.double(), keys) / DIM**0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    exponents = scores.exp()
    total = exponents.sum(1) + (0 if sinks is None else sinks.double().exp())
    return torch.einsum("hk,hkd->hd", exponents / total[:, None], values)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, HEADS)])
def test_rows_attend_over_their_own_paths(layer: torch.Tensor, cap: float | None, sinks: torch.Tensor | None) -> None:
    rows, seen = [4, 0, 3], paths(1, 37, 200)
    query, out = queries(6), torch.zeros(6, HEADS, DIM)
    Paths.of(list(zip(rows, seen, strict=True))).attend(query, layer, out, DIM**-0.5, cap, sinks)
    for row, path in zip(rows, seen, strict=True):
        torch.testing.assert_close(
            out[row].double(), expected(query[:, row], layer, path, cap, sinks), atol=2e-6, rtol=0
        )
    assert not out[[1, 2, 5]].any()


def test_a_rows_bits_do_not_depend_on_the_others(layer: torch.Tensor) -> None:
    seen = paths(5, 64, 130, 131)
    query = queries(4)
    together = torch.zeros(4, HEADS, DIM)
    Paths.of(list(enumerate(seen))).attend(query, layer, together, DIM**-0.5, None, None)
    for row, path in enumerate(seen):
        alone = torch.zeros(1, HEADS, DIM)
        Paths.of([(0, path)]).attend(query[:, row : row + 1], layer, alone, DIM**-0.5, None, None)
        assert torch.equal(alone[0], together[row])
