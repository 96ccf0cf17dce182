"""The loops of `engine.tree`, over its arrays. Parents stand before children, so one pass forward is always enough."""

from typing import Protocol, cast

import numpy as np

from engine.compiled import compiled, with_fields
from engine.types import BoolArray, FloatArray, IntArray

NO_SLOT = -1
_GONE = -1
_TINY = 1e-30  # nothing is divided by less


class Nodes(Protocol):
    """A tree's nodes as one array of records, each field [capacity]; what they mean stands at `engine.tree.TokenTree`.

    One array, since every array that is handed to a compiled function costs a quarter of a microsecond.
    """

    parent: IntArray
    token: IntArray
    confidence: FloatArray
    depth: IntArray
    probability: FloatArray
    slot: IntArray
    expanded: BoolArray
    sent: BoolArray


_NODE = np.dtype(
    {
        "names": ["parent", "token", "confidence", "depth", "probability", "slot", "expanded", "sent"],
        "formats": [np.int32, np.int32, np.float32, np.int32, np.float32, np.int32, np.bool_, np.bool_],
    },
    align=True,
)


def make_nodes(capacity: int) -> Nodes:
    """Room for so many."""
    return cast(Nodes, with_fields(np.zeros(capacity, _NODE)))


@compiled
def child(nodes: Nodes, size: int, node: int, token: int) -> int:
    """The child of `node` with this token, or -1."""
    for i in range(node + 1, size):
        if nodes.parent[i] == node and nodes.token[i] == token:
            return i
    return -1


@compiled
def add(nodes: Nodes, size: int, parent: int, token: int, confidence: float) -> int:
    """The child of `parent` with this token, written behind the others if it is new; -1 when there is no room."""
    found = child(nodes, size, parent, token)
    if found >= 0 or size >= len(nodes.parent):
        return found
    given = confidence if 0 <= confidence <= 1 else 0.0
    nodes.parent[size], nodes.token[size], nodes.confidence[size] = parent, token, given
    nodes.depth[size] = nodes.depth[parent] + 1
    nodes.probability[size] = nodes.probability[parent] * given
    nodes.slot[size], nodes.expanded[size], nodes.sent[size] = NO_SLOT, False, False
    return size


@compiled
def add_many(nodes: Nodes, size: int, parents: IntArray, tokens: IntArray, confidences: FloatArray) -> IntArray:
    """The number of each child as by `add`, and the new size behind them: [n + 1]."""
    found = np.empty(len(parents) + 1, np.int32)
    for i in range(len(parents)):
        found[i] = add(nodes, size, parents[i], tokens[i], confidences[i])
        size = max(size, found[i] + 1)
    found[len(parents)] = size
    return found


@compiled
def expand(nodes: Nodes, size: int, expanded: IntArray, tokens: IntArray, confidences: FloatArray, least: float) -> int:
    """The new size; see TokenTree.expand."""
    for row in range(len(expanded)):
        nodes.expanded[expanded[row]] = True
        for i in range(tokens.shape[1]):
            if i == 0 or confidences[row, i] >= max(least, _TINY):
                size = max(size, 1 + add(nodes, size, expanded[row], tokens[row, i], confidences[row, i]))
    return size


@compiled
def overrule(nodes: Nodes, size: int, expanded: IntArray, tokens: IntArray, confidences: FloatArray) -> None:
    """Gives all children of `expanded` the confidences [expanded, children] of their tokens, 0 where there is none."""
    for row in range(len(expanded)):
        for i in range(expanded[row] + 1, size):
            if nodes.parent[i] == expanded[row]:
                nodes.confidence[i] = 0.0
                for j in range(tokens.shape[1]):
                    if tokens[row, j] == nodes.token[i] and 0 <= confidences[row, j] <= 1:
                        nodes.confidence[i] = confidences[row, j]
                        break  # behind the possible ones, other places are filled with a token and 0
    reweigh(nodes, size)


@compiled
def reweigh(nodes: Nodes, size: int) -> None:
    """Makes all probabilities anew, of the confidences."""
    for i in range(1, size):
        nodes.probability[i] = nodes.probability[nodes.parent[i]] * nodes.confidence[i]


@compiled
def adopt(nodes: Nodes, size: int, parents: IntArray, tokens: IntArray, confidences: FloatArray, known: bool) -> int:
    """The new size; see TokenTree.adopt."""
    places = np.full(len(parents), _GONE, np.int32)
    for i in range(len(parents)):
        above = places[parents[i]] if parents[i] >= 0 else 0
        if above == _GONE:
            continue
        places[i] = child(nodes, size, above, tokens[i])
        if places[i] < 0 and (known or not nodes.expanded[above]):
            places[i] = add(nodes, size, above, tokens[i], confidences[i])
            size = max(size, places[i] + 1)
        elif places[i] >= 0 and known:
            nodes.confidence[places[i]] = confidences[i]
    reweigh(nodes, size)
    return size


