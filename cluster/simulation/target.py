"""A target replica on the virtual clock: cluster.target's loop with its own state, batch, window and patience.

No model runs: the tokens are known, and a step takes the time that its rows cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.batch import Batch
from cluster.intake import Intake, Running, Submitted
from cluster.simulation.clock import Clock
from cluster.simulation.costs import Costs
from cluster.simulation.script import Script
from cluster.target_state import MIRROR_NODES, TargetState
from cluster.target_stats import TargetStats
from cluster.windows import Windows
from engine.budget import Patience, Window
from engine.drafters import Drafter
from engine.drafters.ngram import DOUBTFUL
from engine.elastic import ElasticSequence
from engine.kv import KVPool, Lease
from engine.prefix import HandleChain
from engine.step import tried, useful
from engine.tree import TokenTree
from engine.types import Down, GenerationRequest, IntArray, Origin, TokenChunk, Up
from engine.verify import walk
from engine.window_choice import NamedWindows

_VOCABULARY = 2**31 - 1  # ids of scripts are below
_NOTHING = np.zeros(0, np.int32)


class SimulatedSequence(ElasticSequence):
    """A sequence without a model: its KV is counted, nothing is in it."""

    def __init__(self, request: GenerationRequest, pool: KVPool) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.limit = len(request.prompt) + request.params.max_tokens
        self.computed = 0
        self.finish_reason = self.error = self.noise = self.processors = self._text = None
        self._ends = set()
        self._pool = pool
        self._chain = HandleChain((), request.salt)
        self.lease = Lease(pool.page_size)


@dataclass(frozen=True, slots=True)
class Turns:
    """Sequential speculation: target and draft take turns, `length` draft steps before each of the target's."""

    drafter: Drafter  # its trees are chains
    length: int


@dataclass
class _Step:
    """What a step does, decided when it begins."""

    prefills: dict[str, int]  # tokens by request
    windows: dict[str, tuple[TokenTree, IntArray]]  # by request: the tree and which of its nodes are verified
    began: float
    waited_ms: float = 0.0
    forward_ms: float = 0.0


@dataclass
class Limits:
    """What fits in a replica, as cluster.target and cluster.actors have it."""

    kv_tokens: int = 32768
    max_batch: int = 64
    prefill_tokens: int = 128  # in one step; see cluster.batch
    prefills: bool = True  # prompts take time
    mirror_nodes: int = MIRROR_NODES


@dataclass
class _Wait:
    began: float
    over: bool = False


