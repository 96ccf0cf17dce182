"""A target replica: continuous batching, mirrors, verification, commits. One loop; nothing in it waits for an answer.

A step's life: take in requests and growth, choose each sequence's window from its mirror, run the step, tell the drafts
what was committed, hand out the tokens.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from transformers import PreTrainedTokenizerFast

from cluster.batch import Batch
from cluster.best_place import Place, kind_of
from cluster.intake import TARGET_FAILED, Intake, Running, Sink, Submitted
from cluster.link import Link
from cluster.linked import LinkedDrafts
from cluster.loop import Loop
from cluster.own_guesses import LocalDrafter, OwnGuesses
from cluster.placement import Placement
from cluster.target_state import RENEW_EVERY_S, TargetState
from cluster.target_stats import Tally, TargetStats
from cluster.trace import Trace
from cluster.windows import Windows
from engine.budget import Patience, Window
from engine.drafters.ngram import DOUBTFUL
from engine.drafters.retrieval import Documents
from engine.elastic import ElasticSequence
from engine.grammar import Vocabulary
from engine.runner import ModelRunner
from engine.step import Outcome, Plan, StepError, Stepper, check_request, check_room, rows_of, tried, useful
from engine.types import Down, FinishReason, GenerationRequest, Up
from engine.window_choice import OFF, NamedWindows, check_window

logger = logging.getLogger(__name__)
_AWAKE_S = 0.001  # of a wait for growth: it comes sooner than a core that sleeps, in a virtual machine, is woken


class TargetReplica:
    """Serves requests with one target model, helped by the drafts that are linked. A plain class: actors wrap it."""

    def __init__(
        self,
        runner: ModelRunner,
        window: Window,
        tokenizer: PreTrainedTokenizerFast | None = None,
        placement: Placement | None = None,
        replica: int = 0,
        max_batch: int = 64,
        flush_s: float = 0.0,
        lookup: int = 0,
        prefill_tokens: int = 128,
        on_step: Callable[[int, float, int], None] | None = None,
        local: LocalDrafter | None = None,
        named: NamedWindows | None = None,
        shared: LocalDrafter | None = None,
        places: Sequence[Place] = ("separate",),
        earlier: int = 0,
    ) -> None:
        """window: what is verified where a request names nothing else; `named` makes the windows that requests name.

        flush_s: tokens are handed out at most this often per request.
        lookup: tokens that are looked up in the text so far after each step, beside what drafts guess.
        earlier: tokens of outputs that have ended in which is looked up too; 0: none.

        prefill_tokens: prefix tokens computed in one step, over all requests, beside those that decode; up to four
        times as many where many wait beside these.
        on_step(rows, milliseconds, sequences): called after each step that does nothing but decode, for the cost model.
        local: a drafter of the target's own, which nobody else may use; it runs between two steps.
        shared: the draft in the target's process, for "shared" among the places.
        places: where drafts may run; of several, the one with which it is fastest, as it measures by turns.
        """
        self._runner = runner
        self._own = OwnGuesses(local)
        self._shared = OwnGuesses(shared)
        self._stepper = Stepper(runner, states=self._own.reads_states)
        self._doubtful = shared.doubtful if shared is not None else DOUBTFUL
        self._windows = Windows(window, named or NamedWindows(), shared.effort if shared is not None else None)
        self._vocabulary = Vocabulary(tokenizer, runner.vocab_size) if tokenizer is not None else None
        self._placement = placement or Placement()
        self._flush_s = flush_s
        self._on_step = on_step
        self._state = TargetState(runner.vocab_size, replica, lookup, earlier=earlier)
        self._speculates = True
        self._place: Place = "off"  # of drafts, in this step
        self._patience = Patience()
        self._intake = Intake()
        self._batch = Batch(runner.pool, self._intake, self._sequence, max_batch, prefill_tokens, self._own.give_way)
        self._running = self._batch.running
        self._next_renewal = time.monotonic() + RENEW_EVERY_S
        self._tally = Tally()
        self._stats = self._tally.stats
        self.trace = Trace()
        self._loop = Loop("paceline-target", self._placement, RENEW_EVERY_S, self._turn, self._end_all)
        self._drafts = LinkedDrafts(self._state, self.trace, self._loop, places)
        if not lookup or local is not None:
            self._drafts.never_at("off")  # it is as "none" is; or a drafter would fall behind there
        self._loop.start()

    # from any thread

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queues a request; `sink` gets its chunks on the loop's thread and must be quick.

        An index is made of its documents first: some 0.4 us a token.
        Raises InvalidRequest, Overloaded or Closed.
        """
        self._intake.check_room()
        grammar = self.check_request(request)
        documents = Documents(request.documents) if request.documents else None
        self._intake.submit(Submitted(request, sink, documents, grammar))
        self._loop.do(self._admit)

    def check_request(self, request: GenerationRequest) -> object:
        """Raises InvalidRequest for what can't be run.

        A grammar that was not seen before may take seconds; it is returned, compiled, to be held.
        """
        grammar = check_request(request, self._runner, self._vocabulary)
        check_window(request.window)
        check_room(request, self._runner)
        return grammar

    def cancel(self, request_id: str) -> None:
        """Ends a request within one step; unknown ones are ignored. Its last chunk says "cancelled"."""
        self._loop.do(lambda: self._cancel(request_id))

    def add_link(self, link: Link[Down, Up]) -> None:
        """A draft is there."""
        self._loop.do(lambda: self._drafts.join(link))

    def set_window(self, window: Window) -> None:
        """Of requests that name none, from the next step on."""
        self._loop.do(lambda: self._windows.replace(window))

    def set_speculation(self, on: bool) -> None:
        """Whether anything is verified, from the next step on."""
        self._loop.do(lambda: setattr(self, "_speculates", on))

    def stats(self) -> TargetStats:
        """A snapshot."""
        now = {"running": len(self._running), "waiting": len(self._intake.waiting), "drafts": len(self._drafts)}
        kept = {"preempted": self._batch.preempted, "shared": self._batch.shared}
        return TargetStats(**{**asdict(self._stats), **now, **kept, "link": asdict(self._state.counters)})

    def accepted_at(self) -> list[int]:
        """At index i, in how many sequence steps the draft token i of the path was accepted, and those before it."""
        return self._tally.accepted_at()

    @property
    def pages(self) -> tuple[int, int]:
        """KV pages that requests hold now, and all there are for them."""
        return self._runner.pool.used_pages, self._runner.pool.capacity // self._runner.pool.page_size

    @property
    def alive(self) -> bool:
        """False once it was closed, or failed for good."""
        return self._loop.alive

    @property
    def turn_s(self) -> float:
        """How many seconds the present turn of its loop has taken: one that hangs never ends."""
        return self._loop.turn_s

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until no request is left: True; False after `timeout_s`."""
        return self._loop.wait_idle(timeout_s)

    def check(self) -> None:
        """Audits everything it holds, between two steps. Raises AssertionError."""
        self._loop.ask(self._audit)

    def close(self) -> None:
        """Ends the loop, all requests and all links."""
        self._loop.stop()

    # the loop

    def _turn(self) -> bool:
        started = time.monotonic()
        self._take_in()
        self._drafts.send()  # of sessions just opened: drafts read their prefixes while the target does
        if not self._running:
            return False
        self._step(started)
        return True

    def _end_all(self, failure: Exception | None) -> None:
        for submitted in self._intake.close():
            if failure is None:
                self._end(submitted, "cancelled")
            else:  # what failed stands in the log: it is nothing for clients
                try:
                    self._free(submitted)
                except Exception as error:  # noqa: BLE001 - a device that failed may fail at this, too; others must be told
                    logger.warning("a request's pages could not be freed: %s", error)
                self._intake.end(submitted, submitted.last("error", TARGET_FAILED))
        self._drafts.close()

    def _audit(self) -> None:
        self._batch.check(self._own.pages)
        self._state.check()
        sessions = {running.session for running in self._running.values()}
        self._own.check(sessions)
        self._shared.check(sessions)
        assert self._state.sessions == len(self._running), "a session is left behind"
        for running in self._running.values():
            assert self._state.tokens(running.session) == running.sequence.tokens, "a session has other tokens"

    def _step(self, started: float) -> None:
        """One step for everybody; it began at `started`, with what came in before it."""
        self._guess()
        waited_s = self._wait_on_miss()
        plans = self._plan()
        forward_started = time.monotonic()
        try:
            outcomes = self._stepper.step(plans)
        except StepError as error:  # nothing was committed: the others take this step again
            self._shared.stepped(plans, [])
            self._end(self._running[error.request_id].submitted, "error", str(error))
            return
        forward_s = time.monotonic() - forward_started
        self._shared.stepped(plans, outcomes)
        self._account(plans, outcomes, forward_s, forward_started)
        self._drafts.receive()  # what grew during the step, before the roots move
        for plan, outcome in zip(plans, outcomes, strict=True):
            running = self._running[plan.sequence.request.request_id]
            self._commit(running, plan, outcome)
            if plan.sequence.finish_reason is not None:
                self._tell(running, outcome)  # at once: drafts hear of the end with the last commit
        decoded = any(outcome.decoded for outcome in outcomes)
        if decoded:
            self._drafts.stepped()
        self._drafts.send()  # and only then the clients hear of it, whom the drafts need not wait for
        for outcome in outcomes:
            if outcome.tokens and outcome.sequence.finish_reason is None:
                self._tell(self._running[outcome.sequence.request.request_id], outcome)
        if decoded:
            step_s = time.monotonic() - started
            self._stats.active_s += step_s
            self._stats.places[self._place] += 1
            self._learn(plans, outcomes, step_s, waited_s)

    def _guess(self) -> None:
        """What the target's own process guesses goes into the mirrors. Where drafts run in this step is settled here."""
        if not self._shared.works:
            self._drafts.never_at("shared")
        self._place = self._drafts.place if self._speculates else "off"
        self._windows.takes_turns(self._place == "shared")
        doubtful = self._doubtful if self._place == "shared" else DOUBTFUL
        off = self._place == "off"
        self._state.doubtful = math.inf if off else max(doubtful, self._windows.least(len(self._running)))
        if self._place != "shared":
            self._shared.rest()
        if not off:
            self._own.hang(self._state.mirror)
            self._shared.hang(self._state.mirror)

    def _plan(self) -> list[Plan]:
        """The window of every decoding sequence that has a draft; the others run without. Some prefixes wait."""
        plans = []
        prefills = self._batch.prefills()
        speculating = [running for running in self._running.values() if self._can_speculate(running)]
        trees = [self._state.mirror(running.session) for running in speculating]
        decoding = sum(not running.sequence.prefilling for running in self._running.values())
        windows = [running.window for running in speculating]
        choices, expected = self._windows.choose(windows, trees, decoding - len(speculating))
        chosen = dict(zip((running.session for running in speculating), choices, strict=True))
        self._stats.expected += expected
        for request_id, running in self._running.items():
            if running.sequence.prefilling:
                if request_id in prefills:
                    plans.append(Plan(running.sequence, prefill=prefills[request_id]))
            else:
                nodes = chosen.get(running.session)
                tree = self._state.mirror(running.session) if nodes is not None else None
                if tree is not None and nodes is not None:
                    nodes = useful(running.sequence, tree, nodes)
                plans.append(Plan(running.sequence, tree, nodes))
        return plans

    def _can_speculate(self, running: Running) -> bool:
        speculates = self._place != "off" and running.window != OFF
        return speculates and not running.sequence.prefilling and self._state.hit(running.session)

    def _wait_on_miss(self) -> float:
        """Waits a bounded time for growth when every sequence missed: one's miss never holds up another's hit.

        Returns the seconds it waited.
        """
        decoding = [running for running in self._running.values() if not running.sequence.prefilling]
        if not decoding or len(decoding) < len(self._running) or self._place == "off":
            return 0.0
        waiting = [running for running in decoding if running.sequence.left > 1]  # a last token takes no guesses
        missed = [running for running in waiting if self._state.attached(running.session)]
        if len(missed) < len(decoding) or any(self._state.hit(running.session) for running in missed):
            return 0.0
        limit_s = self._patience.limit_s()
        if limit_s <= 0:
            return 0.0
        started = time.monotonic()
        arrived = False
        while not arrived and (left := started + limit_s - time.monotonic()) > 0:
            self._loop.listen()
            self._drafts.receive()
            arrived = any(self._state.hit(running.session) for running in missed)
            if arrived or self._loop.asked:
                break
            if left > limit_s - _AWAKE_S:
                os.sched_yield()  # who shares this core goes first
            elif not self._loop.pause(left):
                break
        waited = time.monotonic() - started
        if arrived or not self._loop.asked:  # else it was cut short, which says nothing of the draft
            self._patience.waited(waited, arrived)
        self._stats.wait_s += waited
        self.trace.add("wait", started, int(arrived))
        return waited

    def _account(self, plans: list[Plan], outcomes: list[Outcome], forward_s: float, started: float) -> None:
        """What a step is remembered by: the trace, the statistics, the cost of its rows."""
        rows = rows_of(plans)
        for plan, outcome in zip(plans, outcomes, strict=True):
            if plan.tree is not None and outcome.path:  # what others had guessed by then is not the draft's merit
                session = self._running[plan.sequence.request.request_id].session
                self._drafts.accepted(session, int(plan.tree.sent[outcome.path].sum()))
        self.trace.add("target step", started, rows)
        self._tally.step(plans, outcomes, forward_s)
        if self._on_step is not None and outcomes and all(outcome.decoded for outcome in outcomes):
            self._on_step(rows, 1000 * forward_s, len(plans))

    def _learn(self, plans: list[Plan], outcomes: list[Outcome], step_s: float, waited_s: float) -> None:
        """What a step brought and how long it took says how long the next miss may wait, and where drafts are best."""
        decoded = [outcome for outcome in outcomes if outcome.decoded]
        tokens = sum(len(outcome.tokens) for outcome in decoded)
        if len(decoded) == len(outcomes):
            accepted = sum(outcome.accepted for outcome in outcomes)
            verified = any(plan.nodes is not None and len(plan.nodes) for plan in plans)
            self._patience.stepped(step_s - waited_s, tokens, accepted, verified)
        if self._speculates:
            greedy = all(outcome.sequence.request.params.temperature == 0 for outcome in decoded)
            self._drafts.took(kind_of(len(decoded), greedy), tokens, step_s, sum(plan.prefill or 0 for plan in plans))

    def _commit(self, running: Running, plan: Plan, outcome: Outcome) -> None:
        """Moves the roots of what was committed, which the drafts are told with the next messages."""
        if not outcome.tokens and outcome.sequence.finish_reason is None:
            return
        verified = plan.nodes is not None and len(plan.nodes) > 0
        if verified and plan.tree is not None and plan.nodes is not None:
            seen = tried(plan.tree, plan.nodes, outcome.accepted, len(outcome.tokens))
            self._windows.observe(running.window, plan.tree, seen, outcome.path)
        self._stats.drafted += verified
        self._stats.empty += outcome.decoded and not verified and self._state.attached(running.session)
        if outcome.tokens:
            if running.window != OFF:
                self._own.committed(running.session, plan, outcome)
                if self._place == "shared":
                    self._shared.committed(running.session, plan, outcome)
            hit = self._state.tokens_committed(running.session, outcome.tokens)
            self._stats.hits += hit and outcome.decoded

    def _tell(self, running: Running, outcome: Outcome) -> None:
        """What a step brought goes to the client, now or a little later."""
        running.unsent.add(outcome.tokens, outcome.accepted, outcome.logprobs)
        reason = running.sequence.finish_reason
        if reason is not None:
            self._end(running.submitted, reason, running.sequence.error)
        elif time.monotonic() - running.flushed >= self._flush_s:
            self._hand_out(running)

    # requests

    def _take_in(self) -> None:
        """What the drafts said since the last step; pages for the next one; and the waiting requests that fit now."""
        self._drafts.receive()
        if time.monotonic() > self._next_renewal:
            self._next_renewal = time.monotonic() + RENEW_EVERY_S
            self._state.renewal_due()
        for running in self._batch.make_room():
            self._pause(running)
        self._admit()

    def _admit(self) -> None:
        for running in self._batch.admit():
            self._start(running)

    def _sequence(self, request: GenerationRequest) -> ElasticSequence:
        return ElasticSequence(request, self._runner, self._vocabulary)

    def _start(self, running: Running) -> None:
        """A request starts, or goes on after it was preempted."""
        sequence, submitted = running.sequence, running.submitted
        self._stats.requests += not running.started
        running.started = True
        request = submitted.request
        alone = running.window == OFF
        running.session = self._state.session_opened(sequence.tokens, request.params, len(request.prompt), alone)
        if submitted.documents is not None and not alone:
            self._own.ground(running.session, sequence.tokens, request.params, submitted.documents)
        if sequence.finish_reason is not None:  # the resumed output ended already
            self._end(submitted, sequence.finish_reason)

    def _pause(self, running: Running) -> None:
        """A request was preempted: its client gets what there is, its draft forgets it."""
        self._close_session(running)
        if running.unsent.tokens:
            self._hand_out(running)

    def _close_session(self, running: Running) -> None:
        self._state.session_closed(running.session)
        self._own.close(running.session)
        self._shared.close(running.session)

    def _hand_out(self, running: Running) -> None:
        running.flushed = time.monotonic()
        running.submitted.sink(running.unsent.flush())

    def _cancel(self, request_id: str) -> None:
        submitted = self._intake.find(request_id)
        if submitted is not None:
            self._end(submitted, "cancelled")

    def _end(self, submitted: Submitted, reason: FinishReason, error: str | None = None) -> None:
        """Frees everything and says so to the client, with the tokens it did not get yet."""
        self._free(submitted)
        self._intake.end(submitted, submitted.last(reason, error))

    def _free(self, submitted: Submitted) -> None:
        running = submitted.running
        if running is not None and self._batch.leave(running):
            self._close_session(running)
