"""KV memory: a pool of pages, and what a sequence holds of it.

A page is `page_size` slots; a slot holds the key and value of one token in every layer. Committed position p of a
sequence lives in its p-th slot; draft tokens take further slots of their own and are copied into place when committed.
Rollback moves no data: slots behind the committed length are simply written again.

Pages full of committed tokens may be sealed: nobody writes to them again, and sequences that begin alike share them. A
page is held (by one lease or several), cached (nobody holds it, its prefix is known) or free.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from engine.compiled import COMPILES, compiled, widened
from engine.prefix import UNKNOWN, PrefixCache
from engine.types import FloatArray, IntArray

PAGE = 32  # slots
SCRATCH_SLOT = 0  # padding rows write here and read from here; page 0 is never handed out
_HELD = np.iinfo(np.int64).max  # the age of a page that can't be taken


def numbers_of(tensor: torch.Tensor) -> FloatArray:
    """A tensor's numbers for compiled loops: bits, uint16, of bfloat16."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    numbers: FloatArray = bits.numpy()
    return numbers


@partial(compiled, long=True)
def finite(numbers: FloatArray) -> bool:
    """Whether all of them [n], from numbers_of, are, or their sum at least is not; compilers make vectors of a sum."""
    total = np.float32(0)
    for i in range(len(numbers)):
        total += widened(numbers[i])
    return bool(np.isfinite(total))


@partial(compiled, long=True)
def _finite_in(data: FloatArray, start: int, stop: int) -> bool:
    """Whether the numbers of some slots are. data: [layers, 2, kv_heads, slots, head_dim]."""
    for layer in range(data.shape[0]):
        for kind in range(2):
            for head in range(data.shape[2]):
                if not finite(data[layer, kind, head, start:stop].reshape(-1)):
                    return False
    return True


