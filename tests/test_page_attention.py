"""Attention over pages: the numbers of its definition, and bits that depend on a row's own path alone."""

import numpy as np
import pytest
import torch

from engine import torch_calls
from engine.kv import PAGE, KVPool, numbers_of
from engine.page_attention import attend, store
from engine.page_plan import plan
from engine.types import BoolArray, FloatArray, IntArray
from tests.rows import kv_of

KV_HEADS, DIM, PAGES = 2, 16, 40
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(not torch_calls.available(), reason="needs numba, and torch's kernels")


def filled(dtype: torch.dtype) -> KVPool:
    """A pool of one layer, with a key and a value in every slot."""
    if dtype == torch.bfloat16 and not torch_calls.narrow_available():
        pytest.skip("needs a processor that computes in bfloat16")
    pool = KVPool(1, KV_HEADS, DIM, (PAGES - 1) * PAGE, dtype, paged=True)
    generator = np.random.default_rng(5)
    for keys in (True, False):
        for kv in range(KV_HEADS):
            for slot in range(PAGES * PAGE):
                row = generator.standard_normal(DIM).astype(np.float32)
                store(row, keys, slot, numbers_of(pool.data)[0, 0 if keys else 1, kv].reshape(-1))
    return pool


def paths(rows: BoolArray, prefix: IntArray, tree_slots: IntArray) -> list[IntArray]:
    return [np.concatenate([prefix, tree_slots[row]]) for row in rows]


