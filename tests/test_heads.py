"""Multi-token heads: what they guess from, how the tree is made, that nothing changes, and their training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import noise, sampling, train, train_heads
from engine.checkpoint import ModelError
from engine.decode import Speculation, decode
from engine.drafters.heads import HeadsDrafter, TokenHeads, combine, load_heads
from engine.local_choice import HEADS_FILE
from engine.runner import ModelRunner
from engine.step import Plan, Sequence, Stepper
from engine.train_heads import HeadsConfig
from engine.tree import ROOT, TokenTree
from engine.types import SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.exact import HEADS, Tokens, differences, make_requests, run
from tests.rows import leased, prefill


@pytest.fixture
def drafter(target: ModelRunner) -> HeadsDrafter:
    return HeadsDrafter(target, load_heads(HEADS, target))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_plain_decoding(
    target: ModelRunner, drafter: HeadsDrafter, prompts: list[Tokens], temperature: float
) -> None:
    requests = make_requests(prompts, temperature, 32)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    for batch in (1, 5):
        generations = run(target, requests, Speculation(drafter, FixedTree(12), 1), batch)
        assert not list(differences(generations, plain))
        assert sum(generation.accepted for generation in generations) > 10


def test_heads_of_a_target_in_bfloat16_guess_too(prompts: list[Tokens]) -> None:
    target = ModelRunner(exact.TARGET, dtype="bfloat16", kv_tokens=2048)
    speculation = Speculation(HeadsDrafter(target, load_heads(HEADS, target)), FixedTree(12), 1)
    generations = run(target, make_requests(prompts[:2], 0.0, 16), speculation, 1)
    assert sum(generation.accepted for generation in generations) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_head_guesses_at_its_own_position(
    target: ModelRunner, drafter: HeadsDrafter, prompts: list[Tokens], temperature: float
) -> None:
    """From the state of the last but one token, coupled by the noise of the positions behind the last one."""
    prompt, heads = prompts[0], load_heads(HEADS, target)
    params = SamplingParams(temperature, seed=3)
    with leased(target, len(prompt)) as (lease,):
        prefill(target, lease, prompt)
        state = target.hidden[-1]
    drafter.open(1, prompt, params)
    assert drafter.grow() == [], "no state was seen yet"
    drafter.see(1, state)
    drafter.commit(1, [77])
    assert drafter.grow() == [1]
    keys = noise.keys(3, [len(prompt) + 1 + head for head in range(3)])
    tokens, _ = sampling.propose(target.logits(heads(state)), [params] * 3, keys if temperature else None, 1)
    assert drafter.tree(1).along(tokens[:, 0].tolist()), "the best guesses of all heads are a path"
    assert drafter.tree(1).token[ROOT] == 77
    assert drafter.grow() == [], "nothing new was seen"
    drafter.check()


def test_the_tree_holds_the_most_probable_combinations() -> None:
    tree = TokenTree(0, 16)
    tokens = np.asarray([[1, 2], [3, 4], [5, 6]], np.int32)
    combine(tree, tokens, np.asarray([[0.6, 0.4], [0.9, 0.1], [0.5, 0.3]], np.float32), 6)
    tree.check()
    paths = [tuple(tree.token[tree.lineage(node)[1:]].tolist()) for node in range(1, tree.size)]
    assert paths == [(1,), (1, 3), (2,), (2, 3), (1, 3, 5), (2, 3, 5)]
    combine(TokenTree(0, 4), tokens[:, :1], np.full((3, 1), np.nan, np.float32), 2)  # no numbers: no failure


def test_the_state_is_the_one_that_the_last_token_was_chosen_from(
    fast_target: ModelRunner, prompts: list[Tokens]
) -> None:
    """At the end of a prompt, and at the end of a walk down a tree with accepted and refused nodes."""
    (request,) = make_requests(prompts[:1], 0.0, 8)
    (plain,) = decode(fast_target, [request])
    stepper = Stepper(fast_target, states=True)
    sequence = Sequence(request, fast_target, None)
    outcome = stepper.step([Plan(sequence)])[0]
    while not outcome.tokens:
        assert outcome.state is None
        outcome = stepper.step([Plan(sequence)])[0]
    outcomes = [outcome]
    tree = TokenTree(sequence.tokens[-1])
    tree.add_many([ROOT, ROOT, 2, 2], [5, plain.tokens[1], 6, plain.tokens[2]], [0.5] * 4)
    outcomes += stepper.step([Plan(sequence, tree, np.asarray([1, 2, 3, 4], np.int32))])
    assert outcomes[1].accepted == 2
    for outcome in outcomes:
        assert outcome.state is not None
        logits = fast_target.logits(outcome.state[None])
        assert int(logits.argmax()) == outcome.tokens[-1]
    assert Stepper(fast_target).step([Plan(sequence)])[0].state is None, "nobody asked"
    fast_target.pool.release(sequence.lease)


def test_new_heads_are_the_targets_own_guess() -> None:
    hidden = torch.randn(4, 8)
    assert torch.equal(TokenHeads(2, 8)(hidden), torch.stack([hidden, hidden]))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "another size": (lambda _: TokenHeads(2, 16).state_dict(), "is for a hidden size of 16; that of .* is 384$"),
    "no heads": (lambda _: {"weight": torch.zeros(2)}, "holds no heads$"),
    "a scalar": (lambda weights: weights | {"blocks.0.weight": torch.zeros(())}, "holds no heads$"),
    "no bias": (without("blocks.1.bias"), "can't be used: .*blocks.1.bias"),
    "another shape": (lambda weights: weights | {"blocks.2.bias": torch.zeros(3)}, "can't be used: .*blocks.2.bias"),
    "not a number": (lambda weights: weights | {"blocks.2.bias": torch.full((384,), torch.nan)}, "are not finite$"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_do_not_fit_are_told_in_one_line(target: ModelRunner, tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    save_file(change(load_file(HEADS / HEADS_FILE)), tmp_path / HEADS_FILE)
    with pytest.raises(ModelError, match=message) as told:
        load_heads(tmp_path, target)
    assert "\n" not in str(told.value)


def test_files_that_are_no_heads_are_told_in_one_line(target: ModelRunner, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"it has no {HEADS_FILE}$"):
        load_heads(tmp_path, target)
    (tmp_path / HEADS_FILE).write_bytes(b"heads")
    with pytest.raises(ModelError, match=r"can't be read: ") as told:
        load_heads(tmp_path, target)
    assert "\n" not in str(told.value)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeadsConfig:
    training, held_out = train.corpus_files()
    small = sorted(training, key=lambda path: path.stat().st_size)[-40:-39]
    monkeypatch.setattr(train_heads, "corpus_files", lambda: (small, held_out[:1]))
    return HeadsConfig(
        *(exact.TARGET, tmp_path / "out", tmp_path / "work"),
        heads=2,
        steps=4,
        batch_size=2,
        sequence_length=64,
        warmup_steps=1,
        eval_every=2,
        device="cpu",
    )


def test_an_interrupted_training_ends_with_the_weights_of_a_whole_one(
    config: HeadsConfig, target: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(config, out=config.out / "whole", work=config.work / "whole")
    figures = train_heads.train_heads(whole)
    batch_at = train.batch_at

    def interrupted(step: int, *rest: Any) -> torch.Tensor:
        if step == 3:
            raise KeyboardInterrupt
        return batch_at(step, *rest)

    monkeypatch.setattr(train_heads, "batch_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_heads.train_heads(config)
    monkeypatch.setattr(train_heads, "batch_at", batch_at)
    assert (config.out / HEADS_FILE).read_bytes() != (whole.out / HEADS_FILE).read_bytes()
    assert train_heads.train_heads(config) == figures
    assert (config.out / HEADS_FILE).read_bytes() == (whole.out / HEADS_FILE).read_bytes()
    assert len(load_heads(config.out, target).blocks) == 2
    with pytest.raises(ValueError, match="another recipe"):
        train_heads.train_heads(replace(config, seed=1))


def test_heads_are_not_written_into_their_target(config: HeadsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_heads, "tokenize", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ModelError, match="holds a checkpoint that this is made from"):
        train_heads.train_heads(replace(config, out=config.target / ".." / config.target.name))


def test_training_brings_the_heads_nearer_to_the_target(config: HeadsConfig) -> None:
    first, later = (
        train_heads.train_heads(replace(config, steps=steps, work=config.work / str(steps))) for steps in (1, 8)
    )
    assert all(after < before for after, before in zip(later["held_out_kl"], first["held_out_kl"], strict=True))
