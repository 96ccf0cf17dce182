"""Logits to tokens: the only place. Coupled sampling: argmax over logits/T + Gumbel(seed, position, token).

With the noise fixed, the choice is a function of the logits alone, and over seeds it follows the softmax exactly (the
Gumbel-max trick: Maddison et al. 2014, https://arxiv.org/abs/1411.0030). With T = 0 it is plain argmax. Of equal scores the
lowest token id is the best. On CPUs noise is computed only for tokens that can be among the best: the outcome is the same.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from engine.compiled import compiled
from engine.noise import NONE_KEPT, TOGETHER, Keys, Loud, best_within_rounding, contenders, gumbel, reaches
from engine.types import BoolArray, FloatArray, IntArray, SamplingParams, TokenLogprobs

_HEAD = 256  # top-p looks at this many tokens first, and at all only where they don't hold enough mass
_CANDIDATES = 16  # a draft's confidences are shares among this many tokens; sharpened, the others hold next to nothing
NO_KEYS: Keys = np.zeros(0, np.int64)  # where all rows are greedy
# Of a draft's softmax, which is flatter than its hit rate; less so beside noise, which takes its choices further from the
# target's. The best of 1.5 to 8 and of 1 to 3.5 on the bundled pair.
_SHARPNESS, _NOISY_SHARPNESS = np.float32(3.5), np.float32(2.4)


class Best(NamedTuple):
    """The best tokens of each row, the best first, and their scores, within rounding: [n, count]. See `best`."""

    tokens: IntArray
    scores: FloatArray
    clear: BoolArray  # [n]: False where rounding may have brought others, or another order


def scores(logits: torch.Tensor, params: SamplingParams, noise: torch.Tensor | None) -> torch.Tensor:
    """The rule itself, what the argmax is taken of: float32 [n, vocab_size], -inf for tokens that are filtered out.

    logits: [n, vocab_size], processed; noise: float32 [n, vocab_size], needed when the temperature is not 0.
    """
    logits = logits.float()
    if params.temperature == 0:
        return logits
    assert noise is not None
    return restrict(logits / params.temperature, params) + noise


def choose(logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None) -> IntArray:
    """The chosen token of each row, [n]: the argmax of `scores`.

    params: of each row; keys: int64 [n], of the rows' noise (`engine.noise.keys_of`), needed when a row is not greedy.
    """
    return settled(best(logits, params, keys, 1), logits, params, keys)


def settled(found: Best, logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None) -> IntArray:
    """What `choose` gives, [n], where the best of each row were found already."""
    tokens: IntArray = found.tokens[:, 0]
    if keys is not None and not found.clear.all():
        for row in np.flatnonzero(~found.clear).tolist():
            own = slice(row, row + 1)
            tokens[row] = _exactly_best(logits[own], params[own], keys[own], 1)[0][0, 0]
    return tokens


def margins(logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None) -> FloatArray:
    """How far scaled logits would have to move, against each other, for another choice in each row, [n]. See `choose`.

    That is the distance between the two best scores. Where tokens are filtered out, it is also enough that a better one is
    let in or the chosen one left out; with top-p somewhat less may do, where several tokens change places.

    On the CPU: what is asked of single tokens would wait for a device each time.
    """
    logits, keys = logits.float().cpu(), keys.cpu() if keys is not None else None
    tokens, two = _exactly_best(logits, params, keys, 2)
    found: FloatArray = two[:, 0] - two[:, 1]
    for row, own in enumerate(params):
        if keys is not None and filters(own):
            values = logits[row] / own.temperature
            noise = gumbel(keys[row], torch.arange(len(values)))
            found[row] = min(found[row], margin_of_filters(values, noise, own, int(tokens[row, 0])))
    return found


def margin_of_filters(values: torch.Tensor, noise: torch.Tensor, params: SamplingParams, chosen: int) -> float:
    """How far scaled logits [vocab_size] would have to move for another choice, filters and all; noise: [vocab_size].

    Where each moves by half a distance at most, the log-odds of any set of tokens move by no more than the distance.
    """
    scores, others = values + noise, values.clone()
    others[chosen] = -torch.inf
    order = values.sort(descending=True).values
    kept, leaves = values, math.inf  # how far the chosen one is from being left out
    below = torch.zeros_like(values)  # how far each token is from being let in
    if 0 < params.top_k < len(values):
        floor = order[params.top_k - 1]
        kept = values.masked_fill(values < floor, -torch.inf)
        below, leaves = (floor - values).clamp_min(0), float(values[chosen] - order[params.top_k])
    if params.min_p > 0:
        least = math.log(params.min_p)
        below = torch.maximum(below, (values.max() + least - values).clamp_min(0))
        leaves = min(leaves, float(values[chosen] - others.max() - least))
    distances = torch.maximum(below, scores[chosen] - scores)
    distances[chosen] = torch.inf
    distances[values.isneginf()] = torch.inf  # what a processor forbids stays forbidden
    if params.top_p < 1:
        nucleus = _Nucleus(kept, params.top_p)
        leaves = min(leaves, nucleus.leaves(float(values[chosen])))
        for token in torch.nonzero(values < nucleus.floor)[:, 0].tolist():
            if distances[token] < leaves:
                distances[token] = max(float(distances[token]), nucleus.enters(float(values[token])))
    return max(0.0, min(leaves, float(distances.min())))


class _Nucleus:
    """Of top-p, for scaled logits [vocab_size]: how far a token is from being let in or left out.

    It moves until it stands where another one does, or the mass before it moves, whichever takes more; by the easiest place.
    """

    def __init__(self, values: torch.Tensor, top_p: float) -> None:
        self.floor = float(_nucleus_floor(values[None], top_p)[0, 0])
        allowed = values[~values.isneginf()].double().sort(descending=True).values
        self._values, self._shares = allowed, allowed.softmax(-1)
        self._mass = self._shares.cumsum(-1)
        self._edge = math.log(top_p / (1 - top_p))

    def enters(self, value: float) -> float:
        """For a token with this scaled logit, outside."""
        ahead = self._values >= value
        over = ((self._mass - self._shares)[ahead].logit() - self._edge).clamp_min(0)
        return float(torch.maximum(self._values[ahead] - value, over).min())

    def leaves(self, value: float) -> float:
        """For a token with this scaled logit, inside; the first of all stays."""
        behind = self._values <= value
        before = self._mass[behind] - self._shares[behind][0]
        short = (self._edge - before.clamp(0, 1).logit()).clamp_min(0)
        return float(torch.maximum(value - self._values[behind], short).min())


def logprobs(logits: torch.Tensor, chosen: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What the model itself thinks of the chosen tokens, and of its `count` likeliest. logits: raw, [n, vocab_size]."""
    raw = logits.float().log_softmax(-1)
    best = raw.topk(min(count, raw.shape[-1]), dim=-1)
    own = raw.gather(-1, torch.tensor(chosen, device=raw.device)[:, None])[:, 0].tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprobs(value, top) for value, top in zip(own, tops, strict=True)]


