"""One target step: run the sequences' rows, let the target choose, walk each tree, commit what was accepted."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from engine import sampling
from engine.attention import SequenceRows, chain_rows
from engine.kv import KVPool, Lease
from engine.noise import NoiseRows
from engine.runner import ModelRunner
from engine.text import StopStrings, TextStream
from engine.tree import ROOT, TokenTree
from engine.types import FinishReason, GenerationRequest, IntArray, InvalidRequest
from engine.verify import walk

MAX_WINDOW = 63  # draft tokens per step and sequence; a sequence's lease has room for them behind its last token

_PREPARED = 4  # positions: what a step usually walks along


class Sequence:
    """A running request on the target: its tokens, how many of them have KV, and why it ended, once it did."""

    def __init__(
        self, request: GenerationRequest, runner: ModelRunner, tokenizer: PreTrainedTokenizerFast | None
    ) -> None:
        """Leases KV for the whole request; raises InvalidRequest or PoolExhausted."""
        params = request.params
        self.request = request
        self.tokens = [*request.prompt, *request.resume_tokens]
        self.limit = len(request.prompt) + params.max_tokens  # tokens in all
        check_prompt(request, runner)
        self.computed = 0
        self.finish_reason: FinishReason | None = None
        self.noise = NoiseRows(params.seed, runner.vocab_size, runner.device) if params.temperature > 0 else None
        self._ends = set(params.stop_token_ids) | (set() if params.ignore_eos else end_tokens(runner))
        self._text: TextStream | None = None
        if params.stop:
            if tokenizer is None:
                raise InvalidRequest("stop", "stop strings need the model's tokenizer")
            self._text, self._stops = TextStream(tokenizer), StopStrings(params.stop)
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

    def prepare(self) -> None:
        """Computes what the next steps need and what is known already: the noise of the next positions."""
        if self.noise is not None:
            self.noise.prepare(range(len(self.tokens), len(self.tokens) + _PREPARED))

    def append(self, tokens: list[int]) -> list[int]:
        """Commits tokens up to the first that ends the request; returns the committed ones."""
        taken: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            taken.append(token)
            self._check_end(token)
            if self.finish_reason is None and len(self.tokens) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return taken

    def _check_end(self, token: int) -> None:
        if token in self._ends:
            self.finish_reason = "stop"
        if self._text is not None:
            self._stops.push(self._text.push(token))
            if self._stops.stopped:
                self.finish_reason = "stop"


def end_tokens(runner: ModelRunner) -> set[int]:
    """The token ids that end a text, by the model's generation config."""
    ids = runner.model.generation_config.eos_token_id
    return set(ids if isinstance(ids, list) else [] if ids is None else [ids])


def check_prompt(request: GenerationRequest, runner: ModelRunner) -> None:
    """Raises InvalidRequest when the prompt is empty, has unknown tokens or leaves no room in the model's context."""
    tokens = request.prompt + request.resume_tokens
    if not request.prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if min(tokens) < 0 or max(tokens) >= runner.vocab_size:
        raise InvalidRequest("prompt", f"token ids must be between 0 and {runner.vocab_size - 1}")
    if len(request.resume_tokens) >= request.params.max_tokens:
        raise InvalidRequest("resume_tokens", "must be fewer than max_tokens")
    total = len(request.prompt) + request.params.max_tokens
    if total > runner.max_length:
        message = f"prompt and max_tokens make {total} tokens; the model's context is {runner.max_length}"
        raise InvalidRequest("prompt", message)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does for one sequence."""

    sequence: Sequence
    tree: TokenTree | None = None  # its root is the sequence's last token
    nodes: IntArray | None = None  # the window: nodes of the tree to verify, with their ancestors, in index order
    prefill: int | None = None  # while prefilling: at most so many tokens; None: a chunk


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence."""

    sequence: Sequence
    tokens: list[int]  # newly committed; empty while prefilling
    accepted: int  # how many of them were draft tokens
    tried: int  # draft tokens compared with the target's along the walk: the accepted ones and at most one refused
    path: list[int]  # the accepted nodes of the tree
    margins: list[float]  # of each newly committed token, when asked for


