"""A whole pass of a decoder of the Llama family as one compiled call, and the choice of tokens with it.

In torch a small model's pass is mostly what its many small operations cost beside their arithmetic. Here loops do all that
lies between linear layers, and these are torch's own, called by address: from the embeddings to the tokens nothing needs
the interpreter, whose lock a server's other threads want, and whose work costs several times as much behind a pass that has
filled the caches with weights.
"""

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from engine import torch_calls
from engine.attention import Layout, Longs
from engine.compiled import borrowed, compiled, exponential, widened
from engine.cpu import BlockedLinear, ByteLinear, HalfLinear, read_in_order
from engine.fused import FusedLayer, FusedNorm, is_plain_decoder, positions_of
from engine.kv import KVPool, finite, numbers_of
from engine.noise import Keys, Loud, make_loud
from engine.page_attention import attend, consistent, store
from engine.sampling import NO_KEYS, Best, rank, scaled
from engine.torch_calls import handle_of, leave, linear, product, release, room, rounded_product
from engine.types import BoolArray, FloatArray, IntArray

_long = partial(compiled, long=True)
_NO_ROWS, _NO_TEMPERATURES = np.zeros(0, np.int64), np.zeros(0, np.float32)


class Weights(NamedTuple):
    """A decoder as compiled loops know it."""

    names: Any  # torch_calls.names()
    embedding: FloatArray  # [vocab_size, hidden_size], of numbers_of
    linears: Any  # uint64 [4 * layers + 1]: qkv, attention's output, gate and up, down of each; then the output layer's
    blocked: bool  # whether those are addresses of BlockedLinear's weights; else handles of HalfLinear's
    lines: Longs  # of BlockedLinear's
    scales: FloatArray  # of ByteLinear's outputs, one layer after the other; none where they aren't of that kind
    middles: IntArray  # of the same
    scale_starts: Longs  # [linears + 1]: where each one's begin
    biases: FloatArray  # of those layers that have one, one after the other
    bias_starts: Longs  # [linears + 1]: where each one's begins; nothing between two starts is none
    norms: FloatArray  # weights times the root of hidden_size, [2 * layers + 1, hidden_size]
    least: np.float32  # added to squares of rows before the root
    cosines: FloatArray  # [positions, head_dim / 2]
    sines: FloatArray
    inner: int  # intermediate_size
    scale: float  # of scores
    heads: int  # of queries
    vocab_size: int  # of the output layer; 0: it is of another kind


class Passed(NamedTuple):
    """What a pass gives of the rows that are wanted, [n, ...]."""

    states: torch.Tensor  # final, [n, hidden_size]
    logits: torch.Tensor  # [n, vocab_size]
    finite: bool  # whether all of these are
    best: Best


class _Kept(threading.local):
    """What a thread's passes remember."""

    def __init__(self) -> None:
        self.loud = make_loud()


