"""A small language model as drafter: best-first expansion of all sessions' trees in fixed-size batches.

Where the text repeats itself, a lookup puts its continuation into the tree at once, and the model goes on from there.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from engine import noise, sampling
from engine.attention import SequenceRows, chain_rows
from engine.compiled_growth import Bounds, Fixed, fixed, grow, grow_on
from engine.compiled_pass import CompiledDecoder
from engine.drafters.ngram import DOUBTFUL, Earned, Lookup
from engine.drafters.past import Past
from engine.effort import EffortWindow
from engine.grammar import Vocabulary
from engine.kv import Lease
from engine.prefix import HandleChain
from engine.processors import Processors, make_processors
from engine.runner import ModelRunner
from engine.step import end_tokens
from engine.tree import NO_SLOT, ROOT, Moved, TokenTree
from engine.tree_loops import frontier, worthwhile
from engine.types import FloatArray, IntArray, InvalidRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Growing:
    """How trees grow.

    Keeping the first few children of every expanded node is free until they are verified, and makes hits likely.
    """

    rows: int = 8  # nodes expanded per draft step, all sessions together; where there are more sessions, one for each
    each: int = 0  # of them at most one session's; 0: all. Short steps answer a miss sooner
    children: int = 6  # kept of each expanded node
    least: float = 0.0  # confidence; children with less are not kept, but the likeliest always is
    max_depth: int = 40  # below the root: what follows a path that was accepted whole has to be there, too
    # Per session. A slow target's step brings more than a thousand, of which what follows its end is a small part.
    max_nodes: int = 2048
    max_expanded: int = 256  # of them, and at most half: each takes a slot
    prefill_chunk: int = 64  # prefix tokens per session and draft step
    prefill_tokens: int = 512  # and of all sessions, so that many new ones leave room for the others
    lookup: int = 8  # tokens looked up after each commit; 0: none
    doubtful: float = DOUBTFUL  # lookups that are right less often are not taken
    shared: int = 0  # tokens of earlier outputs that are kept, for lookups in other sessions too
    node_cost: float = 0.0  # what a further node adds to a draft step's time, of a step with one: how many are worth it
    overrule: bool = False  # what others hung into a tree gets the model's own confidence once that is known

    def most(self, sessions: int) -> int:
        """Nodes expanded in a step of so many sessions."""
        return max(self.rows, sessions)


def most_valuable(
    trees: Mapping[int, TokenTree], slots: Mapping[int, int], count: int, growing: Growing
) -> dict[int, list[int]]:
    """Up to `count` nodes to expand, the most probable of all sessions, as far as they are worth their time; of each session
    in index order.

    trees: by session, with their roots expanded; slots: nodes that each session has room to compute.
    """
    if count <= 0:
        return {}
    sessions: list[int] = []
    nodes: list[IntArray] = []
    probabilities: list[FloatArray] = []
    most = min(count, growing.each or count)
    for session, tree in trees.items():
        room = (tree.capacity - tree.size) // growing.children
        if room > 0:
            likeliest = frontier(tree.nodes, tree.size, min(most, room, slots[session]), growing.max_depth)
            sessions += [session] * len(likeliest)
            nodes.append(likeliest)
            probabilities.append(tree.probability[likeliest])
    if not sessions:
        return {}
    all_nodes, every = np.concatenate(nodes), np.concatenate(probabilities)
    order = np.argsort(-every, kind="stable")[:count]
    worth = worthwhile(every[order], growing.node_cost)
    picked: dict[int, list[int]] = {}
    for at in sorted(order[:worth].tolist()):
        picked.setdefault(sessions[at], []).append(int(all_nodes[at]))
    return {session: sorted(some) for session, some in picked.items()}


def to_read(pending: Mapping[int, int], growing: Growing) -> dict[int, int]:
    """How many of its pending tokens each session reads in a step, if any. Who has least to read goes first."""
    counts, left = dict.fromkeys(pending, 0), growing.prefill_tokens
    for session in sorted(pending, key=lambda session: pending[session]):
        counts[session] = min(pending[session], growing.prefill_chunk, left)
        left -= counts[session]
    return {session: count for session, count in counts.items() if count}


def rows_beside(sessions: int, readers: int, unfinished: bool, growing: Growing) -> int:
    """Nodes to expand in a step in which so many of the sessions read; unfinished: some will not have read everything."""
    most = growing.most(sessions)
    rows = most - readers
    return max(rows, most // 2) if unfinished else rows  # reading takes many steps: half stays for others


class _Session:
    """One sequence on the draft: committed tokens, how many have KV, and the tree behind them."""

    def __init__(
        self,
        tokens: list[int],
        prompt: int,
        params: SamplingParams,
        lease: Lease,
        tree_lease: Lease,
        capacity: int,
        lookup: Lookup,
        processors: Processors | None,
    ) -> None:
        self.tokens = tokens
        self.prompt = prompt  # tokens that the output stands behind
        self.begun = len(tokens)  # tokens that it was opened with
        self.params = params
        self.computed = 0
        self.chain = HandleChain()  # of the tokens, as far as it was needed
        self.lease = lease  # committed tokens
        self.tree_lease = tree_lease  # expanded draft tokens, one slot each
        self.free_slots: list[int] = tree_lease.slots.tolist()
        self.tree = TokenTree(tokens[-1], capacity, params.temperature == 0)
        self.processors = processors
        self.awaits: SamplingParams | None = None  # the same with a grammar, which is still being compiled
        self.lookup = lookup

    @property
    def pending(self) -> list[int]:
        """Committed tokens without KV."""
        return self.tokens[self.computed :]


@dataclass(frozen=True, slots=True)
class _Part:
    """A session's part of a batch: the nodes that its logits come after, -1 alone for a prefix still incomplete."""

    session: int
    held: _Session
    nodes: list[int]


