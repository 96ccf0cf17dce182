"""Prefixes: the handles that name them, and a cache of the pages that hold them.

Only full pages are cached, each named by the digest of the prefix that ends with it. This is bookkeeping: who holds a page
and what is in it is for engine.kv. What nobody holds stays until its page is needed, what was used longest ago goes first
(as in vLLM, Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.types import KVHandle

UNKNOWN = -1  # in `PrefixCache.used`


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

    def __len__(self) -> int:
        return len(self._digests) - 1

    def digests(self, every: int) -> list[bytes]:
        """Of the prefixes of `every` tokens, twice as many, and so on."""
        return self._digests[every::every]

    @property
    def handle(self) -> KVHandle:
        """Of the whole sequence."""
        return KVHandle(len(self._digests) - 1, self._digests[-1])

    def names(self, handle: KVHandle) -> bool:
        """Whether the handle names a prefix of this sequence."""
        return handle.length < len(self._digests) and self._digests[handle.length] == handle.digest


@dataclass(slots=True)
class _Entry:
    page: int
    parent: bytes | None  # digest of the prefix before this page; None for the first page
    children: set[bytes] = field(default_factory=set)


class PrefixCache:
    """Pages by digest. An entry's parent is an entry too, so a chain can be followed from its start."""

    def __init__(self, pages: int) -> None:
        self.used = np.full(pages, UNKNOWN, np.int64)  # [pages]: when each was last used; UNKNOWN outside the cache
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}  # by page
        self._clock = 0

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of a chain."""
        pages = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                break
            pages.append(entry.page)
        return pages

    def touch(self, digests: Sequence[bytes]) -> None:
        """A chain is used now; parents count as used after their children, which so go first."""
        for digest in reversed(digests):
            entry = self._entries.get(digest)
            if entry is not None:
                self._mark(entry.page)

    def add(self, parent: bytes | None, digest: bytes, page: int) -> None:
        """Names a page, unless its name is taken or nobody knows what comes before it."""
        if digest in self._entries or not (parent is None or parent in self._entries):
            return
        self._entries[digest] = _Entry(page, parent)
        self._digests[page] = digest
        self._mark(page)
        if parent is not None:
            self._entries[parent].children.add(digest)

    def drop(self, page: int) -> list[int]:
        """Forgets a page and all behind it; these pages. None of them is reached without it."""
        digest = self._digests[page]
        parent = self._entries[digest].parent
        if parent is not None:
            self._entries[parent].children.remove(digest)
        dropped, todo = [], [digest]
        while todo:
            entry = self._entries.pop(todo.pop())
            todo.extend(entry.children)
            dropped.append(entry.page)
            del self._digests[entry.page]
        self.used[dropped] = UNKNOWN
        return dropped

    def _mark(self, page: int) -> None:
        self._clock += 1
        self.used[page] = self._clock

    def check(self) -> None:
        """Raises AssertionError unless names, pages and family ties agree."""
        assert {entry.page: digest for digest, entry in self._entries.items()} == self._digests, "a page has two names"
        assert sorted(self._digests) == np.flatnonzero(self.used != UNKNOWN).tolist(), "a cached page is not marked"
        for digest, entry in self._entries.items():
            parent = self._entries.get(entry.parent) if entry.parent is not None else None
            assert entry.parent is None or parent is not None, "a cached page hangs in the air"
            assert parent is None or digest in parent.children, "a cached page is no child of its parent"
            assert all(self._entries[child].parent == digest for child in entry.children), "a child has another parent"