class CompiledDecoder:
    """A decoder whose layers are all FusedLayer.

    float32 has weights in float16. In bfloat16, weights, KV and what linear layers read are; all else is float32, so less is
    rounded than by transformers. A row's bits depend on its own path alone. Any number of rows from `least_rows` on takes
    the time of so many: nothing has to be filled up.
    """

    def __init__(self, model: Any, pool: KVPool, head: Any, last: int) -> None:
        """model: one whose base `compiles`; pool: a paged one; head: from final states to logits, see engine.head.

        last: the position that those beyond it count as.
        """
        assert pool.paged
        self.last = last
        base = model.base_model
        layers: list[FusedLayer] = list(base.layers)
        linears, norms = _linears(layers), _norms(base)
        self.chooses = type(head) is type(linears[0])  # whether `best` is there
        outer = [head] if self.chooses else []
        if isinstance(linears[0], BlockedLinear):
            size = sum(each.blocks.nbytes for each in [*linears, *outer])
            read_in_order(linears, size)
            if outer:  # else the model does more behind it
                read_in_order(outer, size)
        self.least_rows = 1 if all(map(_same_alone, [*linears, model.get_output_embeddings()])) else 2
        linears += outer
        blocked = [each for each in linears if isinstance(each, BlockedLinear)]
        self._blocks = [each.blocks for each in blocked]  # held while their addresses are used
        handles = torch_calls.handles_of([each.packed for each in linears if isinstance(each, HalfLinear)])
        # Not when the process ends: a thread may be in a pass then.
        weakref.finalize(self, torch_calls.release_all, handles).atexit = False
        addresses = [each.data_ptr() for each in self._blocks]
        rounded = [each for each in blocked if isinstance(each, ByteLinear)]
        biases = [torch.zeros(0) if each.bias is None or not each.bias.any() else each.bias for each in linears]
        half = layers[0].dim // 2  # both halves of a head are turned by the same angles
        cosines, sines = (side[:, :half].contiguous() for side in _rotations(base, positions_of(model, pool)))
        self.weights = Weights(
            torch_calls.names(),
            numbers_of(base.embed_tokens.weight),
            np.array(handles or addresses, np.uint64),
            bool(blocked),
            np.array([each.line for each in blocked], np.int64),
            torch.cat([torch.zeros(0), *(each.scales for each in rounded)]).numpy(),
            torch.cat([torch.zeros(0, dtype=torch.int32), *(each.middles for each in rounded)]).numpy(),
            np.cumsum([0, *(len(each.scales) for each in rounded)], dtype=np.int64),
            torch.cat(biases).numpy(),
            np.cumsum([0, *(len(each) for each in biases)], dtype=np.int64),
            torch.stack([norm.scaled for norm in norms]).numpy(),
            np.float32(base.norm.least),
            cosines.numpy(),
            sines.numpy(),
            layers[0].down.weight.shape[1],
            float(layers[0].scale),
            layers[0].heads,
            len(head.weight) if self.chooses else 0,
        )
        self.data = numbers_of(pool.data).reshape(*pool.data.shape[:3], pool.pages, -1)
        self._kept = _Kept()

    @property
    def loud(self) -> Loud:
        """What `best_tokens` takes last, of the calling thread."""
        return self._kept.loud

    def __call__(self, layout: Layout, span: tuple[int, int, int]) -> torch.Tensor:
        """span: of rows in the layout, see there. Returns the final hidden states [rows, hidden_size]."""
        return torch.from_numpy(self._computed(layout, span, _NO_ROWS, _NO_TEMPERATURES, NO_KEYS, 0)[0])

    def best(self, layout: Layout, wanted: Longs, temperatures: FloatArray, keys: Keys, count: int) -> Passed:
        """A pass over all rows of a layout, and the `count` best tokens of those `wanted`, where nothing is filtered out.

        temperatures: float32, of the wanted rows; keys: of their noise, or none where all are greedy.
        """
        span = (0, layout.rows, max(0, self.least_rows - layout.rows))
        computed = self._computed(layout, span, wanted, temperatures, keys, count)
        _, states, logits, finite, found, scores, clear = computed
        return Passed(torch.from_numpy(states), torch.from_numpy(logits), finite, Best(found, scores, clear))

    def _computed(
        self,
        layout: Layout,
        span: tuple[int, int, int],
        wanted: Longs,
        temperatures: FloatArray,
        keys: Keys,
        count: int,
    ) -> tuple[FloatArray, FloatArray, FloatArray, bool, IntArray, FloatArray, BoolArray]:
        """All of a decoder's passes: within another compiled function, the same loops may differ in the last bits."""
        seen = layout.seen(*span)
        return best_tokens(
            self.weights, *seen[:3], self.data, seen.plan, wanted, self.least_rows, temperatures, keys, count, self.loud
        )


