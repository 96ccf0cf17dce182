"""Who runs on a target and who waits: admission, pages, preemption, and whose prefix is computed in a step.

Admission: first come, first served. A request that doesn't fit yet may be overtaken by a few that do, each at most
OVERTAKING times; then nobody gets in before it. Preemption: the last admitted goes first and waits at the head of the
queue. The oldest always stays, and any request alone fits, so there is always progress.
"""

from collections.abc import Callable, Set

from cluster.intake import Intake, Running, Submitted, Unsent
from engine.elastic import ElasticSequence
from engine.kv import KVPool, PoolExhausted
from engine.types import GenerationRequest

OVERTAKING = 8  # times that a waiting request is overtaken; and so many that don't fit are looked past
_CHUNK = 64  # tokens of the oldest prefix in a step, and more where others leave them
_BURST = 4  # times as many tokens of prefixes in a step where so many wait for their first token, and as many as decode


class Batch:
    """The running requests, in order of admission, and the pages they hold. For the replica's loop alone."""

    def __init__(
        self,
        pool: KVPool,
        intake: Intake,
        make_sequence: Callable[[GenerationRequest], ElasticSequence],
        max_batch: int,
        prefill_tokens: int,
        give_way: Callable[[], bool] = lambda: False,
    ) -> None:
        """prefill_tokens: in one step, over all sequences, so that those that decode keep their pace; more where those that
        wait are many beside them.

        give_way: gives back pages that no request holds; whether there were any.
        """
        self._pool = pool
        self._intake = intake
        self._make_sequence = make_sequence
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._give_way = give_way
        self.running: dict[str, Running] = {}  # by request id
        self.preempted = 0  # times a request gave up its pages to older ones, and waited again
        self.shared = 0  # tokens whose KV was known and not computed, after a preemption too

    def admit(self) -> list[Running]:
        """Lets in what fits; these requests, none of which has a session."""
        entered: list[Running] = []
        ahead: list[Submitted] = []  # that wait on
        for submitted in self._intake.in_line():
            if len(self.running) >= self._max_batch or len(ahead) > OVERTAKING:
                break
            if any(other.overtaken >= OVERTAKING for other in ahead):
                break
            running = self._running_of(submitted)
            if self._fits(running.sequence, may_trim=not ahead):
                running.sequence.enter()
                self._knew(running, running.sequence.computed)
                self.running[submitted.request.request_id] = running
                self._intake.admitted(submitted)
                entered.append(running)
                for other in ahead:
                    other.overtaken += 1
            else:
                ahead.append(submitted)
        return entered

    def make_room(self) -> list[Running]:
        """Pages for everybody's next step, the oldest first; the requests that had to go for that."""
        preempted: list[Running] = []
        for request_id, running in list(self.running.items()):
            while request_id in self.running and not _reserved(running.sequence):
                if not self._trim():
                    preempted.append(self._preempt())
        return preempted

    def prefills(self) -> dict[str, int]:
        """How many tokens of their prefixes the prefilling requests compute in this step, within the bound.

        Those with the fewest left come first, so that the fewest wait for their first token; a part is the oldest one's,
        which goes on in any case, as is what others leave. Who needs a page that another computes in this step computes
        nothing: it takes that page over in the next one.
        """
        waiting = [(name, running) for name, running in self.running.items() if running.sequence.prefilling]
        wait, decode = len(waiting), len(self.running) - len(waiting)
        left = int(self._prefill_tokens * max(1.0, min(_BURST, wait, _BURST * wait / max(1, decode))))
        for _, running in waiting:
            self._knew(running, running.sequence.catch_up())
        pending: dict[str, int] = {}
        claimed: set[bytes | None] = set()
        for name, running in waiting[:1] + sorted(waiting[1:], key=lambda item: item[1].sequence.pending):
            page = running.sequence.next_page
            if running.sequence.prefilling and (page is None or page not in claimed):
                claimed.add(page)
                pending[name] = running.sequence.pending
        if not pending:
            return {}
        oldest, *others = pending
        kept = min(_CHUNK, pending[oldest], left)
        shares: dict[str, int] = {}
        for name in others:
            shares[name] = min(pending[name], left - kept)
            left -= shares[name]
        shares[oldest] = min(pending[oldest], left)
        return {name: tokens for name, tokens in shares.items() if tokens}

    def _knew(self, running: Running, tokens: int) -> None:
        running.unsent.known += 0 if running.preempted else tokens  # its own pages may still be there
        self.shared += tokens

    def leave(self, running: Running) -> bool:
        """A request ends; whether it was running."""
        was_running = self.running.pop(running.submitted.request.request_id, None) is not None
        if was_running:
            running.sequence.leave()
        return was_running

    def check(self, others: Set[int] = frozenset()) -> None:
        """Raises AssertionError when a page is held for nobody, or by somebody who waits. others: pages held elsewhere."""
        self._pool.check()
        held = {page for running in self.running.values() for page in running.sequence.lease.pages}
        assert self._pool.used_pages == len(held | others), "pages are left behind"
        for submitted in self._intake.in_line():
            waiting = submitted.running
            assert waiting is None or not waiting.sequence.lease.pages, "a waiting request holds pages"

    def _running_of(self, submitted: Submitted) -> Running:
        """Made when a request is first looked at; a preempted one has it already."""
        if submitted.running is None:
            request = submitted.request
            submitted.running = Running(submitted, self._make_sequence(request), Unsent(request.request_id))
        return submitted.running

    def _fits(self, sequence: ElasticSequence, may_trim: bool) -> bool:
        """Whether there are pages for it, and one more for each that runs; perhaps with what others can spare."""
        short = self._short(sequence)
        if short > 0 and may_trim and self._give_way():
            short = self._short(sequence)
        if short <= 0:
            return True
        spare = sum(max(0, running.sequence.surplus) for running in self.running.values()) if may_trim else 0
        return spare >= short and self._trim()

    def _short(self, sequence: ElasticSequence) -> int:
        """Pages that are missing to let it in."""
        return sequence.cost + len(self.running) - self._pool.free_tokens // self._pool.page_size

    def _trim(self) -> bool:
        """Takes from everybody what the next step doesn't need; whether there was any. Guesses need nothing."""
        generous = [running for running in self.running.values() if running.sequence.surplus > 0]
        for running in generous:
            running.sequence.trim()
        return self._give_way() or bool(generous)

    def _preempt(self) -> Running:
        """The last admitted gives up its pages and waits, before all others."""
        _, last = self.running.popitem()
        last.sequence.leave()
        last.preempted = True
        self.preempted += 1
        self._intake.put_back(last.submitted)
        return last


def _reserved(sequence: ElasticSequence) -> bool:
    try:
        sequence.reserve()
    except PoolExhausted:
        return False
    return True
