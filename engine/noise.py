"""Gumbel noise as a pure function of (seed, position, token): the only source of randomness.

A counter-based generator in the manner of Salmon et al. 2011 (https://doi.org/10.1145/2063384.2063405): a key is derived
from seed and position, then mixed with the token id by splitmix64's finalizer (Steele et al. 2014,
https://doi.org/10.1145/2660193.2660195). Integers are 64 bits wide and wrap, so every device computes the same ones.
"""

from collections.abc import Iterable

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-52  # 52 random bits and a half: never 0, never 1, and the largest noise is 36.7


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
    uniform = ((bits >> 12) & (2**52 - 1)).to(torch.float64).add_(0.5).mul_(_UNIT)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def keys(seed: int, positions: Iterable[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Keys for several positions of one sample: int64 [n]."""
    return torch.tensor([_signed(key(seed, position)) for position in positions], dtype=torch.int64, device=device)


class NoiseRows:
    """The noise of one sample over the whole vocabulary, each position computed once and kept while it can be used."""

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._tokens = torch.arange(vocab_size, dtype=torch.int64, device=device)
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, positions: list[int]) -> torch.Tensor:
        """Noise for these positions: float32 [len(positions), vocab_size]."""
        self.prepare(positions)
        return torch.stack([self._rows[position] for position in positions])

    def prepare(self, positions: Iterable[int]) -> None:
        """Computes what is missing of these positions' noise now, to have it later."""
        missing = sorted({position for position in positions if position not in self._rows})
        if missing:
            new = gumbel(keys(self._seed, missing, self._tokens.device)[:, None], self._tokens)
            self._rows.update(zip(missing, new.unbind(0), strict=True))

    def forget_before(self, position: int) -> None:
        """Drops rows that no step can need again."""
        for old in [known for known in self._rows if known < position]:
            del self._rows[old]