def restrict(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Applies top-k, then top-p, then min-p to temperature-scaled logits [n, vocab_size]; removed tokens become -inf."""
    if 0 < params.top_k < logits.shape[-1]:
        floor = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if params.top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, params.top_p), -torch.inf)
    if params.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(params.min_p, device=logits.device))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _nucleus_floor(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit of each row's nucleus [n, 1]: the fewest most probable tokens with at least `top_p` mass."""
    shares = logits.softmax(-1)  # logsumexp of a single row is another sum than beside others, with several threads
    count = min(_HEAD, logits.shape[-1])
    head, order = logits.topk(count, dim=-1)
    mass = _running_sum(shares.gather(-1, order))
    if count < logits.shape[-1] and bool((mass[:, -1] < top_p).any()):
        head, order = logits.sort(dim=-1, descending=True)
        mass = _running_sum(shares.gather(-1, order))
    last = (mass < top_p).sum(-1, keepdim=True).clamp_(max=head.shape[-1] - 1)
    return head.gather(-1, last)


def _running_sum(shares: torch.Tensor) -> torch.Tensor:
    """Of each row, float32: in double, as CPUs have it anyway, since a GPU adds in another order beside other rows."""
    return shares.double().cumsum(-1).float()


def propose(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None, count: int
) -> tuple[IntArray, FloatArray]:
    """A draft's guesses at what `choose` will give a better model: (tokens, confidences), both [n, count].

    logits: [n, vocab_size] of the draft; params: of each row; keys: int64 [n], of the target's noise, needed when a row is
    not greedy.
    """
    return guesses(best(logits, params, keys, candidates(count, logits.shape[-1])), params, count)


def candidates(count: int, vocab_size: int) -> int:
    """How many of the best tokens `count` guesses are made of."""
    return max(count, min(_CANDIDATES, vocab_size))


def guesses(found: Best, params: Sequence[SamplingParams], count: int) -> tuple[IntArray, FloatArray]:
    """What `propose` gives, where the best `candidates` of each row were found already."""
    tokens: IntArray = found.tokens[:, :count].copy()  # contiguous, as compiled loops know them
    return tokens, shares(found.scores, _noisy(params), count)


def best(logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None, count: int) -> Best:
    """The `count` tokens of each row with the best scores. Arguments: see `choose`."""
    values, noisy = _scaled(logits.float(), params), _noisy(params)
    if values.is_cpu:
        own = NO_KEYS if keys is None else keys.numpy()
        return Best(*rank(values.contiguous().numpy(), noisy, own, count, NONE_KEPT))
    tokens, largest = _best_from_device(values, noisy, keys, count)
    return Best(tokens, largest, np.ones(len(tokens), np.bool_))


def _noisy(params: Sequence[SamplingParams]) -> BoolArray:
    return np.array([row.temperature > 0 for row in params], np.bool_)


def filters(params: SamplingParams) -> bool:
    """Whether some tokens' scores are -inf whatever their logits are, of which `rank` knows nothing."""
    return params.temperature > 0 and (params.top_k, params.top_p, params.min_p) != (0, 1.0, 0.0)


@compiled
def rank(
    values: FloatArray, noisy: BoolArray, keys: Keys, count: int, kept: Loud
) -> tuple[IntArray, FloatArray, BoolArray]:
    """`Best` of scaled logits [n, vocab_size]; noisy: [n], the rows that have noise, by these keys [n].

    kept: of this size of vocabulary, or NONE_KEPT.
    """
    rows = len(values)
    if not noisy.any():
        tokens, found = _largest(values, count)
        return tokens, found, np.ones(rows, np.bool_)
    if noisy.all():
        return best_within_rounding(values, keys, count, kept)
    tokens, found = _largest(values, count)  # of the greedy rows, and in vain of the others
    clear = np.ones(rows, np.bool_)
    places = np.flatnonzero(noisy)
    own_tokens, own_found, own_clear = best_within_rounding(values[places], keys[places], count, kept)
    for i in range(len(places)):
        tokens[places[i]], found[places[i]], clear[places[i]] = own_tokens[i], own_found[i], own_clear[i]
    return tokens, found, clear


@compiled
def scaled(logits: FloatArray, temperatures: FloatArray) -> FloatArray:
    """Logits [n, vocab_size] over the temperatures [n] of their rows, as they are where that is 0 or 1 for all."""
    if ((temperatures == 0) | (temperatures == 1)).all():
        return logits
    out = np.empty_like(logits)
    for row in range(len(logits)):
        out[row] = logits[row] / (temperatures[row] if temperatures[row] > 0 else np.float32(1))
    return out


def best_on_device(
    values: torch.Tensor, noisy: torch.Tensor, keys: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and scores of `Best` [n, count], by operations of torch's that wait for nothing: they can be recorded.

    values: logits over temperatures [n, vocab_size]; noisy: rows with noise, bool [n]; keys: int64 [n], None without any.
    """
    if keys is not None:
        noise = gumbel(keys[:, None], torch.arange(values.shape[-1], device=values.device))
        values = values + noise.masked_fill(~noisy[:, None], 0.0)
    if count == 1:  # topk promises nothing about ties
        tokens = values.argmax(-1, keepdim=True)
        return tokens, values.gather(-1, tokens)
    scores, tokens = values.topk(count, dim=-1)
    return tokens, scores


def _best_from_device(
    values: torch.Tensor, noisy: BoolArray, keys: torch.Tensor | None, count: int
) -> tuple[IntArray, FloatArray]:
    where = torch.from_numpy(noisy).to(values.device)
    tokens, scores = best_on_device(values, where, keys.to(values.device) if keys is not None else None, count)
    return tokens.int().cpu().numpy(), scores.cpu().numpy()


def _exactly_best(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor | None, count: int
) -> tuple[IntArray, FloatArray]:
    """Tokens and scores as `best` gives them, but with noise in single precision, as `scores` has it."""
    values, noisy = _scaled(logits.float(), params), np.array([row.temperature > 0 for row in params], np.bool_)
    if not values.is_cpu:
        return _best_from_device(values, noisy, keys, count)
    numbers = values.contiguous().numpy()
    tokens, found = _largest(numbers, count)
    if keys is not None and noisy.any():
        tokens[noisy], found[noisy] = _largest_with_noise(numbers[noisy], keys.numpy()[noisy], count)
    return tokens, found


def _scaled(values: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits over temperatures, restricted as each row wants it; greedy rows as they are."""
    divisors = [row.temperature or 1.0 for row in params]
    if any(divisor != 1 for divisor in divisors):
        values = values / torch.tensor(divisors, device=values.device)[:, None]
    if any(filters(row) for row in params):
        values = values.clone()
        for _, group in groupby(range(len(params)), key=lambda i: id(params[i])):  # rows of a sequence share theirs
            rows = list(group)
            part, row = slice(rows[0], rows[-1] + 1), params[rows[0]]
            if row.temperature > 0:
                values[part] = restrict(values[part], row)
    return values


def _largest_with_noise(values: FloatArray, keys: Keys, count: int) -> tuple[IntArray, FloatArray]:
    """The `count` largest of values + noise in each row: what `_largest` gives for their sum, without most of the noise."""
    tokens, noise, sure = contenders(values, keys, count)
    found, best = _ranked(values, tokens, noise, count)
    for row in np.flatnonzero(~sure):
        whole = gumbel(torch.from_numpy(keys[row : row + 1]), torch.arange(values.shape[1])).numpy()
        found[row : row + 1], best[row : row + 1] = _largest(values[row : row + 1] + whole, count)
    return found, best


@compiled
def _ranked(values: FloatArray, tokens: IntArray, noise: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    """The `count` best of the given tokens of each row and their scores, zeros and -inf behind the last one."""
    rows, given = tokens.shape
    found = np.zeros((rows, count), np.int32)
    best = np.full((rows, count), -np.inf, np.float32)
    for row in range(rows):
        for place in range(given):
            token = tokens[row, place]
            if token < 0:
                break
            score = values[row, token] + noise[row, place]
            at = count
            while at > 0 and (best[row, at - 1] < score or (best[row, at - 1] == score and found[row, at - 1] > token)):
                if at < count:
                    best[row, at], found[row, at] = best[row, at - 1], found[row, at - 1]
                at -= 1
            if at < count:
                best[row, at], found[row, at] = score, token
    return found, best


@compiled
def shares(best: FloatArray, noisy: BoolArray, count: int) -> FloatArray:
    """A draft's confidences: softmax of each row of scores, sharpened, the first `count` of it. noisy: see `rank`.

    Zeros where the best, which stands first, is no number.
    """
    shares = np.zeros((len(best), count), np.float32)
    for row in range(len(best)):
        if np.isfinite(best[row, 0]):
            sharpness = _NOISY_SHARPNESS if noisy[row] else _SHARPNESS
            weights = np.exp(sharpness * (best[row] - best[row, 0]))
            shares[row] = weights[:count] / weights.sum()
    return shares


@compiled
def _largest(values: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    """The `count` largest of each row and where they stand, the largest first: what topk gives, several times as fast."""
    rows, columns = values.shape
    found = np.zeros((rows, count), np.int32)
    best = np.full((rows, count), -np.inf, np.float32)
    for row in range(rows):
        least = np.float32(-np.inf)
        for start in range(0, columns, TOGETHER):
            stop = min(start + TOGETHER, columns)
            if not reaches(values[row, start:stop], least):
                continue
            for column in range(start, stop):
                value = values[row, column]
                if value > least:
                    at = count - 1
                    while at > 0 and best[row, at - 1] < value:
                        best[row, at], found[row, at] = best[row, at - 1], found[row, at - 1]
                        at -= 1
                    best[row, at], found[row, at] = value, column
                    least = best[row, count - 1]
    return found, best
