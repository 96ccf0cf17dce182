"""KV memory: a pool of pages, what a sequence holds of it, and handles that name prefixes.

A page is `page_size` slots; a slot holds the key and value of one token in every layer. Committed position p of a
sequence lives in its p-th slot; draft tokens take further slots of their own and are copied into place when committed.
Rollback moves no data: slots behind the committed length are simply written again.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.types import IntArray, KVHandle

SCRATCH_SLOT = 0  # padding rows write here and read from here; page 0 is never handed out


class PoolExhausted(RuntimeError):
    """Not enough free pages for what was asked."""


class Lease:
    """The slots that one sequence holds: `slots[i]` is its i-th. `first` is set where they are consecutive."""

    def __init__(self, page_size: int) -> None:
        self.pages: list[int] = []
        self.slots: IntArray = np.zeros(0, np.int32)
        self.first: int | None = None
        self._page_size = page_size

    def add(self, pages: list[int]) -> None:
        """Appends pages; only the pool calls this."""
        self.pages += pages
        inside = np.arange(self._page_size, dtype=np.int32)
        self.slots = (np.asarray(self.pages, np.int32)[:, None] * self._page_size + inside).reshape(-1)
        consecutive = all(b == a + 1 for a, b in zip(self.pages, self.pages[1:], strict=False))
        self.first = self.pages[0] * self._page_size if consecutive else None

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.slots)


class KVPool:
    """Keys and values of all sequences of one model replica.

    `data`: [layers, 2 (key, value), kv_heads, slots, head_dim]; freed and padding slots hold finite values, since a NaN
    behind a mask leaks.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = 32,
    ) -> None:
        self.page_size = page_size
        self.pages = -(-tokens // page_size) + 1
        shape = (layers, 2, kv_heads, self.pages * page_size, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._free = np.ones(self.pages, np.bool_)
        self._free[SCRATCH_SLOT // page_size] = False
        self._leases: dict[int, Lease] = {}  # by the object's id: who holds which pages

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be leased."""
        return int(self._free.sum()) * self.page_size

    @property
    def used_pages(self) -> int:
        """Pages in somebody's lease."""
        return self.pages - 1 - int(self._free.sum())

    def lease(self, tokens: int) -> Lease:
        """Slots for `tokens` tokens, consecutive where possible (the attention then reads them in place).

        Raises PoolExhausted.
        """
        lease = Lease(self.page_size)
        lease.add(self._take(max(1, -(-tokens // self.page_size))))
        self._leases[id(lease)] = lease
        return lease

    def extend(self, lease: Lease, tokens: int) -> None:
        """Makes room for `tokens` tokens in all. Raises PoolExhausted and changes nothing."""
        missing = -(-tokens // self.page_size) - len(lease.pages)
        if missing > 0:
            lease.add(self._take(missing))

    def _take(self, count: int) -> list[int]:
        free = np.flatnonzero(self._free)
        if len(free) < count:
            raise PoolExhausted(f"{count} pages asked for, {len(free)} of {self.pages - 1} are free")
        ends = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        start = int(ends[0]) if len(ends) else 0
        pages = [int(page) for page in free[start : start + count]]
        self._free[pages] = False
        return pages

    def release(self, lease: Lease) -> None:
        """Gives a lease back; raises KeyError when it was given back before."""
        del self._leases[id(lease)]
        self._free[lease.pages] = True

    def wipe(self, lease: Lease) -> None:
        """Makes a lease's slots finite again, whatever was computed into them."""
        self.data[:, :, :, lease.slots] = 0.0

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copies slots' keys and values in all layers; all of `source` is read before anything is written."""
        pairs = [(a, b) for a, b in zip(source, destination, strict=True) if a != b]
        if pairs:
            old, new = (torch.tensor(side, device=self.data.device) for side in zip(*pairs, strict=True))
            self.data[:, :, :, new] = self.data[:, :, :, old]

    def check(self) -> None:
        """Audits the pool. Raises AssertionError: a page held twice, lost or both held and free, a non-finite value."""
        held = [page for lease in self._leases.values() for page in lease.pages]
        assert len(set(held)) == len(held), "a page is held twice"
        assert not self._free[held].any(), "a held page is free"
        assert len(held) + int(self._free.sum()) + 1 == self.pages, "a page is lost"
        assert not self._free[SCRATCH_SLOT // self.page_size], "the scratch page is free"
        assert bool(torch.isfinite(self.data).all()), "a slot holds a non-finite value"


class HandleChain:
    """The handles of every prefix of a growing token sequence: digest i+1 hashes digest i with token i."""

    def __init__(self, tokens: Iterable[int] = (), salt: bytes = b"") -> None:
        self._digests = [hashlib.blake2b(salt, digest_size=16).digest()]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        digest = self._digests[-1]
        for token in tokens:
            digest = hashlib.blake2b(digest + token.to_bytes(8, "little"), digest_size=16).digest()
            self._digests.append(digest)

    def try_extend(self, tokens: Iterable[int], digest: bytes) -> bool:
        """Appends tokens if the handle then has this digest; else changes nothing and returns False."""
        before = len(self._digests)
        self.extend(tokens)
        if self._digests[-1] == digest:
            return True
        del self._digests[before:]
        return False

    @property
    def handle(self) -> KVHandle:
        """Of the whole sequence."""
        return KVHandle(len(self._digests) - 1, self._digests[-1])

    def names(self, handle: KVHandle) -> bool:
        """Whether the handle names a prefix of this sequence."""
        return handle.length < len(self._digests) and self._digests[handle.length] == handle.digest
