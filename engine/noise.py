"""Gumbel noise as a pure function of (seed, position, token): the only source of randomness.

A counter-based generator in the manner of Salmon et al. 2011 (https://doi.org/10.1145/2063384.2063405): a key is derived
from seed and position, then mixed with the token id by splitmix64's finalizer (Steele et al. 2014,
https://doi.org/10.1145/2660193.2660195). Integers are 64 bits wide and wrap, so every device computes the same ones.

Over a large vocabulary the two logarithms are what costs. They are needed of the tokens with the largest random bits, the
same for all rows at a position, and of those whose logits are large enough without such noise: see `contenders`.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.compiled import compiled
from engine.types import BoolArray, FloatArray, IntArray

Keys = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-52  # 52 random bits and a half: never 0, never 1, and the largest noise is 36.7

_LOUD = 256  # tokens with the largest noise at a position that are looked at whatever their logits are, about
_LEAST = float(np.finfo(np.float32).min)
_BLOCK = 512  # tokens that are hashed together
TOGETHER = 64  # logits that are compared together
_SPARE = 4  # contenders kept beside those asked for: ties within rounding
_PLACES = 256  # positions whose loud tokens are kept
_ROOM = 384  # of them at one position: eight standard deviations above _LOUD


class Loud(NamedTuple):
    """The tokens with the largest noise at the positions that were asked for last, for one size of vocabulary.

    Draft steps come back to the same few positions, and half of a guess' time is finding these. For one thread alone.
    """

    keys: Keys  # int64 [places]
    held: Keys  # int64 [places]: how many tokens; 0 where there is no position yet
    tokens: IntArray  # [places, room]
    noise: Doubles  # [places, room]


def make_loud(places: int = _PLACES, room: int = _ROOM) -> Loud:
    """Of no position yet."""
    keys, held = np.zeros(places, np.int64), np.zeros(places, np.int64)
    return Loud(keys, held, np.empty((places, room), np.int32), np.empty((places, room)))


NONE_KEPT = make_loud(1, 0)  # remembers nothing, so that any thread may take it


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _mix_int(value: int) -> int:
    """splitmix64's finalizer on one unsigned integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors; the masks make arithmetic shifts logical. Works in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value ^= (value >> shift) & ((1 << (64 - shift)) - 1)
        value *= _signed(factor)
    value ^= (value >> 31) & ((1 << 33) - 1)
    return value


@lru_cache(maxsize=2**14)  # the same positions come again, from draft steps and in trees
def key(seed: int, position: int) -> int:
    """The 64-bit key of one output position of one sample."""
    return _mix_int(_mix_int(seed + _GOLDEN) ^ ((position + 1) * _GOLDEN))


def derive_seed(seed: int, sample: int) -> int:
    """The seed of one of several samples of a request, below 2^63; the first keeps the request's own."""
    return seed if sample == 0 else _mix_int(_mix_int(seed + _GOLDEN) + sample * _SECOND) >> 1


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, shape of `keys` broadcast with `tokens`.

    keys: int64, from `key`; tokens: int64 token ids on the same device.
    """
    bits = _mix(keys + tokens * _signed(_GOLDEN))
    return _noise_of(((bits >> 12) & (2**52 - 1)).to(torch.float64).add_(0.5).mul_(_UNIT))


def _noise_of(uniform: torch.Tensor) -> torch.Tensor:
    """Of float64 uniforms, which it overwrites."""
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def keys(seed: int, positions: Iterable[int]) -> torch.Tensor:
    """Keys for several positions of one sample: int64 [n]."""
    return keys_of([(seed, position) for position in positions])


def keys_of(places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Keys for (seed, position) of any samples: int64 [n]."""
    unsigned = np.array([key(*place) for place in places], np.uint64)
    return torch.from_numpy(unsigned.view(np.int64))


def contenders(values: FloatArray, keys: Keys, count: int) -> tuple[IntArray, FloatArray, BoolArray]:
    """Of each row [n, vocab_size] the tokens that can be among the `count` best of values + noise, and their noise.

    Returns tokens [n, m], -1 behind the last one, and their noise [n, m], as `gumbel` gives it. The third, [n], is False for
    rows whose best may be among others too: more of them are equal within rounding than are kept.
    """
    tokens, uniforms, _, sure, _ = _contenders(values, keys, count, count + _SPARE, NONE_KEPT)
    noise: FloatArray = _noise_of(torch.from_numpy(uniforms)).numpy()
    return tokens, noise, sure


@compiled
def _contenders(
    values: FloatArray, keys: Keys, count: int, room: int, kept: Loud
) -> tuple[IntArray, Doubles, Doubles, BoolArray, BoolArray]:
    """The `room` best of each row by scores in double precision, their uniforms and scores.

    Then whether the `count` best are surely among them, and whether they are surely the first, in this order.
    """
    rows, size = values.shape
    tokens = np.full((rows, room), -1, np.int32)
    uniforms = np.full((rows, room), 0.5)
    scores = np.full((rows, room), -np.inf)
    sure, clear = np.ones(rows, np.bool_), np.ones(rows, np.bool_)
    least = np.uint64(max(0.0, 1.0 - _LOUD / size) * 2.0**52)  # bits of the loud ones
    bound = _noise(_uniform(least)) + 1e-9  # of the noise of all others
    for first in range(rows):
        if (keys[:first] == keys[first]).any():
            continue  # with those before it
        key = np.uint64(keys[first])
        loud, noise = _loud_of(key, size, least, kept)
        for row in range(first, rows):
            if keys[row] != keys[first]:
                continue
            mine, found, theirs, best = values[row], tokens[row], uniforms[row], scores[row]
            for i in range(len(loud)):
                score = mine[loud[i]] + noise[i]
                if score > best[room - 1]:
                    _insert(best, found, theirs, score, loud[i], _uniform(_bits(key, np.uint64(loud[i]))))
            limit = _limit(best[room - 1], bound)
            for start in range(0, size, TOGETHER):
                stop = min(start + TOGETHER, size)
                if not reaches(mine[start:stop], limit):
                    continue
                for token in range(start, stop):
                    if mine[token] >= limit:
                        bits = _bits(key, np.uint64(token))
                        if bits < least:
                            uniform = _uniform(bits)
                            score = mine[token] + _noise(uniform)
                            if score > best[room - 1]:
                                _insert(best, found, theirs, score, token, uniform)
                                limit = _limit(best[room - 1], bound)
            sure[row] = _apart(best[count - 1], best[room - 1])
            for place in range(count):
                clear[row] &= _apart(best[place], best[place + 1])
    return tokens, uniforms, scores, sure, clear


