"""One target step: run the sequences' rows, let the target choose, walk each tree, commit what was accepted."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine import noise, sampling
from engine.attention import SequenceRows, chain_rows
from engine.grammar import Vocabulary
from engine.kv import KVPool, Lease
from engine.processors import Paths, check_known, make_processors
from engine.runner import ModelRunner
from engine.text import OutputText
from engine.tree import TokenTree
from engine.types import (
    FinishReason,
    GenerationRequest,
    IntArray,
    SamplingParams,
    TokenLogprobs,
    check_prompt,
    require,
)
from engine.verify import walk

MAX_WINDOW = 63  # draft tokens per step and sequence; a sequence's lease has room for them behind its last token

_NONE = -1  # the choice where no token is allowed
NOTHING_ALLOWED = "no token is allowed here: the grammar, bad words and min_tokens exclude each other"


class Sequence:
    """A running request on the target: its tokens, how many of them have KV, and why it ended, once it did."""

    def __init__(
        self,
        request: GenerationRequest,
        runner: ModelRunner,
        vocabulary: Vocabulary | None,
    ) -> None:
        """Leases KV for the whole request; raises InvalidRequest or PoolExhausted."""
        params = request.params
        self.request = request
        self.tokens = [*request.prompt, *request.resume_tokens]
        self.limit = len(request.prompt) + params.max_tokens  # tokens in all
        check_request(request, runner, vocabulary)
        self.computed = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # set with the finish reason "error"
        self._ends = end_tokens(params, runner, vocabulary)
        self.processors = make_processors(
            params, self.tokens, len(request.prompt), self._ends, runner.vocab_size, vocabulary
        )
        self._text: OutputText | None = None
        if params.stop and vocabulary is not None:
            self._text = OutputText(vocabulary.tokenizer, params.stop, params.min_tokens, request.prompt)
        self.lease = self._first_lease(runner.pool)  # last: nothing below may refuse the request
        for token in request.resume_tokens:
            self._check_end(token)

    def _first_lease(self, pool: KVPool) -> Lease:
        return pool.lease(self.limit + MAX_WINDOW + 1)

    def advance(self, computed: int) -> None:
        """So many of its tokens have KV now."""
        self.computed = computed

    @property
    def prefilling(self) -> bool:
        """Whether committed tokens other than the last still need KV."""
        return self.computed < len(self.tokens) - 1

    @property
    def pending(self) -> int:
        """Committed tokens without KV."""
        return len(self.tokens) - self.computed

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.limit - len(self.tokens)

    def append(self, tokens: list[int]) -> list[int]:
        """Commits tokens up to the first that ends the request; returns the committed ones."""
        taken: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            taken.append(token)
            self._check_end(token)
            if self.finish_reason is None and self.left <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.processors is not None:
            self.processors.extend(taken)
        return taken

    def fail(self, error: str) -> None:
        """Ends the request."""
        self.finish_reason, self.error = "error", error

    def _check_end(self, token: int) -> None:
        if token in self._ends:
            self.finish_reason = "stop"
        if self._text is not None:
            self._text.push(token)
            if self._text.stopped:
                self.finish_reason = "stop"


def end_tokens(params: SamplingParams, runner: ModelRunner, vocabulary: Vocabulary | None) -> set[int]:
    """The token ids that end an output: the request's own, those of the model's generation config, and its grammar's."""
    ids = None if params.ignore_eos else runner.model.generation_config.eos_token_id
    ends = {*params.stop_token_ids, *(ids if isinstance(ids, list) else [] if ids is None else [ids])}
    return ends | vocabulary.ends(ends) if vocabulary is not None and params.grammar is not None else ends


def check_request(request: GenerationRequest, runner: ModelRunner, vocabulary: Vocabulary | None) -> object:
    """Raises InvalidRequest for what can't be run: an empty or too long prompt, unknown tokens, a senseless grammar.

    Returns its grammar, compiled: as long as somebody holds it, it is not compiled again.
    """
    params = request.params
    require(vocabulary is not None or not params.stop, "stop", "stop strings need the model's tokenizer")
    require(vocabulary is not None or not params.grammar, "grammar", "grammars need the model's tokenizer")
    check_known(params, runner.vocab_size)
    check_prompt(request, runner.vocab_size, runner.max_length)
    if vocabulary is None or params.grammar is None:
        return None
    end_tokens(params, runner, vocabulary)  # raises where nothing could end it
    return vocabulary.compile(params.grammar)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does for one sequence."""

    sequence: Sequence
    tree: TokenTree | None = None  # its root is the sequence's last token
    nodes: IntArray | None = None  # the window: nodes of the tree to verify, with their ancestors, in index order
    prefill: int | None = None  # while prefilling: at most so many tokens; None: a chunk


def rows_of(plans: Seq[Plan]) -> int:
    """Of a step that only decodes: one for each sequence, and one for each node."""
    return sum(1 + (len(plan.nodes) if plan.nodes is not None else 0) for plan in plans)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence."""

    sequence: Sequence
    tokens: list[int]  # newly committed; empty while prefilling, but for the end of the prefix
    accepted: int  # how many of them were draft tokens
    tried: int  # draft tokens compared with the target's along the walk: the accepted ones and at most one refused
    path: list[int]  # the accepted nodes of the tree
    margins: list[float]  # of each newly committed token, when asked for
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each newly committed token, when asked for
    choices: list[int] = field(default_factory=list)  # the target's tokens behind the root and each verified node
    state: torch.Tensor | None = None  # [hidden_size], final: what the last new token was chosen from, when asked for
    decoded: bool = True  # False: the step read a part of its prefix, and committed a token if that was the end