@partial(compiled, long=True)
def _move_in_pages(keys: FloatArray, values: FloatArray, old: IntArray, new: IntArray) -> None:
    """See KVPool.move. keys: [layers, 2, kv_heads, pages, dim / pair, page size, pair], of which the first of two counts;
    values: [layers, 2, kv_heads, pages, page size / pair, dim, pair], of which the second does.
    """
    layers, _, heads, _, features, size, pair = keys.shape
    held = np.empty((len(old), 2, features * pair), keys.dtype)
    for layer in range(layers):
        for head in range(heads):
            for i in range(len(old)):
                page, place = divmod(old[i], size)
                for feature in range(features):
                    for j in range(pair):
                        held[i, 0, feature * pair + j] = keys[layer, 0, head, page, feature, place, j]
                for feature in range(features * pair):
                    held[i, 1, feature] = values[layer, 1, head, page, place // pair, feature, place % pair]
            for i in range(len(old)):
                page, place = divmod(new[i], size)
                for feature in range(features):
                    for j in range(pair):
                        keys[layer, 0, head, page, feature, place, j] = held[i, 0, feature * pair + j]
                for feature in range(features * pair):
                    values[layer, 1, head, page, place // pair, feature, place % pair] = held[i, 1, feature]


class PoolExhausted(RuntimeError):
    """Not enough free pages for what was asked."""


class Lease:
    """The slots that one sequence holds: `slots[i]` is its i-th. `first` is set where they are consecutive."""

    def __init__(self, page_size: int) -> None:
        self.pages: list[int] = []
        self.slots: IntArray = np.zeros(0, np.int32)
        self.first: int | None = None
        self.sealed: list[bytes] = []  # digests of the leading pages that are never written again
        self._page_size = page_size

    def assign(self, pages: list[int]) -> None:
        """Has these pages from now on; only the pool calls this."""
        self.pages = pages
        inside = np.arange(self._page_size, dtype=np.int32)
        self.slots = (np.asarray(pages, np.int32)[:, None] * self._page_size + inside).reshape(-1)
        consecutive = all(b == a + 1 for a, b in pairwise(pages))
        self.first = pages[0] * self._page_size if pages and consecutive else None

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.slots)


class KVPool:
    """Keys and values of all sequences of one model replica.

    `data`: [layers, 2 (key, value), kv_heads, slots, head_dim]; freed and padding slots hold finite values, since a NaN
    behind a mask leaks. paged: these axes only say how much there is; of a head's pages, [pages, page_size x head_dim], keys
    are kept feature by feature and values slot by slot, in bfloat16 pairs of features and of slots together
    (engine.page_attention).
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = PAGE,
        paged: bool = False,
    ) -> None:
        self.page_size, self.paged = page_size, paged
        self.pages = -(-tokens // page_size) + 1
        shape = (layers, 2, kv_heads, self.pages * page_size, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._holders = np.zeros(self.pages, np.int32)  # leases that have each page
        self._free = np.ones(self.pages, np.bool_)  # pages that nobody holds and that are not cached
        self._holders[SCRATCH_SLOT // page_size] = 1  # the pool itself
        self._free[SCRATCH_SLOT // page_size] = False
        self._cache = PrefixCache(self.pages)
        self._leases: dict[int, Lease] = {}  # by the object's id: who holds which pages

    @property
    def capacity(self) -> int:
        """Tokens that fit when nobody holds anything."""
        return (self.pages - 1) * self.page_size

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be leased; cached pages make room when they are needed."""
        return int((self._holders == 0).sum()) * self.page_size

    @property
    def used_pages(self) -> int:
        """Pages in somebody's lease."""
        return int((self._holders > 0).sum()) - 1

    def lease(self, tokens: int, digests: Sequence[bytes] = ()) -> Lease:
        """Slots for `tokens` tokens, consecutive where possible (the attention then reads them in place).

        digests: of the sequence's prefixes by full pages; the longest beginning that is known is shared. Raises
        PoolExhausted.
        """
        count = max(1, -(-tokens // self.page_size))
        lease = Lease(self.page_size)
        shared = self._cache.find(digests[:count])
        self._holders[shared] += 1  # first, or they could be taken for the rest
        try:
            lease.assign(shared + self._take(count - len(shared), shared))
        except PoolExhausted:
            self._let_go(shared)
            raise
        lease.sealed = list(digests[: len(shared)])
        self._leases[id(lease)] = lease
        return lease

    def lease_known(self, length: int, room: int, digests: Sequence[bytes]) -> tuple[Lease, int]:
        """A lease for `room` tokens of a sequence of `length`, and how many of these need no computing.

        At least one does, for its logits: if all are known, the last page is copied to write it. Raises PoolExhausted.
        """
        lease = self.lease(room, digests)
        known = min(len(lease.sealed) * self.page_size, length - 1)
        try:
            self.own(lease, known)
        except PoolExhausted:  # the last page is computed again, in place of what is cached
            self.release(lease)
            return self.lease_known(length, room, digests[: len(lease.sealed) - 1])
        return lease, known

    def cost(self, length: int, room: int, digests: Sequence[bytes]) -> int:
        """How many pages that nobody holds `lease_known` needs."""
        shared = self._cache.find(digests[: (length - 1) // self.page_size])
        return max(1, -(-room // self.page_size)) - int((self._holders[shared] > 0).sum())

    def extend(self, lease: Lease, tokens: int) -> None:
        """Makes room for `tokens` tokens in all. Raises PoolExhausted and changes nothing."""
        missing = -(-tokens // self.page_size) - len(lease.pages)
        if missing > 0:
            lease.assign(lease.pages + self._take(missing, lease.pages))

    def trim(self, lease: Lease, tokens: int) -> None:
        """Gives back what is beyond `tokens` tokens, where nothing was written yet."""
        keep = max(len(lease.sealed), -(-tokens // self.page_size))
        self._let_go(lease.pages[keep:], written=0)
        lease.assign(lease.pages[:keep])

    def seal(self, lease: Lease, digests: Sequence[bytes]) -> None:
        """The lease's first pages are full and final; digests[i] names the prefix that ends with page i.

        Others may share them from now on, unless a value in them, or their sum, is not finite.
        """
        for index in range(len(lease.sealed), len(digests)):
            page = lease.pages[index]
            if self._is_finite(page):
                self._cache.add(digests[index - 1] if index else None, digests[index], page)
            lease.sealed.append(digests[index])

    def adopt(self, lease: Lease, digests: Sequence[bytes]) -> None:
        """Exchanges the pages behind the sealed ones for what others have computed of the same prefix meanwhile."""
        start = len(lease.sealed)
        found = self._cache.find(digests[start:])
        if found:
            end = start + len(found)
            self._holders[found] += 1
            self._let_go(lease.pages[start:end])
            lease.assign(lease.pages[:start] + found + lease.pages[end:])
            lease.sealed += digests[start:end]

    def own(self, lease: Lease, start: int) -> None:
        """Copy on write: slots from the `start`-th on may be written, sealed pages there are copied first.

        Raises PoolExhausted and changes nothing.
        """
        index = start // self.page_size
        sealed = lease.pages[index : len(lease.sealed)]
        if sealed:
            fresh = self._take(len(sealed), lease.pages[:index])
            for old, new in zip(sealed, fresh, strict=True):
                self._data_of(new).copy_(self._data_of(old))
            self._let_go(sealed)
            lease.assign(lease.pages[:index] + fresh + lease.pages[len(lease.sealed) :])
            del lease.sealed[index:]

    def release(self, lease: Lease, written: int | None = None) -> None:
        """Gives a lease back; raises KeyError when it was given back before. Known prefixes stay cached.

        written: nothing was written behind so many slots of it; None: anywhere.
        """
        del self._leases[id(lease)]
        self._cache.touch(lease.sealed)
        self._let_go(lease.pages, None if written is None else -(-written // self.page_size))

    def _take(self, count: int, after: list[int]) -> list[int]:
        """Pages that nobody holds, behind those in `after` where these are free. Cached ones are forgotten."""
        age = np.where(self._holders > 0, _HELD, self._cache.used)
        unheld = int((age < _HELD).sum())
        if unheld < count:
            raise PoolExhausted(f"{count} pages asked for, {unheld} of {self.pages - 1} are free")
        start = after[-1] + 1 if after else 0
        pages = _oldest(age, count) if self.paged else _run(age, count, start)
        for page in pages:
            if self._cache.used[page] != UNKNOWN:
                dropped = self._cache.drop(page)
                self._free[dropped] = self._holders[dropped] == 0
        self._holders[pages] += 1
        self._free[pages] = False
        return pages

    def _let_go(self, pages: list[int], written: int | None = None) -> None:
        """written: so many of the first pages, or all, may hold what is not finite; looking takes a while."""
        self._holders[pages] -= 1
        for page in pages[:written]:
            if self._holders[page] == 0 and self._cache.used[page] == UNKNOWN and not self._is_finite(page):
                self._clean(page)  # attention reads whole pages: what is masked would still spoil its sums
        self._free[pages] = (self._holders[pages] == 0) & (self._cache.used[pages] == UNKNOWN)

    def _is_finite(self, page: int) -> bool:
        if COMPILES and self.data.is_cpu and self.data.dtype in (torch.float32, torch.bfloat16):
            return _finite_in(numbers_of(self.data), page * self.page_size, (page + 1) * self.page_size)
        return bool(self._data_of(page).sum(dtype=torch.float32).isfinite())  # no sum is, where a value is not

    def _data_of(self, page: int) -> torch.Tensor:
        """A view [layers, 2, kv_heads, page_size, head_dim]."""
        return self.data[:, :, :, page * self.page_size : (page + 1) * self.page_size]

    def wipe(self, lease: Lease, start: int = 0) -> None:
        """Makes a lease's slots from the `start`-th on finite again, whatever was computed into them.

        Pages that others know are finite, and so is what stands before `start`.
        """
        size = self.page_size
        for index in range(-(-start // size), len(lease.pages)):
            page = lease.pages[index]
            if self._holders[page] == 1 and self._cache.used[page] == UNKNOWN:
                self._clean(page)
        rest = lease.slots[start : -(-start // size) * size].tolist()
        self.move([int(lease.slots[start - 1])] * len(rest), rest)

    def _clean(self, page: int) -> None:
        """Zeros a page, and what passes write that is for nobody, which saw the same."""
        for each in (page, SCRATCH_SLOT // self.page_size):
            self._data_of(each).zero_()

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copies slots' keys and values in all layers; all of `source` is read before anything is written."""
        pairs = [(a, b) for a, b in zip(source, destination, strict=True) if a != b]
        if not pairs:
            return
        old, new = (list(side) for side in zip(*pairs, strict=True))
        if self.paged:
            self._move_paged(np.array(old, np.int32), np.array(new, np.int32))
        elif self.data.is_cpu:  # a few slots: numpy takes a fifth of torch's time
            array = numbers_of(self.data)
            array[:, :, :, new] = array[:, :, :, old]
        else:
            before, after = (torch.tensor(side, device=self.data.device) for side in (old, new))
            self.data.index_copy_(3, after, self.data.index_select(3, before))

    def _move_paged(self, old: IntArray, new: IntArray) -> None:
        numbers, size = numbers_of(self.data), self.page_size
        layers, _, kv_heads, _, dim = numbers.shape
        pair = 2 if numbers.itemsize == 2 else 1
        keys = numbers.reshape(layers, 2, kv_heads, self.pages, dim // pair, size, pair)
        values = numbers.reshape(layers, 2, kv_heads, self.pages, size // pair, dim, pair)
        _move_in_pages(keys, values, old, new)

    def check(self) -> None:
        """Audits the pool: who holds what, what is cached, what is free, and that all values are finite.

        Raises AssertionError.
        """
        scratch = SCRATCH_SLOT // self.page_size
        holders = np.zeros(self.pages, np.int32)
        holders[scratch] = 1
        for lease in self._leases.values():
            np.add.at(holders, lease.pages, 1)
            assert len(set(lease.pages)) == len(lease.pages), "a lease holds a page twice"
        assert (holders == self._holders).all(), "a page is held twice, or its holders are miscounted"
        cached = self._cache.used != UNKNOWN
        for lease in self._leases.values():
            writable = lease.pages[len(lease.sealed) :]
            assert (holders[writable] == 1).all(), "a page that may be written is held twice"
            assert not cached[writable].any(), "a page that may be written is cached"
        assert not self._free[scratch], "the scratch page is free"
        assert not (self._free & (holders > 0)).any(), "a held page is free"
        assert not (self._free & cached).any(), "a cached page is free"
        assert (self._free | cached | (holders > 0)).all(), "a page is lost"
        self._cache.check()
        extremes = torch.stack(torch.aminmax(self.data))  # isfinite of all would copy it, and the allocator keep that
        assert bool(torch.isfinite(extremes).all()), "a slot holds a non-finite value"


def _run(age: npt.NDArray[np.int64], count: int, start: int) -> list[int]:
    """Which `count` pages to take, by age [pages]: free ones are the oldest, held ones can't be taken.

    From `start` on if all there are free; else the run whose youngest page is oldest; else the oldest, wherever they are.
    A run is worth more than what is cached in it: attention reads it in place.
    """
    if count == 0:
        return []
    if start and len(age) - start >= count and (age[start : start + count] == UNKNOWN).all():
        return list(range(start, start + count))
    youngest = sliding_window_view(age, count).max(axis=1)
    first = int(youngest.argmin())
    if youngest[first] < _HELD:
        return list(range(first, first + count))
    return _oldest(age, count)


def _oldest(age: npt.NDArray[np.int64], count: int) -> list[int]:
    """The oldest pages, wherever they are."""
    oldest: list[int] = np.argsort(age, kind="stable")[:count].tolist()
    return oldest
