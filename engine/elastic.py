"""Sequences whose KV grows with them, begins with what the pool knows already, and can be given up and taken again."""

from collections.abc import Sequence as Seq

from engine.grammar import Vocabulary
from engine.kv import KVPool, Lease
from engine.prefix import HandleChain
from engine.runner import ModelRunner
from engine.step import MAX_WINDOW, Sequence
from engine.types import GenerationRequest


class ElasticSequence(Sequence):
    """A sequence that holds no KV until it enters a batch, and none after it left.

    Everything else it keeps: tokens, the state of its stop strings. So it goes on where it was, once it has
    computed again what the pool forgot meanwhile.
    """

    def __init__(self, request: GenerationRequest, runner: ModelRunner, vocabulary: Vocabulary | None) -> None:
        """Raises InvalidRequest."""
        super().__init__(request, runner, vocabulary)
        self._pool = runner.pool
        self._chain = HandleChain((), request.salt)  # follows the tokens as pages fill

    def _first_lease(self, pool: KVPool) -> Lease:
        return Lease(pool.page_size)

    @property
    def cost(self) -> int:
        """Pages that nobody else holds, which it takes to enter."""
        return self._pool.cost(len(self.tokens), self._need, self._digests())

    def enter(self) -> None:
        """Takes KV for its tokens and the next step, and shares what is known of them. Raises PoolExhausted."""
        room = self._room(self._whole)
        self.lease, self.computed = self._pool.lease_known(len(self.tokens), room, self._digests())

    def reserve(self) -> None:
        """Makes room for the next step. Raises PoolExhausted."""
        if self.lease.capacity < self._need:
            self._pool.extend(self.lease, self._room(self._whole - self.lease.capacity))

    @property
    def surplus(self) -> int:
        """Pages that the next step doesn't need."""
        return len(self.lease.pages) - -(-self._need // self._pool.page_size)

    def trim(self) -> None:
        """Gives back what the next step doesn't need."""
        self._pool.trim(self.lease, self._need)

    def leave(self) -> None:
        """Gives up its KV; full pages stay cached while nobody needs them."""
        self._pool.release(self.lease, self._need)
        self.lease = Lease(self._pool.page_size)
        self.computed = 0

    def advance(self, computed: int) -> None:
        """See Sequence. Pages that are full now can be shared."""
        super().advance(computed)
        full = computed // self._pool.page_size
        if full > len(self.lease.sealed):
            self._pool.seal(self.lease, self._digests()[:full])

    def catch_up(self) -> int:
        """Takes over what others have computed of its prefix since it entered; how many tokens that saves."""
        size = self._pool.page_size
        self._pool.adopt(self.lease, self._digests()[: (len(self.tokens) - 1) // size])
        saved = max(0, len(self.lease.sealed) * size - self.computed)
        self.computed += saved
        return saved

    @property
    def next_page(self) -> bytes | None:
        """The digest of the page it computes next; None when its tokens don't fill that."""
        digests = self._digests()
        done = len(self.lease.sealed)
        return digests[done] if done < len(digests) else None

    @property
    def _need(self) -> int:
        """Tokens: its own, and the largest step."""
        return len(self.tokens) + MAX_WINDOW + 1

    @property
    def _whole(self) -> int:
        """Tokens it may ever need: a lease of all at once is consecutive, which attention reads faster."""
        return self.limit + MAX_WINDOW + 1

    def _room(self, missing: int) -> int:
        """All it may ever need, as long as that leaves as much to others; else only what it needs now."""
        return self._whole if 2 * missing <= self._pool.free_tokens else self._need

    def _digests(self) -> Seq[bytes]:
        """Of its prefixes by full pages."""
        self._chain.extend(self.tokens[len(self._chain) :])
        return self._chain.digests(self._pool.page_size)
