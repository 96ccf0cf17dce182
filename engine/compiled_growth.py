"""Draft steps of one sequence as one compiled call: what to expand, the pass, the guesses, and the tree they go into.

Most of a small model's step is else what Python does around its pass, with caches that are full of the model's weights.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from engine.budget import reach
from engine.compiled import compiled
from engine.compiled_pass import CompiledDecoder, Weights, best_tokens
from engine.effort import RECENT, Stakes, before, covered_by, gain_of
from engine.noise import Loud, key_of
from engine.page_plan import plan_one
from engine.sampling import candidates, shares
from engine.tree import TokenTree
from engine.tree_loops import Nodes, computed_rows, expand, frontier, overrule, worthwhile
from engine.types import FloatArray, IntArray, SamplingParams

_long = partial(compiled, long=True)


class Bounds(NamedTuple):
    """Of one step; see engine.drafters.model.Growing."""

    rows: int
    children: int
    max_depth: int
    least: float
    overrule: bool
    node_cost: float


class Fixed(NamedTuple):
    """What draft steps of one sequence have in common between two of the target's."""

    weights: Weights
    data: FloatArray
    least_rows: int
    last: int  # the position that those beyond it count as
    nodes: Nodes
    lease: IntArray
    seed: np.uint64
    temperature: np.float32
    likeliest: int  # how many tokens guesses are made of
    loud: Loud  # of the vocabulary
    bounds: Bounds


def fixed(decoder: CompiledDecoder, tree: TokenTree, lease: IntArray, params: SamplingParams, bounds: Bounds) -> Fixed:
    """lease: slots of the committed tokens. params: without filters."""
    return Fixed(
        decoder.weights,
        decoder.data,
        decoder.least_rows,
        decoder.last,
        tree.nodes,
        lease,
        np.uint64(params.seed),
        np.float32(params.temperature),
        candidates(bounds.children, decoder.weights.vocab_size),
        decoder.loud,
        bounds,
    )


@_long
def grow_on(
    given: Fixed, size: int, computed: int, pending: IntArray, free: IntArray, most: int, stakes: Stakes
) -> tuple[int, int, int, float, float]:
    """Up to `most` steps, each as by `grow`, as long as they pay. free: slots for all of them. stakes: see engine.effort.

    Returns the tree's new size, the slots taken, the steps, and what covered and reached are now.
    """
    covered, reached, left, steps = stakes.covered, stakes.reached, len(free), 0
    most_nodes = len(stakes.milliseconds) - 1
    while steps < most:
        known, at, ways, expanding = before(stakes.trials, stakes.hits, given.nodes, size, given.bounds.rows)
        share = np.float32(covered / reached)
        gain = gain_of(known, at, ways, share, stakes.milliseconds, stakes.costs, most_nodes, steps)
        if gain <= 0 and (steps or not stakes.looks):
            break
        size, taken = grow(given, size, computed, pending, free[:left])
        if taken == 0 and len(pending) == 0:
            break  # there was nothing to expand
        computed, pending, left, steps = computed + len(pending), pending[:0], left - taken, steps + 1
        if given.nodes.expanded[expanding].any():  # else the tree has become too deep there
            found = reach(stakes.trials, stakes.hits, given.nodes, size)
            covered += RECENT * (covered_by(given.nodes, found, expanding) - covered)
            reached += RECENT * (at.sum() - reached)
    return size, len(free) - left, steps, covered, reached


@_long
def grow(given: Fixed, size: int, computed: int, pending: IntArray, free: IntArray) -> tuple[int, int]:
    """Computes what is pending and expands the root; with nothing pending, expands the likeliest nodes.

    size: of the tree. computed: of the leased slots; those pending come behind. free: slots for nodes, taken from the end.
    Returns the tree's new size, and how many slots were taken: 0 also when there was nothing to do.
    """
    weights, nodes, lease, bounds, least_rows = given.weights, given.nodes, given.lease, given.bounds, given.least_rows
    if len(pending):
        chosen = np.zeros(1, np.int32)  # the root, behind the last row
        n, taken, prefix = len(pending), 0, computed
        tokens, depths, slots = pending, np.arange(1, n + 1).astype(np.int32), lease[computed : computed + n].copy()
        tree_slots, visible = slots, np.tril(np.ones((n, n), np.int8)) > 0
    else:
        room = (len(nodes.parent) - size) // bounds.children
        likeliest = frontier(nodes, size, min(bounds.rows, room, len(free)), bounds.max_depth)
        chosen = np.sort(likeliest[: worthwhile(nodes.probability[likeliest], bounds.node_cost)])
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
        positions[i], write[i] = min(prefix - 1 + depths[i], given.last), slots[i]
    wanted = np.arange(n - len(chosen), n)
    keys = np.empty(len(chosen), np.int64)
    for i in range(len(chosen)):
        keys[i] = key_of(given.seed, computed + len(pending) + nodes.depth[chosen[i]])
    temperatures = np.full(len(chosen), given.temperature, np.float32)
    plan = plan_one(lease, prefix, tree_slots, visible, 0, True)
    _, _, _, _, found, scores, _ = best_tokens(
        weights,
        inputs,
        positions,
        write,
        given.data,
        plan,
        wanted,
        least_rows,
        temperatures,
        keys,
        given.likeliest,
        given.loud,
    )
    guesses, confidences = found[:, : bounds.children].copy(), shares(scores, temperatures > 0, bounds.children)
    size = expand(nodes, size, chosen, guesses, confidences, bounds.least)
    if bounds.overrule:
        overrule(nodes, size, chosen, guesses, confidences)
    return size, taken
