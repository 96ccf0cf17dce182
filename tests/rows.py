"""Rows of forward passes, for tests of what a model computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from engine.attention import SequenceRows, chain_rows
from engine.kv import KVPool, Lease
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.types import IntArray

PAGE, PAGES = 4, 12  # tokens and pages of a small pool


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Different ways to compute the same float32 logits."""
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@contextmanager
def leased(runner: ModelRunner, *lengths: int) -> Iterator[list[Lease]]:
    leases = [runner.pool.lease(length) for length in lengths]
    try:
        yield leases
    finally:
        for lease in leases:
            runner.pool.release(lease)


def prefill(runner: ModelRunner, lease: Lease, tokens: Sequence[int], chunk: int = 64) -> torch.Tensor:
    """Logits after every token [tokens, vocab_size], computed `chunk` tokens at a time."""
    parts = [
        runner.forward([chain_rows(lease, start, tokens[start : start + chunk], wanted=0)])
        for start in range(0, len(tokens), chunk)
    ]
    return torch.cat(parts)


def kv_of(pool: KVPool, slots: IntArray) -> torch.Tensor:
    """Keys and values of slots [layers, 2, kv_heads, slots, head_dim], however the pool keeps them."""
    if not pool.paged:
        return pool.data[:, :, :, slots]
    layers, _, kv_heads, _, dim = pool.data.shape
    pair = 1 if pool.data.dtype == torch.float32 else 2
    size = pool.page_size
    keys = pool.data[:, 0].reshape(layers, kv_heads, pool.pages, dim // pair, size, pair)
    values = pool.data[:, 1].reshape(layers, kv_heads, pool.pages, size // pair, dim, pair)
    plain = (
        keys.permute(0, 1, 2, 4, 3, 5).reshape(layers, kv_heads, -1, dim),
        values.permute(0, 1, 2, 3, 5, 4).reshape(layers, kv_heads, -1, dim),
    )
    return torch.stack(plain, 1)[:, :, :, slots]


def chain(*confidences: float) -> TokenTree:
    """A tree of one path, its tokens 0, 1, 2..."""
    tree, node = TokenTree(0, len(confidences) + 1), ROOT
    for token, confidence in enumerate(confidences):
        node = tree.add(node, token, confidence)
    return tree


def make_pool() -> KVPool:
    """Small, and empty."""
    return KVPool(layers=2, kv_heads=1, head_dim=3, tokens=PAGE * PAGES, dtype=torch.float32, page_size=PAGE)


def grown(size: int, seed: int, vocab_size: int = 4096) -> TokenTree:
    """A random tree of this many nodes below its root."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(7, 64)
    while tree.size <= size:
        tree.add(int(rng.integers(tree.size)), int(rng.integers(vocab_size)), 0.5)
    return tree


def tree_rows(lease: Lease, start: int, tree: TokenTree, slots: np.ndarray) -> SequenceRows:
    """The whole tree, its root at position `start`."""
    everything = range(tree.size)
    return SequenceRows(
        lease=lease,
        prefix=start,
        tokens=tree.token[: tree.size].tolist(),
        positions=[start + depth for depth in tree.depth[: tree.size].tolist()],
        slots=slots,
        tree_slots=slots,
        visible=tree.visible(everything, everything),
    )