@compiled
def graft(
    nodes: Nodes,
    size: int,
    committed: IntArray,
    parents: IntArray,
    tokens: IntArray,
    confidences: FloatArray,
    told: bool,
    vocab_size: int,
) -> int:
    """The new size; see TokenTree.graft."""
    # Where each node of the piece went: a node here, -2 - k when the first k committed tokens lead there, or _GONE.
    places = np.empty(len(parents), np.int32)
    to_go = len(committed)
    for i in range(len(parents)):
        before = places[parents[i]] if parents[i] >= 0 else (-2 if to_go else 0)
        if vocab_size and not 0 <= tokens[i] < vocab_size:
            places[i] = _GONE
        elif before >= 0:
            sure = confidences[i] > 1
            places[i] = add(nodes, size, before, tokens[i], 1.0 if sure else confidences[i])
            size = max(size, places[i] + 1)
            if told and places[i] >= 0:
                nodes.sent[places[i]] = True
        elif before == _GONE or committed[-2 - before] != tokens[i]:
            places[i] = _GONE
        else:
            places[i] = 0 if -1 - before == to_go else before - 1
    return size


@compiled
def hang(nodes: Nodes, size: int, tokens: IntArray, confidences: FloatArray) -> int:
    """The new size; see TokenTree.hang."""
    node = 0
    for i in range(len(tokens)):
        node = add(nodes, size, node, tokens[i], confidences[i])
        if node < 0:
            break
        size = max(size, node + 1)
    return size


@compiled
def path(nodes: Nodes, size: int, tokens: IntArray) -> IntArray:
    """The nodes along `tokens` from the root, as far as they are there: [up to n]."""
    found = np.empty(len(tokens), np.int32)
    node = 0
    for i in range(len(tokens)):
        node = child(nodes, size, node, tokens[i])
        if node < 0:
            return found[:i]
        found[i] = node
    return found


@compiled
def chain(nodes: Nodes, size: int, start: int, most: int, least: float) -> IntArray:
    """See TokenTree.chain."""
    found = np.empty(most, np.int32)
    node = start
    for depth in range(most):
        best = -1
        for i in range(node + 1, size):
            if nodes.parent[i] == node and (best < 0 or nodes.confidence[i] > nodes.confidence[best]):
                best = i
        if best < 0 or nodes.probability[best] < least:
            return found[:depth]
        found[depth] = node = best
    return found


@compiled
def visible(nodes: Nodes, size: int, rows: IntArray, columns: IntArray) -> BoolArray:
    """Which of the nodes `columns` are on the path to each of `rows`, itself included: [rows, columns]."""
    place = np.full(size, -1, np.int32)
    for column in range(len(columns)):
        place[columns[column]] = column
    out = np.zeros((len(rows), len(columns)), np.bool_)
    for row in range(len(rows)):
        node = rows[row]
        while node >= 0:
            if place[node] >= 0:
                out[row, place[node]] = True
            node = nodes.parent[node]
    return out


