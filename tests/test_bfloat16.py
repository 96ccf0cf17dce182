"""Invariant mode in bfloat16: the same bits in prefill, decode, tree, batch and resume, where it is emulated too."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention import chain_rows
from engine.runner import ModelRunner
from tests import exact
from tests.rows import grown, leased, prefill, tree_rows


@pytest.fixture(scope="module")
def _halved() -> ModelRunner:
    return ModelRunner(exact.TARGET, dtype="bfloat16", invariant=True, kv_tokens=1024)


@pytest.fixture
def halved(_halved: ModelRunner) -> Iterator[ModelRunner]:
    """The bundled target in bfloat16 and invariant mode."""
    yield _halved
    _halved.pool.check()
    assert _halved.pool.used_pages == 0


@pytest.mark.parametrize("chunk", [1, 9])
def test_decoding_and_prefilling_give_the_same_bits(
    halved: ModelRunner, prompts: list[exact.Tokens], chunk: int
) -> None:
    tokens = prompts[0][:66]  # past the first bucket of keys
    with leased(halved, 66, 66) as (first, second):
        assert torch.equal(prefill(halved, first, tokens, chunk), prefill(halved, second, tokens))
        assert torch.equal(halved.pool.data[:, :, :, first.slots[:66]], halved.pool.data[:, :, :, second.slots[:66]])


def test_the_batch_does_not_change_a_bit(halved: ModelRunner, prompts: list[exact.Tokens]) -> None:
    lengths = [1, 13, 30, 63, 64, 7]
    with leased(halved, *(length + 4 for length in lengths)) as leases:
        for at, (lease, length) in enumerate(zip(leases, lengths, strict=True)):
            prefill(halved, lease, prompts[0][at : at + length])
        rows = [
            chain_rows(lease, length, [11, 12, 13][: 1 + at % 3], wanted=0)
            for at, (lease, length) in enumerate(zip(leases, lengths, strict=True))
        ]
        alone = [halved.forward([part]) for part in rows]
        assert torch.equal(halved.forward(rows), torch.cat(alone))
        assert torch.equal(halved.forward(rows[::-1]), torch.cat(alone[::-1]))


def test_a_tree_gives_every_path_the_bits_it_has_as_a_chain(halved: ModelRunner, prompts: list[exact.Tokens]) -> None:
    tree, prefix = grown(10, seed=1), prompts[0][:60]
    with leased(halved, 96, 96) as (lease, other):
        for held in (lease, other):
            prefill(halved, held, prefix)
        slots = np.random.default_rng(0).permutation(lease.slots[60 : 60 + tree.size])
        logits = halved.forward([tree_rows(lease, 60, tree, slots)])
        for node in range(tree.size):
            chain = tree.token[tree.lineage(node)].tolist()
            assert torch.equal(logits[node], halved.forward([chain_rows(other, 60, chain)])[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_are_the_same_in_batches_along_trees_and_resumed(
    halved: ModelRunner, draft: ModelRunner, prompts: list[exact.Tokens], temperature: float
) -> None:
    requests = exact.make_requests([prompt[:62] for prompt in prompts[:3]], temperature, 8)
    plain = [generation.tokens for generation in exact.run(halved, requests, batch=1)]
    assert not list(exact.differences(exact.run(halved, requests), plain))
    assert not list(exact.differences(exact.run(halved, requests, exact.tree(12)(draft)), plain))
    resumed = [replace(each, resume_tokens=tuple(tokens[:3])) for each, tokens in zip(requests, plain, strict=True)]
    assert [generation.tokens for generation in exact.run(halved, resumed)] == [tokens[3:] for tokens in plain]
