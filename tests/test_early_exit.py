"""Self-speculation: the target's first layers guess, share its weights and its pool, and change nothing."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoint import ModelError
from engine.decode import Speculation
from engine.drafters.early_exit import EarlyExitDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.prefix import HandleChain
from engine.runner import ModelRunner
from engine.types import SamplingParams
from engine.windows import FixedTree
from tests.exact import Tokens, differences, make_requests, run
from tests.rows import assert_close, leased, prefill

OWN = Growing(max_nodes=48, lookup=0)  # no lookups: what is accepted, the layers have guessed


@pytest.fixture(scope="module")
def early(_target: ModelRunner) -> EarlyExitDrafter:
    return EarlyExitDrafter(_target, 4, OWN)


@pytest.fixture
def short(tmp_path: Path) -> ModelRunner:
    """Three layers, run by transformers' own code: nothing of it is fused."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=64,
        hidden_act="gelu",
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return ModelRunner(tmp_path, dtype="float32", kv_tokens=128)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_plain_decoding(
    target: ModelRunner, early: EarlyExitDrafter, prompts: list[Tokens], temperature: float
) -> None:
    requests = make_requests(prompts[:3], temperature, 32)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    for batch in (1, 3):
        generations = run(target, requests, Speculation(early, FixedTree(7), 3), batch)
        assert not list(differences(generations, plain))
        assert sum(generation.accepted for generation in generations) > 10


def test_weights_and_pool_are_the_targets_own(target: ModelRunner, short: ModelRunner) -> None:
    for runner, layers in ((target, 6), (short, 3)):
        first = runner.first_layers(2)
        mine, theirs = first.model.base_model, runner.model.base_model
        assert (len(mine.layers), len(theirs.layers)) == (2, layers)
        assert all(layer is theirs.layers[index] for index, layer in enumerate(mine.layers))
        assert (mine.embed_tokens, mine.norm, first.pool) == (theirs.embed_tokens, theirs.norm, runner.pool)
        assert first.model.lm_head is runner.model.lm_head


def test_it_writes_its_own_layers_only_and_leaves_the_targets_pages_alone(
    fast_target: ModelRunner, prompts: list[Tokens]
) -> None:
    drafter = EarlyExitDrafter(fast_target, 2, OWN)
    pool, prompt = fast_target.pool, prompts[3]
    with leased(fast_target, len(prompt)) as (lease,):
        prefill(fast_target, lease, prompt)
        before = pool.data.clone()
        drafter.open(1, prompt, SamplingParams())
        for _ in range(5):
            drafter.grow()
        changed = (pool.data != before).any(-1).any(2).any(1)  # [layers, slots]
        assert changed[:2].any()
        assert not changed[2:].any()
        assert not changed[:, lease.slots].any()
        drafter.close(1)


def test_what_it_computed_is_never_found_by_the_target(target: ModelRunner, early: EarlyExitDrafter) -> None:
    tokens = [*range(100, 200)]
    early.open(1, tokens[:-2], SamplingParams())
    for _ in range(4):
        early.grow()
    early.commit(1, tokens[-2:])
    early.grow()
    early.check()
    early.close(1)
    lease, known = target.pool.lease_known(len(tokens), len(tokens), HandleChain(tokens).digests(target.pool.page_size))
    target.pool.release(lease)
    assert known == 0


def test_the_targets_sealed_pages_are_shared(fast_target: ModelRunner, prompts: list[Tokens]) -> None:
    """And guesses on top of them are those on top of what it computes itself."""
    prompt, drafter = prompts[3], EarlyExitDrafter(fast_target, 4, OWN)
    trees = []
    for sealed in (False, True):
        if sealed:
            whole = ModelDrafter(fast_target, OWN)  # has all layers, and seals what it reads
            whole.open(1, prompt, SamplingParams())
            whole.grow()
            whole.grow()
            whole.close(1)
        drafter.open(1, prompt, SamplingParams())
        for _ in range(4 - sealed):  # there is less of a prompt to read
            drafter.grow()
        drafter.check()
        tree = drafter.tree(1)
        trees.append((tree.parent[: tree.size].tolist(), tree.token[: tree.size].tolist()))
        drafter.close(1)
    assert trees[0] == trees[1]


def test_its_guesses_are_those_of_a_model_of_the_first_layers(short: ModelRunner) -> None:
    """As transformers computes them: final norm and output layer behind fewer layers."""
    tokens = torch.arange(20)
    reference = LlamaForCausalLM.from_pretrained(short.path, dtype=torch.float32, num_hidden_layers=2)
    first = short.first_layers(2)
    with leased(first, 20) as (lease,):
        logits = prefill(first, lease, tokens.tolist())
    with torch.inference_mode():
        assert_close(logits, reference(tokens[None]).logits[0])
    assert first._decoder is None


@pytest.mark.parametrize("layers", [-1, 6, 7])
def test_layers_that_are_not_there_are_told(target: ModelRunner, layers: int) -> None:
    with pytest.raises(ModelError, match=f"LlamaForCausalLM has 6 layers, of which 1 to 5 .* not {layers}$"):
        EarlyExitDrafter(target, layers)