class SimulatedTarget:
    """Serves scripted requests; `on_chunk` hears of every chunk."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        window: Window,
        limits: Limits,
        replica: int = 0,
        lookup: int = 0,
        turns: Turns | None = None,
        patient: bool = True,
    ) -> None:
        """turns: speculate sequentially. patient: a miss may wait for growth."""
        self._clock = clock
        self._costs = costs
        self._windows = Windows(window, NamedWindows())
        self._turns = turns
        self._patient = patient
        self._prefills = limits.prefills
        self._state = TargetState(_VOCABULARY, replica, lookup, limits.mirror_nodes)
        self._patience = Patience()
        self._drafts: list[Callable[[Sequence[Down]], None]] = []
        self._inbox: list[tuple[int, Up]] = []
        self._intake = Intake()
        pool = KVPool(1, 1, 1, limits.kv_tokens, torch.bfloat16)
        self._batch = Batch(
            pool,
            self._intake,
            lambda request: SimulatedSequence(request, pool),
            limits.max_batch,
            limits.prefill_tokens,
        )
        self._running = self._batch.running
        self._scripts: dict[str, Script] = {}
        self._wait: _Wait | None = None
        self._resting = True
        self.stats = TargetStats()

    # events

    def add_draft(self, send: Callable[[Sequence[Down]], None]) -> Callable[[Sequence[Up]], None]:
        """A draft is there, which `send` reaches; what it sends its messages with."""
        draft = len(self._drafts)
        self._drafts.append(send)
        self._state.draft_joined(draft)
        return lambda messages: self._arrive(draft, messages)

    def submit(self, script: Script, sink: Callable[[TokenChunk], None]) -> None:
        """Queues a request; its output is known."""
        self._scripts[script.request.request_id] = script
        self._intake.submit(Submitted(script.request, sink))
        if self._wait is not None:
            self._end_wait(self._wait, arrived=None)
        elif self._resting:
            self._resting = False
            self._turn()

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._intake.waiting)

    def _arrive(self, draft: int, messages: Sequence[Up]) -> None:
        self._inbox.extend((draft, message) for message in messages)
        if self._wait is not None:
            self._receive()
            if any(self._state.hit(running.session) for running in self._running.values()):
                self._end_wait(self._wait, arrived=True)

    # the loop

    def _turn(self) -> None:
        """Takes in what came, and begins a step if there is anything to do."""
        self._receive()
        for running in self._batch.make_room():
            self._leave(running)
            self.stats.preempted += 1
        for running in self._batch.admit():
            self._enter(running)
        self._send()
        if not self._running:
            self._resting = True
        elif (limit_s := self._limit_s()) > 0:
            wait = self._wait = _Wait(self._clock.now)
            self._clock.after(1000 * limit_s, lambda: self._end_wait(wait, arrived=False))
        else:
            self._begin(_Step({}, {}, self._clock.now))

    def _limit_s(self) -> float:
        """How long the step may wait for growth: only if all sequences decode, take guesses, and missed."""
        running = self._running.values()
        if not self._patient or self._turns is not None or any(each.sequence.prefilling for each in running):
            return 0.0
        if any(each.sequence.left <= 1 or not self._state.attached(each.session) for each in running):
            return 0.0
        if any(self._state.hit(each.session) for each in running):
            return 0.0
        return self._patience.limit_s()

    def _end_wait(self, wait: _Wait, arrived: bool | None) -> None:
        """arrived: None where it was cut short, which says nothing of the draft."""
        if wait.over:
            return
        wait.over, self._wait = True, None
        waited_ms = self._clock.now - wait.began
        if arrived is not None:
            self._patience.waited(waited_ms / 1000, arrived)
        self._begin(_Step({}, {}, wait.began, waited_ms))

    def _begin(self, step: _Step) -> None:
        """Chooses what the step does; it ends when its rows have had their time."""
        step.prefills = self._batch.prefills()
        decoding = {name: running for name, running in self._running.items() if not running.sequence.prefilling}
        self._state.doubtful = max(DOUBTFUL, self._windows.least(len(self._running)))
        drafting_ms = self._draft(len(decoding)) if decoding else 0.0
        step.windows = self._choose(decoding)
        verified = sum(len(nodes) for _, nodes in step.windows.values())
        rows = len(decoding) + sum(step.prefills.values()) + verified
        step.forward_ms = self._costs.target_ms(rows)
        self._clock.after(drafting_ms + step.forward_ms + self._costs.overhead_ms, lambda: self._end(step))

    def _choose(self, decoding: dict[str, Running]) -> dict[str, tuple[TokenTree, IntArray]]:
        """The windows of those that hold guesses; the others run without."""
        trees = {name: self._tree(running.session) for name, running in decoding.items()}
        trees = {name: tree for name, tree in trees.items() if tree.size > 1}
        names = [decoding[name].window for name in trees]
        choices, expected = self._windows.choose(names, list(trees.values()), len(decoding) - len(trees))
        self.stats.expected += expected
        return {
            name: (tree, useful(decoding[name].sequence, tree, nodes))
            for (name, tree), nodes in zip(trees.items(), choices, strict=True)
        }

    def _draft(self, sequences: int) -> float:
        """The draft's turn, where it takes turns; its milliseconds."""
        if self._turns is None:
            return 0.0
        worked = [self._turns.drafter.grow() for _ in range(self._turns.length)]
        return sum(self._costs.draft_ms(max(sequences, len(sessions))) for sessions in worked)

    def _end(self, step: _Step) -> None:
        self._receive()  # what grew during the step, before the roots move
        before = self.stats.decoded, self.stats.accepted
        decoded = [name for name, running in self._running.items() if not running.sequence.prefilling]
        for name, running in list(self._running.items()):
            if name in step.prefills:
                running.sequence.advance(running.sequence.computed + step.prefills[name])
                finished = running.sequence.computed == len(running.sequence.tokens)
                if finished:
                    self._commit(name, running, TokenTree(running.sequence.tokens[-1], 1), _NOTHING, first=True)
            elif name in decoded:
                tree, nodes = step.windows.get(name, (self._tree(running.session), _NOTHING))
                self._commit(name, running, tree, nodes)
        self._send()
        self._account(step, decoded, before)
        self._turn()

    def _account(self, step: _Step, decoded: list[str], before: tuple[int, int]) -> None:
        """The statistics, as cluster.target has them, and what a miss learns of."""
        stats = self.stats
        tokens, accepted = stats.decoded - before[0], stats.accepted - before[1]
        if not decoded:
            stats.prefill_s += step.forward_ms / 1000
            return
        seconds = (self._clock.now - step.began) / 1000
        stats.steps += 1
        stats.forward_s += step.forward_ms / 1000
        stats.wait_s += step.waited_ms / 1000
        stats.active_s += seconds
        if not step.prefills:
            verified = any(len(nodes) for _, nodes in step.windows.values())
            self._patience.stepped(seconds - step.waited_ms / 1000, tokens, accepted, verified)

    def _commit(self, name: str, running: Running, tree: TokenTree, nodes: IntArray, first: bool = False) -> None:
        """The walk, and everybody who hears of it. first: the step read the end of the prompt."""
        script, sequence, stats = self._scripts[name], running.sequence, self.stats
        done = len(sequence.tokens) - len(script.request.prompt)
        left = script.output[done:]
        verified = len(nodes) > 0
        chosen = [left[depth] if depth < len(left) else -1 for depth in (0, *tree.depth[nodes].tolist())]
        rows, refused = walk(tree, nodes, np.asarray(chosen, np.int32))
        tokens, path = [chosen[row] for row in rows], [int(nodes[row - 1]) for row in rows[1:]]
        taken = sequence.append([token for token in tokens if token >= 0])
        sequence.advance(len(sequence.tokens) - 1)
        accepted = min(len(path), len(taken))
        stats.tried += accepted + (refused and accepted < len(taken))
        stats.accepted += accepted
        stats.tokens += len(taken)
        stats.decoded += len(taken) * (not first)
        stats.sequence_steps += not first
        stats.verified += len(nodes)
        stats.drafted += verified
        stats.empty += not (first or verified) and self._state.attached(running.session)
        if verified:
            seen = tried(tree, nodes, accepted, len(taken))
            self._windows.observe(running.window, tree, seen, path[:accepted])
        stats.hits += self._advance(running.session, taken) and not first
        finished = sequence.finish_reason
        origins: list[Origin] = ["draft" if i < accepted else "target" for i in range(len(taken))]
        chunk = TokenChunk(name, tuple(taken), tuple(origins), finished)
        if finished is None:
            running.submitted.sink(chunk)
        else:
            self._batch.leave(running)
            self._leave(running)
            self._intake.end(running.submitted, chunk)

    # sessions: with drafts beside, or with one that takes turns

    def _enter(self, running: Running) -> None:
        tokens, request = running.sequence.tokens, running.submitted.request
        if not self._prefills:
            running.sequence.advance(len(tokens) - 1)
        self.stats.requests += not running.started
        running.started = True
        running.session = self._state.session_opened(tokens, request.params, len(request.prompt))
        if self._turns is not None:
            self._turns.drafter.open(running.session, tokens, request.params, len(request.prompt))

    def _advance(self, session: int, tokens: list[int]) -> bool:
        """A session goes on behind these tokens; whether its mirror hit."""
        hit = self._state.tokens_committed(session, tokens)
        if self._turns is not None:
            self._turns.drafter.commit(session, tokens)
        return hit

    def _leave(self, running: Running) -> None:
        self._state.session_closed(running.session)
        if self._turns is not None:
            self._turns.drafter.close(running.session)

    def _tree(self, session: int) -> TokenTree:
        return self._state.mirror(session) if self._turns is None else self._turns.drafter.tree(session)

    # messages

    def _receive(self) -> None:
        for draft, message in self._inbox:
            self._state.received(draft, message)
        self._inbox.clear()

    def _send(self) -> None:
        for draft, messages in self._state.take_messages().items():
            self._drafts[draft](messages)
