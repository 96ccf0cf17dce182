"""Shared pages: a computed slot keeps its value whatever others do, and the cache gives way to who needs pages."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv import KVPool, Lease, PoolExhausted
from engine.prefix import HandleChain
from tests.rows import PAGE, PAGES, make_pool


def digests(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return HandleChain(tokens, salt).digests(PAGE)


class Text:
    """A sequence of some tokens; what it computes for a token is a function of all tokens up to it."""

    def __init__(self, pool: KVPool, tokens: list[int], salt: bytes = b"") -> None:
        """Raises PoolExhausted."""
        self.pool, self.tokens, self.salt = pool, tokens, salt
        self.lease, self.computed = pool.lease_known(len(tokens), len(tokens), digests(tokens, salt))
        self.known = self.computed

    def compute(self, count: int) -> None:
        """The next tokens; pages that are full then are sealed."""
        end = min(self.computed + count, len(self.tokens))
        slots = self.lease.slots[self.computed : end]
        self.pool.data[:, :, :, slots] = self._values(self.computed, end)[:, None]
        self.computed = end
        self.pool.seal(self.lease, digests(self.tokens, self.salt)[: end // PAGE])

    def intact(self) -> bool:
        values = self.pool.data[:, :, :, self.lease.slots[: self.computed]]
        return bool((values == self._values(0, self.computed)[:, None]).all())

    def _values(self, start: int, end: int) -> torch.Tensor:
        prefixes = [HandleChain(self.tokens[: i + 1], self.salt).handle.digest for i in range(start, end)]
        return torch.tensor([float(int.from_bytes(digest[:3], "little")) for digest in prefixes])


class Sharing(RuleBasedStateMachine):
    """Texts that begin alike come, are computed, part, catch up and go."""

    @initialize()
    def fill(self) -> None:
        self.pool = make_pool()
        self.texts: list[Text] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE), salt=st.sampled_from([b"", b"a"]))
    def open(self, tokens: list[int], salt: bytes) -> None:
        cost, free = self.pool.cost(len(tokens), len(tokens), digests(tokens, salt)), self.pool.free_tokens // PAGE
        try:
            text = Text(self.pool, tokens, salt)
        except PoolExhausted:
            assert cost > free
        else:
            assert cost <= free
            assert text.computed < len(tokens)
            self.texts.append(text)

    def _drawn(self, data: st.DataObject) -> Text:
        return data.draw(st.sampled_from(self.texts))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 2 * PAGE))
    def compute(self, data: st.DataObject, count: int) -> None:
        self._drawn(data).compute(count)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=PAGE))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        text = self._drawn(data)
        try:
            self.pool.extend(text.lease, len(text.tokens) + len(more))
        except PoolExhausted:
            return
        text.tokens = text.tokens + more

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=PAGE))
    def part(self, data: st.DataObject, more: list[int]) -> None:
        """A text goes on in another way from some point: what others hold of it must stay."""
        text = self._drawn(data)
        start = data.draw(st.integers(0, text.computed))
        try:
            self.pool.own(text.lease, start)
        except PoolExhausted:
            return
        text.tokens = (text.tokens[:start] + more)[: text.lease.capacity]
        text.computed = start

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        text = self._drawn(data)
        self.pool.adopt(text.lease, digests(text.tokens, text.salt))
        text.computed = max(text.computed, PAGE * len(text.lease.sealed))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        text = self._drawn(data)
        self.pool.trim(text.lease, len(text.tokens))
        assert text.lease.capacity - len(text.tokens) < PAGE

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        text = self._drawn(data)
        self.texts.remove(text)
        self.pool.release(text.lease)

    @invariant()
    def every_text_has_its_own_values(self) -> None:
        for text in getattr(self, "texts", []):
            assert text.intact()

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            held = {page for text in self.texts for page in text.lease.pages}
            assert self.pool.used_pages == len(held)
            assert self.pool.free_tokens == (PAGES - len(held)) * PAGE


Sharing.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestSharing = Sharing.TestCase


def computed(pool: KVPool, tokens: list[int], salt: bytes = b"") -> Text:
    text = Text(pool, tokens, salt)
    text.compute(len(tokens))
    return text


def known(pool: KVPool, tokens: list[int], salt: bytes = b"") -> int:
    """How many tokens a new sequence need not compute."""
    text = Text(pool, tokens, salt)
    pool.release(text.lease)
    return text.known


def test_full_pages_of_a_known_prefix_are_shared_while_held_and_after() -> None:
    pool = make_pool()
    first = computed(pool, [1] * 10)
    second = Text(pool, [1] * 9 + [2])
    assert second.known == 8
    assert second.lease.pages[:2] == first.lease.pages[:2]
    assert pool.used_pages == 4
    pool.release(first.lease)
    assert pool.used_pages == 3
    pool.release(second.lease)
    assert (pool.used_pages, pool.free_tokens) == (0, PAGE * PAGES)
    assert known(pool, [1] * 9) == 8
    assert known(pool, [1] * 3 + [2] * 6) == 0


def test_a_text_that_is_wholly_known_writes_its_last_token_to_a_copy() -> None:
    pool = make_pool()
    first = computed(pool, [1] * 8)
    second = Text(pool, [1] * 8)
    assert second.known == 7
    assert second.lease.pages[0] == first.lease.pages[0]
    assert second.lease.pages[1] != first.lease.pages[1]
    assert second.intact()
    pool.data[:, :, :, second.lease.slots[7]] = 5.0
    assert first.intact()
    pool.check()


def test_a_copy_that_finds_no_page_is_computed_instead() -> None:
    pool = make_pool()
    pool.release(computed(pool, [1] * PAGE * PAGES).lease)
    assert known(pool, [1] * PAGE * PAGES) == PAGE * (PAGES - 1)


def test_another_salt_shares_nothing() -> None:
    pool = make_pool()
    pool.release(computed(pool, [1] * 9, b"a").lease)
    assert known(pool, [1] * 9, b"b") == known(pool, [1] * 9) == 0
    assert known(pool, [1] * 9, b"a") == 8


def test_what_was_used_longest_ago_goes_first_and_children_before_parents() -> None:
    pool = make_pool()
    for token in (1, 2, 3):
        pool.release(computed(pool, [token] * 16).lease)
    pool.release(pool.lease(16, digests([1] * 16)))  # so 2 was used longest ago
    for left in (3, 2, 1, 0):
        pool.lease(PAGE)
        assert [len(pool._cache.find(digests([token] * 16))) for token in (1, 2, 3)] == [4, left, 4]
    pool.check()


def test_what_comes_behind_a_page_that_goes_is_forgotten_with_it() -> None:
    pool = make_pool()
    start = pool.lease(2 * PAGE)  # pages 1 and 2
    hold = pool.lease(PAGE)
    pool.trim(start, PAGE)
    text = Text(pool, [1] * PAGE)  # page 2
    pool.extend(text.lease, 2 * PAGE)  # page 4: 3 is held
    text.tokens = [1] * 2 * PAGE
    text.compute(2 * PAGE)
    assert text.lease.pages == [2, 4]
    pool.lease(PAGE * (PAGES - 4))
    for lease in (start, text.lease):
        pool.release(lease)
    assert pool.lease(2 * PAGE).pages == [1, 2]
    assert pool._cache.find(digests(text.tokens)) == []
    assert pool.lease(PAGE).pages == [4]
    pool.check()
    assert pool.used_pages == PAGES
    pool.release(hold)


def test_a_run_is_worth_more_than_what_is_cached_in_it() -> None:
    pool = make_pool()
    parts = [computed(pool, [token] * PAGE) for token in range(PAGES)]
    for text in parts[::2] + parts[1::2]:
        pool.release(text.lease)
    assert pool.lease(5 * PAGE).first is not None


def test_the_next_turn_of_a_chat_is_consecutive_again() -> None:
    pool = make_pool()
    pool.release(computed(pool, [1] * 10).lease)
    second = Text(pool, [1] * 19)
    assert second.known == 8
    assert second.lease.pages[:2] == [1, 2]
    assert second.lease.first is not None


def test_those_that_compute_the_same_at_once_can_exchange_pages() -> None:
    pool = make_pool()
    first, second = Text(pool, [1] * 9), Text(pool, [1] * 9)
    first.compute(8)
    second.compute(2)
    pool.adopt(second.lease, digests(second.tokens))
    assert second.lease.pages[:2] == first.lease.pages[:2]
    assert pool.used_pages == 4
    pool.check()


def test_what_is_not_finite_is_not_shared_and_a_wipe_spares_what_is() -> None:
    pool = make_pool()
    healthy = computed(pool, [1] * 4 + [2] * 5)
    sick = Text(pool, [1] * 4 + [3] * 5)
    pool.data[:, :, :, sick.lease.slots[5]] = float("nan")
    pool.seal(sick.lease, digests(sick.tokens))
    assert known(pool, sick.tokens) == 4
    pool.wipe(sick.lease)
    pool.check()
    assert healthy.intact()


def lease_of(pool: KVPool) -> Lease:
    return computed(pool, [1] * 9).lease


def test_check_finds_a_miscounted_holder() -> None:
    pool = make_pool()
    pool._holders[lease_of(pool).pages[0]] += 1
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check()


def test_check_finds_a_cached_page_that_may_be_written() -> None:
    pool = make_pool()
    lease_of(pool).sealed.clear()
    with pytest.raises(AssertionError, match="a page that may be written is cached"):
        pool.check()


def test_check_finds_a_shared_page_that_may_be_written() -> None:
    pool = make_pool()
    text = computed(pool, [1] * 9)
    Text(pool, [1] * 9)
    pool._cache.drop(text.lease.pages[0])
    text.lease.sealed.clear()
    with pytest.raises(AssertionError, match="a page that may be written is held twice"):
        pool.check()


def test_check_finds_a_cached_page_that_is_free_or_forgotten() -> None:
    pool = make_pool()
    lease = lease_of(pool)
    pool.release(lease)
    pool._free[lease.pages[0]] = True
    with pytest.raises(AssertionError, match="a cached page is free"):
        pool.check()
    pool._free[lease.pages[0]] = False
    pool._cache.used[lease.pages[0]] = -1
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_check_finds_family_ties_that_are_wrong() -> None:
    pool = make_pool()
    lease = lease_of(pool)
    root = pool._cache._entries[lease.sealed[0]]
    root.children.clear()
    with pytest.raises(AssertionError, match="no child"):
        pool.check()


def test_shared_slots_are_where_the_pages_are() -> None:
    pool = make_pool()
    first = computed(pool, [1] * 9)
    second = Text(pool, [1] * 9)
    assert np.array_equal(first.lease.slots[:8], second.lease.slots[:8])