class StepError(RuntimeError):
    """The target's output is unusable (not a number); names the request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the target's logits for request {request_id} are not finite")
        self.request_id = request_id


class Stepper:
    """Runs target steps. `margins`: also compute how close to a tie every choice was."""

    def __init__(self, runner: ModelRunner, prefill_chunk: int = 64, margins: bool = False) -> None:
        self.runner = runner
        self._prefill_chunk = prefill_chunk
        self._margins = margins

    def step(self, plans: Seq[Plan]) -> list[Outcome]:
        """One forward pass over all plans. Raises StepError, before anything is committed for anybody."""
        batch = [self._rows(plan) for plan in plans]
        logits = self.runner.forward(batch)
        counts = [len(rows.tokens) - rows.wanted for rows in batch]
        parts = logits.split(counts)
        for plan, part in zip(plans, parts, strict=True):
            if not bool(torch.isfinite(part.sum())):
                self.runner.pool.wipe(plan.sequence.lease)
                raise StepError(plan.sequence.request.request_id)
        return [self._commit(plan, rows, part) for plan, rows, part in zip(plans, batch, parts, strict=True)]

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
        rows = np.concatenate([np.zeros(1, np.int32), nodes])
        slots = sequence.lease.slots[start : start + len(rows)]
        known = np.clip(tree.token[nodes], 0, self.runner.vocab_size - 1)  # an unknown id is never chosen, but is run
        return SequenceRows(
            lease=sequence.lease,
            prefix=start,
            tokens=[sequence.tokens[-1], *known.tolist()],
            positions=[start + depth for depth in tree.depth[rows].tolist()],
            slots=slots,
            tree_slots=slots,
            visible=tree.visible(rows, rows),
        )

    def _commit(self, plan: Plan, rows: SequenceRows, logits: torch.Tensor) -> Outcome:
        """Chooses, walks, moves the accepted tokens' KV into place."""
        sequence = plan.sequence
        if len(logits) == 0:
            sequence.advance(sequence.computed + len(rows.tokens))
            return Outcome(sequence, [], 0, 0, [], [])
        nodes = [ROOT] if len(logits) == 1 or plan.nodes is None else [ROOT, *plan.nodes.tolist()]
        row_of = {node: row for row, node in enumerate(nodes)}
        choices, margins = self._choose(sequence, rows, logits)
        tree = plan.tree if plan.tree is not None and len(nodes) > 1 else TokenTree(sequence.tokens[-1], 1)
        tokens = walk(tree, set(nodes[1:]), lambda node: choices[row_of[node]])
        path = _path(tree, tokens[:-1])
        taken = sequence.append(tokens)
        accepted = min(len(path), len(taken))
        base = sequence.computed + len(rows.tokens) - len(logits)  # position of the root
        moved = [row_of[node] for node in path[:accepted]]
        slots = sequence.lease.slots
        self.runner.pool.move([int(slots[base + row]) for row in moved], slots[base + 1 : base + 1 + accepted].tolist())
        sequence.advance(base + 1 + accepted)
        if sequence.noise is not None:
            sequence.noise.forget_before(len(sequence.tokens))
        kept = [margins[row_of[node]] for node in [ROOT, *path]][: len(taken)] if margins else []
        end = path[-1] if path else ROOT
        refused = len(nodes) > 1 and bool((tree.parent[nodes[1:]] == end).any())
        return Outcome(sequence, taken, accepted, accepted + refused, path[:accepted], kept)

    def _choose(self, sequence: Sequence, rows: SequenceRows, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """The target's token after each wanted row, and its margin when margins are asked for."""
        params = sequence.request.params
        positions = [position + 1 for position in rows.positions[rows.wanted :]]
        noise = sequence.noise.rows(positions) if sequence.noise is not None else None
        choices: list[int] = sampling.choose(logits, params, noise).tolist()
        margins: list[float] = sampling.margins(logits, params, noise).tolist() if self._margins else []
        return choices, margins


def _path(tree: TokenTree, tokens: list[int]) -> list[int]:
    """The nodes along `tokens` from the root."""
    nodes, node = [], ROOT
    for token in tokens:
        node = tree.child(node, token)
        nodes.append(node)
    return nodes