class ModelDrafter:
    """Implements Drafter with a ModelRunner."""

    def __init__(
        self,
        runner: ModelRunner,
        growing: Growing | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        seals: bool = True,
        patient: bool = True,
    ) -> None:
        """tokenizer: without it, sessions with a grammar are guessed at as if they had none.

        patient: waits for grammars to be compiled; else sessions do without until they are, as others would wait too.
        seals: keep full pages for who opens the same prefix; not where a whole model shares the pool with its part.
        """
        self._runner = runner
        self._seals, self._patient = seals, patient
        self._vocabulary = Vocabulary(tokenizer, runner.vocab_size) if tokenizer is not None else None
        self._growing = growing or Growing()
        self._sessions: dict[int, _Session] = {}
        self._earned = Earned()
        self._shared = Past(self._growing.shared) if self._growing.shared else None

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self.close(session)
        whole, params = params, params if self._knows(params) else replace(params, grammar=None)
        prompt = len(tokens) if prompt is None else prompt
        processors = self._processors(params, tokens, prompt)
        pool, growing = self._runner.pool, self._growing
        chain = HandleChain(tokens)
        lease, known = pool.lease_known(len(tokens), len(tokens), chain.digests(pool.page_size))
        try:
            tree_lease = pool.lease(min(growing.max_nodes // 2, growing.max_expanded))
        except RuntimeError:
            pool.release(lease)
            raise
        lookup = Lookup(tokens, params.temperature == 0, self._earned, growing.lookup, self._shared)
        held = _Session(list(tokens), prompt, params, lease, tree_lease, growing.max_nodes, lookup, processors)
        held.chain, held.computed = chain, known
        lookup.hang(held.tree, growing.doubtful)
        held.awaits = whole if params is not whole and self._vocabulary is not None else None
        self._sessions[session] = held

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter. Raises PoolExhausted, after which the session must be closed."""
        held = self._sessions[session]
        pool = self._runner.pool
        old = len(held.tokens)
        root_computed = held.computed == old
        held.tokens.extend(tokens)
        if held.awaits is not None and self._knows(held.awaits):
            with suppress(InvalidRequest):  # guessed at as if it had none
                held.processors = self._processors(held.awaits, held.tokens[:old], held.prompt)
            held.awaits = None
        pool.extend(held.lease, len(held.tokens))
        moved = held.tree.commit(tokens)
        if root_computed:
            count = len(moved.path_slots)
            pool.move(moved.path_slots, held.lease.slots[old : old + count].tolist())
            held.computed = old + count
            self._seal(held)
        held.free_slots.extend(moved.path_slots + moved.freed_slots)
        held.free_slots.sort()  # taken from the end: a tree is in few pages
        if held.processors is not None:
            held.processors.extend(self._known(tokens))
        held.lookup.commit(tokens)
        held.lookup.hang(held.tree, self._growing.doubtful)
        return replace(moved, children=moved.children or int(held.tree.size > 1))

    def _knows(self, params: SamplingParams) -> bool:
        """Whether a session's grammar, if it has one, can be followed at once."""
        if params.grammar is None or self._vocabulary is None:
            return params.grammar is None
        return self._patient or self._vocabulary.ready(params.grammar)

    def _processors(self, params: SamplingParams, tokens: Sequence[int], prompt: int) -> Processors | None:
        ends, size = end_tokens(params, self._runner, self._vocabulary), self._runner.vocab_size
        return make_processors(params, self._known(tokens), prompt, ends, size, self._vocabulary)

    def grow(self) -> list[int]:
        """See Drafter."""
        if len(self._sessions) == 1:
            [(session, held)] = self._sessions.items()
            if (decoder := self._compiled(held)) is not None:
                return [session] if self._grow_alone(held, decoder) else []
        batch, parts = self._plan()
        if not batch:
            return []
        self._expand(parts, *self._guess(batch, parts))
        for part in parts:
            self._seal(part.held)
        return list(dict.fromkeys(part.session for part in parts))

    def grow_on(self, most: int, effort: EffortWindow) -> list[int] | None:
        """See engine.effort.GrowsOn."""
        if len(self._sessions) != 1:
            return None
        [(session, held)] = self._sessions.items()
        decoder = self._compiled(held)
        if decoder is None:
            return None
        pending, given = held.pending, self._fixed(held, decoder)
        unread = len(held.tokens) - max(held.computed, held.begun)  # of what came since it was opened
        held.tree.size, taken, steps, covered, reached = grow_on(
            given,
            held.tree.size,
            held.computed,
            np.array(pending, np.int32),
            np.array(held.free_slots[-most * given.bounds.rows :], np.int32),
            most,
            effort.stakes(held.tree, unread),
        )
        effort.grew_on(steps, covered, reached, len(pending))
        if steps:
            self._took(held, len(pending), taken)
        return [session] if steps else []

    def _compiled(self, held: _Session) -> CompiledDecoder | None:
        """What takes a session's next step in one call, unless Python has a part in it."""
        decoder, pending = self._runner.choosing, len(held.tokens) - held.computed
        able = held.processors is None and not sampling.filters(held.params)
        known = bool(held.tree.expanded[ROOT]) if pending == 0 else pending <= self._growing.prefill_chunk
        return decoder if able and known else None

    def _grow_alone(self, held: _Session, decoder: CompiledDecoder) -> bool:
        """A step of the only session; whether there was anything to do."""
        pending, given = held.pending, self._fixed(held, decoder)
        held.tree.size, taken = grow(
            given,
            held.tree.size,
            held.computed,
            np.array(pending, np.int32),
            np.array(held.free_slots[-given.bounds.rows :], np.int32),
        )
        self._took(held, len(pending), taken)
        return bool(pending) or taken > 0

    def _fixed(self, held: _Session, decoder: CompiledDecoder) -> Fixed:
        growing = self._growing
        rows = min(growing.rows, growing.each or growing.rows)
        bounds = Bounds(rows, growing.children, growing.max_depth, growing.least, growing.overrule, growing.node_cost)
        return fixed(decoder, held.tree, held.lease.slots, held.params, bounds)

    def _took(self, held: _Session, computed: int, taken: int) -> None:
        """So many committed tokens have KV now, and so many nodes slots."""
        del held.free_slots[len(held.free_slots) - taken :]
        held.computed += computed
        self._seal(held)

    def _seal(self, held: _Session) -> None:
        """Pages that are full now are kept for who opens the same prefix, after a lost link as well."""
        size = self._runner.pool.page_size
        full = held.computed // size
        if self._seals and full > len(held.lease.sealed):
            held.chain.extend(held.tokens[len(held.chain) :])
            self._runner.pool.seal(held.lease, held.chain.digests(size)[:full])

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        held = self._sessions.pop(session, None)
        if held is None:
            return
        self._runner.pool.release(held.lease)
        self._runner.pool.release(held.tree_lease)
        if self._shared is not None and len(held.tokens) > held.begun:
            self._shared.begin()
            self._shared.extend(held.tokens[held.begun :])  # the rest may be kept already, here or by another draft

    def check(self) -> None:
        """See Drafter."""
        self._runner.pool.check()
        for held in self._sessions.values():
            held.tree.check()
            slots = held.tree.slot[: held.tree.size]
            used = slots[slots != NO_SLOT].tolist()
            assert sorted(used + held.free_slots) == sorted(held.tree_lease.slots.tolist()), "a tree slot is lost"

    def _plan(self) -> tuple[list[SequenceRows], list[_Part]]:
        """Rows of one batch, and what their logits belong to."""
        batch: list[SequenceRows] = []
        parts: list[_Part] = []
        for session, chunk in self._chunks().items():
            held = self._sessions[session]
            batch.append(chain_rows(held.lease, held.computed, chunk, in_place=True))
            held.computed += len(chunk)
            parts.append(_Part(session, held, [-1 if held.pending else ROOT]))
        unfinished = any(part.held.pending for part in parts)
        rows = rows_beside(len(self._sessions), len(parts), unfinished, self._growing)
        for session, nodes in self._pick(rows).items():
            held = self._sessions[session]
            batch.append(self._tree_rows(held, nodes))
            parts.append(_Part(session, held, nodes))
        return batch, parts

    def _chunks(self) -> dict[int, list[int]]:
        """What sessions read of their committed tokens in a step."""
        pending = {
            session: held.pending for session, held in self._sessions.items() if held.computed < len(held.tokens)
        }
        counts = to_read({session: len(tokens) for session, tokens in pending.items()}, self._growing)
        return {session: self._known(pending[session][:count]) for session, count in counts.items()}

    def _pick(self, count: int) -> dict[int, list[int]]:
        """The most probable frontier nodes of all sessions whose root is expanded."""
        trees = {session: held.tree for session, held in self._sessions.items() if held.tree.expanded[ROOT]}
        slots = {session: len(self._sessions[session].free_slots) for session in trees}
        return most_valuable(trees, slots, count, self._growing)

    def _tree_rows(self, held: _Session, nodes: list[int]) -> SequenceRows:
        slots = held.free_slots[-len(nodes) :]
        del held.free_slots[-len(nodes) :]
        held.tree.slot[nodes] = slots
        tokens, depths, tree_slots, visible = held.tree.computed_rows(nodes)  # the root's KV stands in the prefix
        return SequenceRows(
            lease=held.lease,
            prefix=held.computed,
            tokens=self._known(tokens.tolist()),
            positions=[held.computed - 1 + depth for depth in depths.tolist()],
            slots=np.array(slots, np.int32),
            tree_slots=tree_slots,
            visible=visible,
            in_place=True,
        )

    def _guess(self, batch: list[SequenceRows], parts: list[_Part]) -> tuple[IntArray, FloatArray]:
        """The likeliest tokens after each node, and their confidences: both [n, children]."""
        params = [part.held.params for part in parts for _ in part.nodes]
        keys = self._keys(parts) if any(part.held.params.temperature > 0 for part in parts) else None
        children = self._growing.children
        if any(part.held.processors is not None for part in parts):
            return sampling.propose(self._process(parts, self._runner.forward(batch)), params, keys, children)
        passed = self._runner.best(batch, params, keys, sampling.candidates(children, self._runner.vocab_size))
        return sampling.guesses(passed.best, params, children)

    def _expand(self, parts: list[_Part], tokens: IntArray, confidences: FloatArray) -> None:
        """Adds the likeliest children of every expanded node."""
        growing = self._growing
        stop = 0
        for part in parts:
            own = slice(stop, stop := stop + len(part.nodes))
            if part.nodes[0] >= 0:
                part.held.tree.expand(part.nodes, tokens[own], confidences[own], growing.overrule, growing.least)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, ids unknown to this model as another: a wrong guess, not an error."""
        return [min(max(token, 0), self._runner.vocab_size - 1) for token in tokens]

    def _process(self, parts: list[_Part], logits: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocab_size] after the processors of the sessions that have any."""
        rows = iter(logits.split(1))
        processed = []
        for part in parts:
            for node in part.nodes:
                row = next(rows)
                if part.held.processors is not None and node >= 0:
                    tree = part.held.tree
                    path = self._known(tree.token[tree.lineage(node)[1:]].tolist())
                    row = part.held.processors.apply(row, [path])
                processed.append(row)
        return torch.cat(processed)

    def _keys(self, parts: list[_Part]) -> torch.Tensor:
        """Of the noise of the token after each node, int64 [n]."""
        where = []
        for part in parts:
            depths = part.held.tree.depth[part.nodes].tolist() if part.nodes[0] >= 0 else [0]
            where += [(part.held.params.seed, len(part.held.tokens) + depth) for depth in depths]
        return noise.keys_of(where)
