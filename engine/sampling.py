"""Logits to tokens: the only place. Coupled sampling: argmax over logits/T + Gumbel(seed, position, token).

With the noise fixed, the choice is a function of the logits alone, and over seeds it follows the softmax exactly (the
Gumbel-max trick: Maddison et al. 2014, https://arxiv.org/abs/1411.0030). With T = 0 it is plain argmax.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.compiled import compiled
from engine.types import FloatArray, IntArray, SamplingParams, TokenLogprobs

_HEAD = 256  # top-p looks at this many tokens first, and at all only where they don't hold enough mass
_CANDIDATES = 16  # a draft's confidences are shares among this many tokens; sharpened, the others hold next to nothing
_SHARPNESS = 3.5  # a draft's softmax is flatter than its hit rate; the best of 1.5 to 8 on the bundled pair


def scores(logits: torch.Tensor, params: SamplingParams, noise: torch.Tensor | None) -> torch.Tensor:
    """What the argmax is taken of: float32 [n, vocab_size], -inf for tokens that are filtered out.

    logits: [n, vocab_size], processed; noise: float32 [n, vocab_size], needed when the temperature is not 0.
    """
    logits = logits.float()
    if params.temperature == 0:
        return logits
    assert noise is not None
    return restrict(logits / params.temperature, params) + noise


def choose(logits: torch.Tensor, params: SamplingParams, noise: torch.Tensor | None) -> torch.Tensor:
    """The chosen token of each row, int64 [n]; see `scores` for the arguments."""
    return scores(logits, params, noise).argmax(-1)


def margins(logits: torch.Tensor, params: SamplingParams, noise: torch.Tensor | None) -> torch.Tensor:
    """Distance between the best and the second best score of each row, float32 [n]: how close to a tie it was."""
    best = scores(logits, params, noise).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


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
    total = logits.logsumexp(-1, keepdim=True)
    count = min(_HEAD, logits.shape[-1])
    head = logits.topk(count, dim=-1).values
    mass = (head - total).exp().cumsum(-1)
    if count < logits.shape[-1] and bool((mass[:, -1] < top_p).any()):
        head = logits.sort(dim=-1, descending=True).values
        mass = (head - total).exp().cumsum(-1)
    last = (mass < top_p).sum(-1, keepdim=True).clamp_(max=head.shape[-1] - 1)
    return head.gather(-1, last)


def propose(
    logits: torch.Tensor, params: Sequence[SamplingParams], noise: torch.Tensor | None, count: int
) -> tuple[IntArray, FloatArray]:
    """A draft's guesses at what `choose` will give a better model: (tokens, confidences), both [n, count].

    logits: [n, vocab_size] of the draft; params: of each row; noise: float32 [n, vocab_size], the target's, zeros in greedy
    rows, needed when a row is not greedy.
    """
    values = logits.float()
    if noise is not None:
        values = values / torch.tensor([[row.temperature or 1.0] for row in params], device=logits.device)
        for i, row in enumerate(params):
            if row.temperature > 0 and (row.top_k, row.top_p, row.min_p) != (0, 1.0, 0.0):
                values[i] = restrict(values[i : i + 1], row)[0]
        values = values + noise
    candidates = max(count, min(_CANDIDATES, values.shape[-1]))
    if values.is_cpu:
        tokens, best = _largest(values.numpy(), candidates)
    else:
        highest = values.topk(candidates, dim=-1)
        tokens, best = highest.indices.int().cpu().numpy(), highest.values.cpu().numpy()
    return tokens[:, :count], _shares(best)[:, :count]


@compiled
def _shares(best: FloatArray) -> FloatArray:
    """Softmax of each row, sharpened; zeros where the best, which stands first, is no number."""
    shares = np.zeros_like(best)
    for row in range(len(best)):
        if np.isfinite(best[row, 0]):
            shares[row] = np.exp(_SHARPNESS * (best[row] - best[row, 0]))
            shares[row] /= shares[row].sum()
    return shares


@compiled
def _largest(values: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    """The `count` largest of each row and where they stand, the largest first: what topk gives, several times as fast."""
    rows, columns = values.shape
    found = np.zeros((rows, count), np.int32)
    best = np.full((rows, count), -np.inf, np.float32)
    for row in range(rows):
        least = np.float32(-np.inf)
        for column in range(columns):
            value = values[row, column]
            if value > least:
                at = count - 1
                while at > 0 and best[row, at - 1] < value:
                    best[row, at], found[row, at] = best[row, at - 1], found[row, at - 1]
                    at -= 1
                best[row, at], found[row, at] = value, column
                least = best[row, count - 1]
    return found, best