def useful(sequence: Sequence, tree: TokenTree, nodes: IntArray) -> IntArray:
    """Those of a window's nodes that can be committed: deeper ones are behind the last token that was asked for."""
    return nodes[tree.depth[nodes] < sequence.left]


def tried(tree: TokenTree, nodes: IntArray, accepted: int, committed: int) -> IntArray:
    """Those of the verified nodes of which a step says how good they were, of whose tokens so many were draft tokens: where
    an output ended with one of them, nobody knows of those behind.
    """
    return nodes[tree.depth[nodes] <= accepted] if accepted == committed else nodes


def check_room(request: GenerationRequest, runner: ModelRunner) -> None:
    """Raises InvalidRequest for a request that would not fit into the target's KV even alone."""
    total, room = len(request.prompt) + request.params.max_tokens, runner.pool.capacity - MAX_WINDOW - 1
    require(total <= room, "prompt", f"prompt and max_tokens make {total} tokens; the target has room for {room}")


class StepError(RuntimeError):
    """The target's output is unusable (not a number); names the request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the target's logits for request {request_id} are not finite")
        self.request_id = request_id


class Stepper:
    """Runs target steps.

    margins: also compute how close to a tie every choice was. states: hand out the hidden states of last tokens.
    """

    def __init__(
        self, runner: ModelRunner, prefill_chunk: int = 64, margins: bool = False, states: bool = False
    ) -> None:
        self.runner = runner
        self._prefill_chunk = prefill_chunk
        self._margins = margins
        self._states = states

    def step(self, plans: list[Plan]) -> list[Outcome]:
        """One forward pass over all plans. Raises StepError, before anything is committed for anybody.

        Guesses that numbers may have failed at are taken out of `plans`, and the pass is made again.
        """
        batch = [self._rows(plan) for plan in plans]
        counts = [len(rows.tokens) - rows.wanted for rows in batch]
        try:
            logits, choices, margins = self._choose(plans, batch, counts)
        except StepError as error:
            if not self._leave_out_guesses(plans, error.request_id):
                raise
            return self.step(plans)
        outcomes = []
        stop = 0
        for plan, rows, count in zip(plans, batch, counts, strict=True):
            own = slice(stop, stop := stop + count)
            outcomes.append(self._commit(plan, rows, own, logits, choices, margins))
        return self._with_states(plans, outcomes, counts) if self._states else outcomes

    def _choose(
        self, plans: Seq[Plan], batch: list[SequenceRows], counts: list[int]
    ) -> tuple[torch.Tensor, IntArray, list[float]]:
        """The logits of all wanted rows, the target's token after each [n], or _NONE, and their margins when asked for.

        counts: wanted rows of each plan.
        """
        params = [plan.sequence.request.params for plan, n in zip(plans, counts, strict=True) for _ in range(n)]
        keys = self._keys(batch, params)
        if any(plan.sequence.processors is not None for plan in plans):
            logits = self.runner.forward(batch)
            self._check_finite(plans, logits, counts, math.isfinite(logits.sum().item()))
            processed = self._process(plans, batch, logits, counts)
            choices = sampling.choose(processed, params, keys)
            choices[(~(processed.amax(-1) > -torch.inf)).cpu().numpy()] = _NONE
        else:
            passed = self.runner.best(batch, params, keys, 1)
            logits = processed = passed.logits
            self._check_finite(plans, logits, counts, passed.finite)
            choices = sampling.settled(passed.best, logits, params, keys)
        margins: list[float] = sampling.margins(processed, params, keys).tolist() if self._margins else []
        return logits, choices, margins

    def _check_finite(self, plans: Seq[Plan], logits: torch.Tensor, counts: list[int], finite: bool) -> None:
        """finite: whether the sum of all logits is."""
        if not finite:
            rows = torch.isfinite(logits.sum(-1))
            for plan, part in zip(plans, rows.split(counts), strict=True):
                if not bool(part.all()):
                    self.runner.pool.wipe(plan.sequence.lease, plan.sequence.computed)
                    raise StepError(plan.sequence.request.request_id)

    def _leave_out_guesses(self, plans: list[Plan], request_id: str) -> bool:
        """A request's draft tokens may be what its numbers failed at. Whether it had any."""
        at = next(at for at, plan in enumerate(plans) if plan.sequence.request.request_id == request_id)
        nodes = plans[at].nodes
        if nodes is None or len(nodes) == 0:
            return False
        plans[at] = replace(plans[at], tree=None, nodes=None)
        return True

    def _with_states(self, plans: Seq[Plan], outcomes: list[Outcome], counts: list[int]) -> list[Outcome]:
        """Adds the hidden states at the ends of the walks; counts: wanted rows of each plan."""
        told = []
        for plan, outcome, states in zip(plans, outcomes, self.runner.hidden.split(counts), strict=True):
            row = 0  # the root's
            if plan.nodes is not None and outcome.path:
                row = 1 + int(np.searchsorted(plan.nodes, outcome.path[-1]))
            told.append(replace(outcome, state=states[row]) if outcome.tokens else outcome)
        return told

    def _rows(self, plan: Plan) -> SequenceRows:
        sequence = plan.sequence
        if sequence.prefilling:
            pending = sequence.tokens[sequence.computed :]
            chunk = pending[: plan.prefill or self._prefill_chunk]
            done = len(chunk) == len(pending)
            return chain_rows(sequence.lease, sequence.computed, chunk, len(chunk) - 1 if done else len(chunk))
        if plan.tree is None or plan.nodes is None or len(plan.nodes) == 0:
            return chain_rows(sequence.lease, sequence.computed, sequence.tokens[-1:])
        return self._tree_rows(sequence, plan.tree, plan.nodes)

    def _tree_rows(self, sequence: Sequence, tree: TokenTree, nodes: IntArray) -> SequenceRows:
        start = sequence.computed
        tokens, depths, visible = tree.rows(nodes)
        slots = sequence.lease.slots[start : start + len(tokens)]
        last = self.runner.vocab_size - 1
        return SequenceRows(
            lease=sequence.lease,
            prefix=start,
            # The root is the sequence's own, whatever the tree says. An unknown id is never chosen, but is run.
            tokens=[sequence.tokens[-1], *(min(max(token, 0), last) for token in tokens[1:].tolist())],
            positions=[start + depth for depth in depths.tolist()],
            slots=slots,
            tree_slots=slots,
            visible=visible,
        )

    def _commit(
        self, plan: Plan, rows: SequenceRows, own: slice, logits: torch.Tensor, choices: IntArray, margins: list[float]
    ) -> Outcome:
        """Walks, moves the accepted tokens' KV into place. own: the plan's part of all wanted rows."""
        sequence, chosen = plan.sequence, choices[own]
        decoded = not sequence.prefilling
        if len(chosen) == 0:
            sequence.advance(sequence.computed + len(rows.tokens))
            return Outcome(sequence, [], 0, 0, [], [], decoded=decoded)
        walked, path, refused = [0], [], False  # rows, nodes
        if plan.tree is not None and plan.nodes is not None and len(chosen) > 1:
            walked, refused = walk(plan.tree, plan.nodes, chosen)
            path = [int(plan.nodes[row - 1]) for row in walked[1:]]
        told: list[int] = chosen.tolist()
        tokens = [told[row] for row in walked]
        taken = sequence.append([token for token in tokens if token != _NONE])
        if tokens[-1] == _NONE and sequence.finish_reason is None:
            sequence.fail(NOTHING_ALLOWED)
        accepted = min(len(path), len(taken))
        base = sequence.computed + len(rows.tokens) - len(chosen)  # position of the root
        self._move(sequence.lease, base, walked[1 : 1 + accepted])
        sequence.advance(base + 1 + accepted)
        walked = walked[: len(taken)]
        count = sequence.request.params.logprobs
        likely = sampling.logprobs(logits[own][walked], taken, count) if count is not None and taken else []
        kept = [margins[own][row] for row in walked] if margins else []
        compared = accepted + (refused and accepted < len(taken))
        return Outcome(sequence, taken, accepted, compared, path[:accepted], kept, likely, told, decoded=decoded)

    def _move(self, lease: Lease, base: int, accepted: list[int]) -> None:
        """Copies the KV of accepted rows behind the root's, at position `base`; a chain's stands there."""
        if accepted and accepted[-1] != len(accepted):
            slots = lease.slots[base:]
            self.runner.pool.move(slots[accepted].tolist(), slots[1 : 1 + len(accepted)].tolist())

    def _process(
        self, plans: Seq[Plan], batch: list[SequenceRows], logits: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """The logits of all wanted rows after the processors of the sequences that have any."""
        parts = list(logits.split(counts))
        for i, plan in enumerate(plans):
            if plan.sequence.processors is not None and counts[i]:
                parts[i] = plan.sequence.processors.apply(parts[i], _paths(batch[i]))
        return torch.cat(parts)

    def _keys(self, batch: list[SequenceRows], params: list[SamplingParams]) -> torch.Tensor | None:
        """Of the noise of the token after each wanted row, int64 [n]; None where all are greedy."""
        if not any(row.temperature > 0 for row in params):
            return None
        positions = [position + 1 for rows in batch for position in rows.positions[rows.wanted :]]
        return noise.keys_of([(row.seed, at) for row, at in zip(params, positions, strict=True)])


def _paths(rows: SequenceRows) -> Paths:
    """For each wanted row the draft tokens that lead to it: of a tree's rows all are wanted, of a chain's the last."""
    if rows.wanted or len(rows.tokens) == 1:
        return [()]
    return [[rows.tokens[row] for row in np.flatnonzero(seen)[1:].tolist()] for seen in rows.visible]
