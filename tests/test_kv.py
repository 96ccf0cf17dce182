"""KV memory: pages are never lost or held twice, and a handle names exactly one prefix."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.compiled import COMPILES
from engine.kv import SCRATCH_SLOT, KVPool, Lease, PoolExhausted
from engine.prefix import HandleChain
from engine.types import KVHandle
from tests.rows import PAGE, PAGES, make_pool


class Leases(RuleBasedStateMachine):
    """Leases come, grow and go; the model is how many pages each holds."""

    @initialize()
    def fill(self) -> None:
        self.pool = make_pool()
        self.leases: list[Lease] = []

    @property
    def free(self) -> int:
        return PAGES - sum(len(lease.pages) for lease in self.leases)

    @rule(tokens=st.integers(0, PAGE * PAGES + 3))
    def lease(self, tokens: int) -> None:
        pages = max(1, -(-tokens // PAGE))
        if pages > self.free:
            with pytest.raises(PoolExhausted, match=f"{pages} pages asked for, {self.free} of {PAGES} are free"):
                self.pool.lease(tokens)
        else:
            self.leases.append(self.pool.lease(tokens))
            assert len(self.leases[-1].pages) == pages

    @rule(data=st.data(), tokens=st.integers(0, PAGE * PAGES))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        assume(self.leases)
        lease = data.draw(st.sampled_from(self.leases))
        before = list(lease.pages)
        missing = max(0, -(-tokens // PAGE) - len(before))
        if missing > self.free:
            with pytest.raises(PoolExhausted):
                self.pool.extend(lease, tokens)
            missing = 0
        else:
            self.pool.extend(lease, tokens)
        assert lease.pages[: len(before)] == before, "slots that are in use moved"
        assert len(lease.pages) == len(before) + missing

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        assume(self.leases)
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.pool.release(lease)
        with pytest.raises(KeyError):
            self.pool.release(lease)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_tokens == self.free * PAGE
        assert self.pool.used_pages == PAGES - self.free
        slots = [slot for lease in self.leases for slot in lease.slots.tolist()]
        assert len(set(slots)) == len(slots)
        assert SCRATCH_SLOT not in slots

    @invariant()
    def first_says_whether_slots_are_consecutive(self) -> None:
        for lease in getattr(self, "leases", []):
            assert lease.capacity == len(lease.slots) == PAGE * len(lease.pages)
            consecutive = lease.slots.tolist() == list(range(lease.slots[0], lease.slots[0] + lease.capacity))
            assert lease.first == (lease.slots[0] if consecutive else None)


Leases.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestLeases = Leases.TestCase


def test_pages_are_consecutive_where_there_is_a_gap_of_that_size() -> None:
    pool = make_pool()
    small, gap, rest = pool.lease(PAGE), pool.lease(3 * PAGE), pool.lease(2 * PAGE)
    pool.release(small)
    pool.release(gap)
    assert pool.lease(4 * PAGE).first is not None
    pool.release(rest)


@given(st.data())
def test_move_reads_everything_before_it_writes(data: st.DataObject) -> None:
    pool = make_pool()
    slots = range(pool.data.shape[3])
    source = data.draw(st.lists(st.sampled_from(slots), max_size=8))
    destination = data.draw(st.permutations(slots))[: len(source)]
    pool.data.copy_(torch.arange(pool.data.numel()).view(pool.data.shape))
    expected = pool.data.clone()
    expected[:, :, :, destination] = pool.data[:, :, :, source]
    pool.move(source, destination)
    assert torch.equal(pool.data, expected)


def test_check_finds_a_page_that_is_lost() -> None:
    pool = make_pool()
    pool._free[3] = False
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_check_finds_a_page_that_is_held_twice() -> None:
    pool = make_pool()
    first, second = pool.lease(PAGE), pool.lease(PAGE)
    second.pages = list(first.pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


def test_check_finds_a_page_that_is_held_and_free() -> None:
    pool = make_pool()
    pool._free[pool.lease(PAGE).pages] = True
    with pytest.raises(AssertionError, match="free"):
        pool.check()


def test_check_finds_a_free_scratch_page() -> None:
    pool = make_pool()
    held = pool.lease(PAGE)
    pool._free[SCRATCH_SLOT // PAGE] = True
    pool._free[held.pages] = False
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("slot", [SCRATCH_SLOT, PAGE * PAGES])
def test_check_finds_what_is_not_finite_in_any_slot(slot: int, value: float) -> None:
    pool = make_pool()
    pool.data[1, 0, 0, slot, 2] = value
    with pytest.raises(AssertionError, match="non-finite"):
        pool.check()


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_page_is_sealed_for_others_only_where_it_is_finite(
    dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv.COMPILES", compiles and COMPILES)
    pool = KVPool(2, 1, 4, PAGES * PAGE, dtype, page_size=PAGE)
    names = HandleChain(range(2 * PAGE)).digests(PAGE)
    lease = pool.lease(2 * PAGE)
    pool.data[:, :, :, lease.slots] = -3.0
    pool.data[1, 1, 0, lease.slots[-1], 3] = float("nan")
    pool.seal(lease, names)
    assert pool.lease(2 * PAGE, names).pages[0] == lease.pages[0]
    assert len(pool._cache.find(names)) == 1


def test_a_wiped_lease_is_finite_again_and_others_are_untouched() -> None:
    pool = make_pool()
    spoiled, other = pool.lease(2 * PAGE), pool.lease(PAGE)
    pool.data[:, :, :, spoiled.slots] = float("nan")
    pool.data[:, :, :, other.slots] = 5.0
    pool.wipe(spoiled)
    pool.check()
    assert bool((pool.data[:, :, :, other.slots] == 5).all())


# handles

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(token_lists, token_lists)
def test_a_handle_names_its_tokens_however_they_came(first: list[int], second: list[int]) -> None:
    whole, pieces = HandleChain(first + second), HandleChain(first)
    pieces.extend(second)
    assert whole.handle == pieces.handle
    assert whole.handle.length == len(first) + len(second)
    assert len(whole.handle.digest) == 16


@given(token_lists, token_lists)
def test_other_tokens_have_another_handle(first: list[int], second: list[int]) -> None:
    assert (HandleChain(first).handle == HandleChain(second).handle) == (first == second)


def test_another_salt_gives_another_handle() -> None:
    handles = {HandleChain([1, 2], salt).handle for salt in (b"", b"a", b"b")}
    assert len(handles) == 3


@given(token_lists, token_lists)
def test_a_chain_names_its_prefixes_and_nothing_else(tokens: list[int], other: list[int]) -> None:
    chain = HandleChain(tokens)
    assert all(chain.names(HandleChain(tokens[:end]).handle) for end in range(len(tokens) + 1))
    assert chain.names(HandleChain(other).handle) == (tokens[: len(other)] == other)
    assert not chain.names(KVHandle(len(tokens) + 1, chain.handle.digest))


@given(token_lists, token_lists, token_lists)
def test_extending_to_a_handle_happens_wholly_or_not_at_all(a: list[int], b: list[int], c: list[int]) -> None:
    chain = HandleChain(a)
    assert chain.try_extend(b, HandleChain(a + c).handle.digest) == (b == c)
    assert chain.handle == HandleChain(a + b if b == c else a).handle


def test_slots_are_small_integers() -> None:
    assert make_pool().lease(5).slots.dtype == np.int32