def compiles(base: Any) -> bool:
    """Whether a model without its output layer can be a CompiledDecoder: its parts are all of the kinds known here."""
    if not torch_calls.available() or not is_plain_decoder(base):
        return False
    layers: list[Any] = list(base.layers)
    kinds = {type(each) for each in _linears(layers)}
    return (
        len(kinds) == 1
        and kinds <= {BlockedLinear, ByteLinear, HalfLinear}
        and len({(layer.heads, layer.dim, layer.scale, layer.down.weight.shape) for layer in layers}) == 1
        and all(isinstance(norm, FusedNorm) and norm.least == base.norm.least for norm in _norms(base))
        and all(_alike(side, layers[0].dim) for side in _rotations(base, 2))
        and consistent(kinds != {HalfLinear}, layers[0].dim, layers[0].heads // layers[0].kv_heads)
    )


def _linears(layers: Sequence[Any]) -> list[Any]:
    """In the order of `Weights.linears`."""
    return [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]


@torch.inference_mode()
def _same_alone(linear: Any) -> bool:
    """Whether a row's bits are the same alone and beside another."""
    x = torch.arange(2.0 * linear.weight.shape[1]).sin().view(2, -1)
    return torch.equal(linear(x[:1]), linear(x)[:1])


def _norms(base: Any) -> list[Any]:
    """In the order of `Weights.norms`."""
    return [*(norm for layer in base.layers for norm in (layer.before_attention, layer.before_mlp)), base.norm]


def _alike(rotation: torch.Tensor, dim: int) -> bool:
    """Whether whole heads are turned, and both halves by the same angles; rotation: [positions, features]."""
    return rotation.shape[1] == dim and torch.equal(*rotation.chunk(2, 1))


@torch.inference_mode()
def _rotations(base: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles at each position, [positions, head_dim]."""
    cosines, sines = base.rotary_emb(base.embed_tokens.weight[:1].float(), torch.arange(length)[None])
    return cosines[0], sines[0]


@_long
def best_tokens(
    weights: Weights,
    tokens: Longs,
    positions: Longs,
    write: Longs,
    data: FloatArray,
    plan: IntArray,
    wanted: Longs,
    least_rows: int,
    temperatures: FloatArray,
    keys: Keys,
    count: int,
    kept: Loud,
) -> tuple[FloatArray, FloatArray, FloatArray, bool, IntArray, FloatArray, BoolArray]:
    """What `_pass` takes, then what CompiledDecoder.best does, whose `loud` is kept.

    Returns the final states of all rows, then the parts of Passed.
    """
    every = _pass(weights, tokens, positions, write, data, plan)
    n = len(wanted)
    states = np.zeros((max(n, least_rows), every.shape[1]), np.float32)
    for row in range(n):
        states[row] = every[wanted[row]]
    logits = room(len(states), weights.vocab_size, np.float32)
    if n:
        of_states, of_logits = handle_of(states), handle_of(logits)
        _linear(weights, len(weights.linears) - 1, states, of_states, logits, of_logits)
        release(of_states)
        release(of_logits)
        if weights.blocked:
            leave()
    states, logits = states[:n], logits[:n]
    tokens_found, scores, clear = rank(scaled(logits, temperatures), temperatures > 0, keys, count, kept)
    return every, states, logits, finite(logits.ravel()), tokens_found, scores, clear


@_long
def _pass(
    weights: Weights,
    tokens: Longs,
    positions: Longs,
    write: Longs,
    data: FloatArray,
    plan: IntArray,
) -> FloatArray:
    """tokens, positions, write: [n]; data: of the pool, [layers, 2, kv_heads, pages, PAGE x head_dim].

    plan: page_plan.plan. Returns states [n, hidden_size].
    """
    n, kv_heads, inner, heads, dim = (
        len(tokens),
        data.shape[2],
        weights.inner,
        weights.heads,
        2 * weights.cosines.shape[1],
    )
    hidden, outer = weights.embedding.shape[1], (heads + 2 * kv_heads) * dim
    x = room(n, hidden, np.float32)
    for row in range(n):
        if not 0 <= tokens[row] < len(weights.embedding):
            raise IndexError("a token is not in the vocabulary")
        if not (0 <= positions[row] < len(weights.cosines) and 0 <= write[row] * dim < data[0, 0, 0].size):
            raise IndexError("a row is at no position or has no slot")
        _widen(weights.embedding[tokens[row]], x[row])
    normed: FloatArray = room(n, hidden, np.float32)
    added = room(n, hidden, np.float32)
    added[:] = 0
    qkv = room(n, outer, np.float32).reshape(n, -1, dim)
    attended = room(n, heads * dim, np.float32).reshape(n, heads, dim)
    attended[:] = 0  # rows that attend nowhere are padding
    gates, gated = room(n, 2 * inner, np.float32), room(n, inner, np.float32)
    of_normed, of_added, of_qkv = handle_of(normed), handle_of(added), handle_of(qkv.reshape(n, -1))
    of_attended, of_gates, of_gated = handle_of(attended.reshape(n, -1)), handle_of(gates), handle_of(gated)
    for layer in range(len(weights.norms) // 2):
        keys, values = data[layer, 0], data[layer, 1]  # unpacked, compilers would not know that rows are contiguous
        _add_and_norm(x, added, weights.norms[2 * layer], weights.least, normed)
        _linear(weights, 4 * layer, normed, of_normed, qkv.reshape(n, -1), of_qkv)
        _rotate(qkv, heads + kv_heads, positions, weights.cosines, weights.sines)
        _store(qkv, heads, write, keys, values)
        attend(qkv, keys, values, plan, weights.scale, attended)
        _linear(weights, 4 * layer + 1, attended.reshape(n, -1), of_attended, added, of_added)
        _add_and_norm(x, added, weights.norms[2 * layer + 1], weights.least, normed)
        _linear(weights, 4 * layer + 2, normed, of_normed, gates, of_gates)
        _gate(gates, gated)
        _linear(weights, 4 * layer + 3, gated, of_gated, added, of_added)
    _add_and_norm(x, added, weights.norms[-1], weights.least, normed)
    for handle in (of_normed, of_added, of_qkv, of_attended, of_gates, of_gated):
        release(handle)
    if weights.blocked:
        leave()
    return normed


@_long
def _linear(weights: Weights, which: int, x: FloatArray, of_x: np.uint64, out: FloatArray, of_out: np.uint64) -> None:
    """One of the linear layers; of_x, of_out: handles of x and out."""
    if len(weights.scales):
        first, last = weights.scale_starts[which], weights.scale_starts[which + 1]
        scales, middles = weights.scales[first:last], weights.middles[first:last]
        rounded_product(x, weights.linears[which], weights.lines[which], scales, middles, out)
    elif weights.blocked:
        product(x, weights.linears[which], weights.lines[which], out)
    else:
        linear(weights.names, of_x, weights.linears[which], of_out)
    start, stop = weights.bias_starts[which], weights.bias_starts[which + 1]
    if stop > start:
        for row in range(len(out)):
            out[row] += weights.biases[start:stop]


@_long
def _widen(row: FloatArray, out: FloatArray) -> None:
    for i in range(len(out)):
        out[i] = widened(row[i])


@_long
def _add_and_norm(x: FloatArray, added: FloatArray, scaled: FloatArray, least: np.float32, out: FloatArray) -> None:
    """Adds to rows of x, and RMSNorm of the sums; see engine.fused.FusedNorm."""
    x, added, out = borrowed(x), borrowed(added), borrowed(out)
    for row in range(len(x)):
        total, sums, to = np.float32(0), x[row], out[row]
        more = added[row]
        for i in range(len(sums)):
            number = sums[i] + more[i]
            sums[i] = number
            total += number * number
        factor = np.float32(1) / np.sqrt(total + least)
        for i in range(len(to)):
            to[i] = sums[i] * factor * scaled[i]


@_long
def _rotate(qkv: FloatArray, heads: int, positions: Longs, cosines: FloatArray, sines: FloatArray) -> None:
    """Rotary embedding in place, by halves (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    qkv: [rows, heads or more, head_dim], of which the first `heads` are turned.
    """
    half = cosines.shape[1]
    qkv, cosines, sines = borrowed(qkv), borrowed(cosines), borrowed(sines)
    for row in range(len(qkv)):
        cosine, sine = cosines[positions[row]], sines[positions[row]]
        for head in range(heads):
            low, high = qkv[row, head, :half], qkv[row, head, half:]
            for i in range(len(cosine)):
                a, b = low[i], high[i]
                low[i] = a * cosine[i] - b * sine[i]
                high[i] = b * cosine[i] + a * sine[i]


@_long
def _store(qkv: FloatArray, heads: int, write: Longs, keys: FloatArray, values: FloatArray) -> None:
    """Writes rows' keys and values to a layer's pages, [kv_heads, pages, PAGE x head_dim]."""
    qkv, keys, values = borrowed(qkv), borrowed(keys), borrowed(values)
    for row in range(len(qkv)):
        for kv in range(len(keys)):
            store(qkv[row, heads + kv], True, write[row], keys[kv].reshape(-1))
            store(qkv[row, heads + len(keys) + kv], False, write[row], values[kv].reshape(-1))


@_long
def _gate(gates: FloatArray, out: FloatArray) -> None:
    """SiLU of one half of each row times the other."""
    gates, out = borrowed(gates), borrowed(out)
    for row in range(len(out)):
        to = out[row]
        gate, up = gates[row, : len(to)], gates[row, len(to) :]
        for i in range(len(to)):
            to[i] = gate[i] * up[i] / (np.float32(1) + exponential(-gate[i]))