def expected(query: FloatArray, pool: KVPool, path: IntArray, heads: int) -> torch.Tensor:
    """One row by the definition, in float64: query [heads, head_dim]."""
    keys, values = kv_of(pool, path)[0].double().repeat_interleave(heads // KV_HEADS, 1)
    asked = torch.from_numpy(query).to(pool.data.dtype).double()
    weights = (torch.einsum("hd,hkd->hk", asked, keys) / DIM**0.5).softmax(1)
    return torch.einsum("hk,hkd->hd", weights, values)


def attended(pool: KVPool, qkv: FloatArray, heads: int, seen: IntArray) -> torch.Tensor:
    """[rows, heads, head_dim]."""
    data = numbers_of(pool.data).reshape(1, 2, KV_HEADS, PAGES, -1)
    out = np.zeros((len(qkv), heads, DIM), np.float32)
    attend(qkv, data[0, 0], data[0, 1], seen, DIM**-0.5, out)
    return torch.from_numpy(out)


def lower(count: int) -> BoolArray:
    return np.tri(count, dtype=np.bool_)


def branching() -> BoolArray:
    """A tree of 6 nodes: 0 - 1 - 2, 1 - 3, 0 - 4 - 5."""
    ancestors = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5]]
    out = np.zeros((6, 6), np.bool_)
    for node, path in enumerate(ancestors):
        out[node, path] = True
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 6, 80])
@pytest.mark.parametrize("prefix", [0, 5, 32, 63, 100])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_attend_to_their_own_paths(
    dtype: torch.dtype, heads: int, prefix: int, elsewhere: bool, in_place: bool
) -> None:
    """A row, a chain longer than what kernels take at once, and a tree; their slots behind the prefix, or anywhere."""
    pool, generator = filled(dtype), np.random.default_rng(6)
    for visible in (lower(1), lower(40), branching()):
        count = len(visible)
        pages = generator.permutation(np.arange(1, PAGES))[:8]
        slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1).astype(np.int32)
        tree_slots = slots[prefix : prefix + count]
        if elsewhere:
            tree_slots = generator.permutation(slots[prefix:])[:count].copy()
        qkv = generator.standard_normal((count + 2, heads + 2 * KV_HEADS, DIM)).astype(np.float32)
        seen = plan([(slots, prefix, tree_slots, visible, 1, in_place)])
        assert not (in_place and seen[5]), "nothing is copied, of which the plan's header says how much"
        out = attended(pool, qkv, heads, seen)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # weights are rounded to 8 bits
        for row, path in enumerate(paths(visible, slots[:prefix], tree_slots), 1):
            wanted = expected(qkv[row, :heads], pool, path, heads)
            torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=tolerance)
        assert not out[[0, -1]].any(), "rows that are in no plan"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_its_path_alone(dtype: torch.dtype) -> None:
    """Not on the rows beside it, nor on where the slots of its path are."""
    pool, heads, prefix = filled(dtype), 6, 45
    slots = np.arange(3 * PAGE, 7 * PAGE, dtype=np.int32)
    visible = branching()
    qkv = np.random.default_rng(7).standard_normal((6, heads + 2 * KV_HEADS, DIM)).astype(np.float32)
    chain = lower(3)  # nodes 0, 1 and 2, of which each is in its path's place
    in_place = attended(pool, qkv[:3], heads, plan([(slots, prefix, slots[prefix : prefix + 3], chain, 0, False)]))
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        tree_slots = slots[prefix + 3 :][order].copy()
        moved = slots.copy()
        pool.move(slots[prefix : prefix + 3].tolist(), tree_slots[:3].tolist())
        together = attended(pool, qkv, heads, plan([(moved, prefix, tree_slots, visible, 0, False)]))
        assert torch.equal(together[:3], in_place)
        for row in range(6):
            alone = plan([(moved, prefix, tree_slots, visible[row : row + 1], 0, False)])
            assert torch.equal(attended(pool, qkv[row : row + 1], heads, alone)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_sequences_have_the_bits_that_each_has_alone(dtype: torch.dtype) -> None:
    """More than are computed at a time: rows of one, chains, and a prompt that is longer than all at a time."""
    pool, heads, generator = filled(dtype), 6, np.random.default_rng(8)
    sequences, first = [], 0
    for number in range(40):
        rows, prefix = (300, 0) if number == 20 else (1 + number % 3, int(generator.integers(0, 7 * PAGE)))
        pages = generator.permutation(np.arange(1, PAGES))[: -(-(prefix + rows) // PAGE)]
        slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1).astype(np.int32)
        sequences.append((slots, prefix, slots[prefix : prefix + rows], lower(rows), first, False))
        first += rows
    qkv = generator.standard_normal((first, heads + 2 * KV_HEADS, DIM)).astype(np.float32)
    together = attended(pool, qkv, heads, plan(sequences))
    for slots, prefix, tree_slots, visible, start, _ in sequences:
        own = slice(start, start + len(visible))
        alone = attended(pool, qkv[own], heads, plan([(slots, prefix, tree_slots, visible, 0, False)]))
        assert torch.equal(alone, together[own])


def grown(nodes: int, wide: bool, generator: np.random.Generator) -> BoolArray:
    """A tree of so many nodes, that has many branches or few."""
    out = np.zeros((nodes, nodes), np.bool_)
    for node in range(1, nodes):
        out[node] = out[generator.integers(0 if wide else max(0, node - 3), node)]
        out[node, node - 1] = True
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [0, 33, 62, 64, 90])
@pytest.mark.parametrize("wide", [False, True])
def test_branches_share_blocks(dtype: torch.dtype, prefix: int, wide: bool) -> None:
    """Each row of a tree has the bits that it has alone, at the end of a chain that stands in its pages."""
    pool, heads, generator = filled(dtype), 6, np.random.default_rng(prefix)
    slots = np.arange(3 * PAGE, 9 * PAGE, dtype=np.int32)
    for nodes in (2, 9, 30, 63):
        visible = grown(nodes, wide, generator)[1:, : nodes - 1]
        count = len(visible)
        tree_slots = slots[prefix : prefix + count].copy()
        qkv = generator.standard_normal((count, heads + 2 * KV_HEADS, DIM)).astype(np.float32)
        seen = plan([(slots, prefix, tree_slots, visible, 0, False)])
        together = attended(pool, qkv, heads, seen)
        if nodes == 63:
            leaves = int((visible.sum(0) == 1).sum())
            assert seen[4] < leaves, "blocks, of which the plan's header says the number, are shared"
        for row, path in enumerate(paths(visible, slots[:prefix], tree_slots)):
            elsewhere = np.arange(20 * PAGE, 20 * PAGE + len(path), dtype=np.int32)
            pool.move(path.tolist(), elsewhere.tolist())
            alone = plan([(elsewhere, len(path) - 1, elsewhere[-1:].copy(), lower(1), 0, False)])
            assert torch.equal(attended(pool, qkv[row : row + 1], heads, alone)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_paged_pool_moves_slots(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    everything = np.arange(PAGES * PAGE, dtype=np.int32)
    before = kv_of(pool, everything)
    source, to = [40, 41, 70, 99], [41, 40, 33, 1000]
    pool.move(source, to)
    before[:, :, :, to] = before[:, :, :, source]
    assert torch.equal(kv_of(pool, everything), before)
