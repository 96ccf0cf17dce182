"""A draft step of one sequence as one compiled call: what to expand, the pass, the guesses, and the tree they go into.

Most of a small model's step is else what Python does around its pass, with caches that are full of the model's weights.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from engine.budget import reach
from engine.compiled import compiled
from engine.compiled_pass import CompiledDecoder, Weights, best_tokens
from engine.effort import RECENT, Stakes, before, covered_by, gain_of
from engine.noise import key_of
from engine.page_attention import plan_one
from engine.sampling import candidates, shares
from engine.tree import TokenTree
from engine.tree_loops import Nodes, computed_rows, expand, frontier, overrule
from engine.types import FloatArray, IntArray, SamplingParams

_long = partial(compiled, long=True)


class Bounds(NamedTuple):
    """Of one step; see engine.drafters.model.Growing."""

    rows: int
    children: int
    max_depth: int
    least: float
    overrule: bool


def grow(
    decoder: CompiledDecoder,
    tree: TokenTree,
    lease: IntArray,
    computed: int,
    pending: IntArray,
    free: IntArray,
    params: SamplingParams,
    bounds: Bounds,
) -> int:
    """Computes what is pending and expands the root; with nothing pending, expands the likeliest nodes.

    lease: slots of the committed tokens, of which so many are `computed`, then come those pending. free: slots for nodes,
    taken from the end. params: without filters. Returns how many were taken; 0 also when there was nothing to do.
    """
    tree.size, taken = _grow(
        decoder.weights,
        decoder.data,
        decoder.least_rows,
        decoder.last,
        tree.nodes,
        tree.size,
        lease,
        computed,
        pending,
        free,
        np.uint64(params.seed),
        np.float32(params.temperature),
        candidates(bounds.children, decoder.weights.vocab_size),
        bounds,
    )
    return int(taken)


def grow_on(
    decoder: CompiledDecoder,
    tree: TokenTree,
    lease: IntArray,
    computed: int,
    pending: IntArray,
    free: IntArray,
    params: SamplingParams,
    bounds: Bounds,
    most: int,
    stakes: Stakes,
) -> tuple[int, int, float, float]:
    """Up to `most` steps, each as by `grow`, as long as they pay: slots taken, steps, and what covered and opened are now.

    free: slots for all of them. stakes: see engine.effort.
    """
    tree.size, taken, steps, covered, opened = _grow_on(
        decoder.weights,
        decoder.data,
        decoder.least_rows,
        decoder.last,
        tree.nodes,
        tree.size,
        lease,
        computed,
        pending,
        free,
        np.uint64(params.seed),
        np.float32(params.temperature),
        candidates(bounds.children, decoder.weights.vocab_size),
        bounds,
        most,
        stakes,
    )
    return int(taken), int(steps), covered, opened


@_long
def _grow_on(
    weights: Weights,
    data: FloatArray,
    least_rows: int,
    last: int,
    nodes: Nodes,
    size: int,
    lease: IntArray,
    computed: int,
    pending: IntArray,
    free: IntArray,
    seed: np.uint64,
    temperature: np.float32,
    count: int,
    bounds: Bounds,
    most: int,
    stakes: Stakes,
) -> tuple[int, int, int, float, float]:
    """See `grow_on` and `_grow`."""
    worth, first_ms, next_ms = stakes.costs
    covered, opened, left, steps = stakes.covered, stakes.opened, len(free), 0
    while steps < most:
        known, at, expanding = before(stakes.trials, stakes.hits, nodes, size, bounds.rows)
        costs = worth, next_ms if steps else first_ms, next_ms
        gain = gain_of(
            known, at, np.float32(covered / opened), stakes.milliseconds, costs, len(stakes.milliseconds) - 1
        )
        if gain <= 0 and (steps or not stakes.looks):
            break
        old = size
        size, taken = _grow(
            weights,
            data,
            least_rows,
            last,
            nodes,
            size,
            lease,
            computed,
            pending,
            free[:left],
            seed,
            temperature,
            count,
            bounds,
        )
        if taken == 0 and len(pending) == 0:
            break  # there was nothing to expand
        computed, pending, left, steps = computed + len(pending), pending[:0], left - taken, steps + 1
        if nodes.expanded[expanding].any():  # else the tree has become too deep there
            now = covered_by(nodes, reach(stakes.trials, stakes.hits, nodes, size), expanding, old)
            covered += RECENT * (now - covered)
            opened += RECENT * (at.sum() - opened)
    return size, len(free) - left, steps, covered, opened


@_long
def _grow(
    weights: Weights,
    data: FloatArray,
    least_rows: int,
    last: int,
    nodes: Nodes,
    size: int,
    lease: IntArray,
    computed: int,
    pending: IntArray,
    free: IntArray,
    seed: np.uint64,
    temperature: np.float32,
    count: int,
    bounds: Bounds,
) -> tuple[int, int]:
    """last: the position that those beyond it count as; count: of tokens that guesses are made of. See `grow`.

    Returns the tree's new size and the slots taken.
    """
    if len(pending):
        chosen = np.zeros(1, np.int32)  # the root, behind the last row
        n, taken, prefix = len(pending), 0, computed
        tokens, depths, slots = pending, np.arange(1, n + 1).astype(np.int32), lease[computed : computed + n].copy()
        tree_slots, visible = slots, np.tril(np.ones((n, n), np.int8)) > 0
    else:
        room = (len(nodes.parent) - size) // bounds.children
        chosen = np.sort(frontier(nodes, size, min(bounds.rows, room, len(free)), bounds.max_depth))
        n, taken, prefix = len(chosen), len(chosen), computed
        if n == 0:
            return size, 0
        slots = free[len(free) - n :].copy()
        for i in range(n):
            nodes.slot[chosen[i]] = slots[i]
        tokens, depths, tree_slots, visible = computed_rows(nodes, size, chosen)
    rows = max(n, least_rows)  # those behind are padding
    inputs, positions, write = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for i in range(n):
        inputs[i] = min(max(tokens[i], 0), weights.vocab_size - 1)  # an unknown id is a wrong guess, not an error
        positions[i], write[i] = min(prefix - 1 + depths[i], last), slots[i]
    wanted = np.arange(n - len(chosen), n)
    keys = np.empty(len(chosen), np.int64)
    for i in range(len(chosen)):
        keys[i] = key_of(seed, computed + len(pending) + nodes.depth[chosen[i]])
    temperatures = np.full(len(chosen), temperature, np.float32)
    plan = plan_one(lease, prefix, tree_slots, visible, 0)
    _, _, _, found, scores, _ = best_tokens(
        weights, inputs, positions, write, data, plan, wanted, least_rows, temperatures, keys, count
    )
    guesses, confidences = found[:, : bounds.children].copy(), shares(scores, bounds.children)
    size = expand(nodes, size, chosen, guesses, confidences, bounds.least)
    if bounds.overrule:
        overrule(nodes, size, chosen, guesses, confidences)
    return size, taken