@compiled
def best_within_rounding(
    values: FloatArray, keys: Keys, count: int, kept: Loud
) -> tuple[IntArray, FloatArray, BoolArray]:
    """The `count` best of values + noise in each row [n, vocab_size], the best first, and their scores, both [n, count].

    They are compared in double precision; behind the last one stand token 0 and -inf. The third, [n], is False for rows
    where `gumbel`'s noise, in single precision, may bring others or another order.
    """
    tokens, _, scores, _, clear = _contenders(values, keys, count, count + 1, kept)
    return np.maximum(tokens[:, :count], np.int32(0)), scores[:, :count].astype(np.float32), clear


@compiled
def _loud_of(key: np.uint64, size: int, least: np.uint64, kept: Loud) -> tuple[IntArray, Doubles]:
    """The tokens with at least these bits, and their noise; kept where there is room for them."""
    place = np.int64(key % np.uint64(len(kept.keys)))
    if kept.held[place] > 0 and kept.keys[place] == np.int64(key):
        return kept.tokens[place][: kept.held[place]], kept.noise[place][: kept.held[place]]
    tokens = np.empty(size + 1, np.int32)
    held = _find_loud(key, size, least, tokens)
    noise = np.empty(held)
    for i in range(held):
        noise[i] = _noise(_uniform(_bits(key, np.uint64(tokens[i]))))
    if held <= kept.tokens.shape[1]:
        kept.keys[place], kept.held[place] = np.int64(key), held
        kept.tokens[place][:held], kept.noise[place][:held] = tokens[:held], noise
    return tokens[:held], noise


@compiled
def _find_loud(key: np.uint64, size: int, least: np.uint64, loud: IntArray) -> int:
    """Writes the tokens with at least these bits to `loud`, which has room for one more than `size`; their number."""
    block = np.empty(_BLOCK, np.uint64)
    held = 0
    for start in range(0, size, _BLOCK):
        for i in range(_BLOCK):  # a loop of its own: compilers make vectors of it
            block[i] = _bits(key, np.uint64(start + i))
        for i in range(min(_BLOCK, size - start)):
            loud[held] = start + i
            held += block[i] >= least
    return held


@compiled
def _limit(worst: float, bound: float) -> np.float32:
    """The least logit that can reach the worst score of those held with noise within the bound, rounding and all.

    It is a number: tokens that were filtered out, at -inf, never reach anything.
    """
    return np.float32(max(worst - bound - 1e-6 * abs(worst), _LEAST))


@compiled
def reaches(values: FloatArray, limit: np.float32) -> bool:
    """Whether any value is at least the limit; counted, since compilers make vectors of that."""
    count = 0
    for i in range(len(values)):
        count += values[i] >= limit
    return count > 0


@compiled
def _insert(best: Doubles, tokens: IntArray, uniforms: Doubles, score: float, token: int, uniform: float) -> None:
    """Puts a token that is better than the last where its score belongs, the best first."""
    at = len(best) - 1
    while at > 0 and best[at - 1] < score:
        best[at], tokens[at], uniforms[at] = best[at - 1], tokens[at - 1], uniforms[at - 1]
        at -= 1
    best[at], tokens[at], uniforms[at] = score, token, uniform


@compiled
def _uniform(bits: np.uint64) -> float:
    return (np.float64(bits) + 0.5) * _UNIT


@compiled
def _noise(uniform: float) -> float:
    return -math.log(-math.log(uniform))


@compiled
def _apart(score: float, next_score: float) -> bool:
    """Whether rounding can't make the better score the worse one, or the same."""
    return bool(next_score == -np.inf or score - _rounding(score) > next_score + _rounding(next_score))


@compiled
def _rounding(score: float) -> float:
    """How far a score in single precision can be from the one in double precision."""
    return 1e-5 + 2.4e-7 * abs(score)


@compiled
def _bits(key: np.uint64, token: np.uint64) -> np.uint64:
    """The 52 random bits of one token."""
    return _mixed(key + token * np.uint64(_GOLDEN)) >> np.uint64(12)


@compiled
def key_of(seed: np.uint64, position: int) -> np.int64:
    """`key`, with the bits of an int64, for compiled loops."""
    at = np.uint64(position + 1) * np.uint64(_GOLDEN)
    return np.int64(_mixed(_mixed(seed + np.uint64(_GOLDEN)) ^ at))


@compiled
def _mixed(value: np.uint64) -> np.uint64:
    """`_mix`, for unsigned integers that wrap."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return value ^ (value >> np.uint64(31))