@compiled
def rows(nodes: Nodes, size: int, verified: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
    """See TokenTree.rows."""
    own = np.zeros(1 + len(verified), np.int32)
    own[1:] = verified
    return nodes.token[own], nodes.depth[own], visible(nodes, size, own, own)


@compiled
def computed_rows(nodes: Nodes, size: int, chosen: IntArray) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
    """See TokenTree.computed_rows."""
    columns = np.flatnonzero(nodes.slot[:size] != NO_SLOT).astype(np.int32)
    return nodes.token[chosen], nodes.depth[chosen], nodes.slot[columns], visible(nodes, size, chosen, columns)


@compiled
def walk(nodes: Nodes, verified: IntArray, chosen: IntArray) -> tuple[IntArray, bool]:
    """See engine.verify."""
    rows = np.zeros(1 + len(verified), np.int32)
    node, count, refused = 0, 1, False
    for i in range(len(verified)):
        if nodes.parent[verified[i]] == node:
            if 0 <= chosen[rows[count - 1]] == nodes.token[verified[i]]:  # below 0 none was chosen
                rows[count] = i + 1
                node, count, refused = verified[i], count + 1, False
            else:
                refused = True
    return rows[:count], refused


@compiled
def top(values: FloatArray, count: int) -> IntArray:
    """The indices of the `count` largest values, the largest first, the lower index first among equals."""
    found = np.empty(min(count, len(values)), np.int32)
    held = 0
    for i in range(len(values)):
        if held == len(found) and (held == 0 or values[i] <= values[found[held - 1]]):
            continue
        at = held if held < len(found) else held - 1
        held = at + 1
        while at > 0 and values[found[at - 1]] < values[i]:
            found[at] = found[at - 1]
            at -= 1
        found[at] = i
    return found


@compiled
def frontier(nodes: Nodes, size: int, count: int, max_depth: int) -> IntArray:
    """See TokenTree.frontier."""
    candidates = np.empty(size, np.int32)
    probability = np.empty(size, np.float32)
    n = 0
    for i in range(size):
        if not nodes.expanded[i] and nodes.depth[i] < max_depth:
            candidates[n], probability[n] = i, nodes.probability[i]
            n += 1
    return candidates[top(probability[:n], count)]


@compiled
def worthwhile(probability: FloatArray, node_cost: float) -> int:
    """How many nodes, of which the likeliest come first, a draft step should expand to bring most for its time.

    A step brings what is likely to be on the way: the sum of the nodes' probabilities. node_cost: what another node adds to
    its time, as a part of that of one node alone.
    """
    total = 0.0
    for i in range(len(probability)):
        if probability[i] * (1 + node_cost * (i - 1)) < node_cost * total:
            return i
        total += probability[i]
    return len(probability)


@compiled
def best(probability: FloatArray, count: int) -> IntArray:
    """See TokenTree.best."""
    values = probability[1:]
    size = len(values)
    if count >= size:
        return np.arange(1, size + 1).astype(np.int32)
    found = np.empty(count, np.int32)
    n = 0
    if count > 0:
        least = np.partition(values, size - count)[size - count]
        equal = count - (values > least).sum()  # of those that are no larger, the first ones
        for i in range(size):
            if values[i] > least or (values[i] == least and equal > 0):
                equal -= values[i] == least
                found[n] = i + 1
                n += 1
    return found[:n]


@compiled
def piece(nodes: Nodes, size: int, chosen: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """See TokenTree.piece."""
    index = np.full(size, -1, np.int32)
    for i in range(len(chosen)):
        node = chosen[i]
        while node > 0 and index[node] < 0:
            index[node] = 0
            node = nodes.parent[node]
    count = 0
    parents = np.empty(size, np.int32)
    tokens = np.empty(size, np.int32)
    confidences = np.empty(size, np.float32)
    for i in range(1, size):
        if index[i] == 0:
            above = nodes.parent[i]
            parents[count] = index[above] if above > 0 else -1
            tokens[count], confidences[count] = nodes.token[i], nodes.confidence[i]
            index[i] = count
            count += 1
    return parents[:count], tokens[:count], confidences[:count]


@compiled
def commit(nodes: Nodes, size: int, tokens: IntArray) -> tuple[int, int, IntArray, int]:
    """The new size, 0 where the tokens lead out of the tree; the root's children; slots along the path and freed ones, and
    how many of them are along the path.

    What hangs below the last of the tokens is renumbered: no node moves back.
    """
    along = path(nodes, size, tokens)
    slots = np.empty(len(along) + size, np.int32)
    taken = 0
    while taken < len(along) and nodes.slot[along[taken]] != NO_SLOT:
        slots[taken] = nodes.slot[along[taken]]
        nodes.slot[along[taken]] = NO_SLOT  # the path's KV belongs to the committed prefix now
        taken += 1
    root = along[-1] if len(along) == len(tokens) else size
    index = np.full(size, _GONE, np.int32)  # where each node goes
    count, held = 0, taken
    for i in range(size):
        stays = i == root or (i > root and index[nodes.parent[i]] != _GONE)
        if nodes.slot[i] != NO_SLOT and (not stays or i == root):
            slots[held] = nodes.slot[i]
            held += 1
        if stays:
            index[i] = count
            _move(nodes, i, count, index[nodes.parent[i]] if count else -1)
            count += 1
    if count:
        _replant(nodes, count)
    return count, (nodes.parent[1:count] == 0).sum(), slots[:held], taken


@compiled
def _move(nodes: Nodes, old: int, new: int, parent: int) -> None:
    nodes.parent[new], nodes.token[new], nodes.confidence[new] = parent, nodes.token[old], nodes.confidence[old]
    nodes.depth[new], nodes.probability[new] = nodes.depth[old], nodes.probability[old]
    nodes.slot[new], nodes.expanded[new], nodes.sent[new] = nodes.slot[old], nodes.expanded[old], nodes.sent[old]


@compiled
def _replant(nodes: Nodes, size: int) -> None:
    """Makes node 0 a root: depths and probabilities count from there."""
    scale, level = nodes.probability[0], nodes.depth[0]
    nodes.confidence[0] = nodes.probability[0] = 1.0
    nodes.slot[0], nodes.sent[0], nodes.depth[0] = NO_SLOT, True, 0
    for i in range(1, size):
        nodes.depth[i] -= level
        if scale < _TINY:  # it was thought impossible
            nodes.probability[i] = nodes.probability[nodes.parent[i]] * nodes.confidence[i]
        else:
            nodes.probability[i] /= scale
