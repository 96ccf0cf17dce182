"""Distilling: the draft comes nearer to its target, and an interrupted run ends with the weights of a whole one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import distill, train
from engine.checkpoint import ModelError
from engine.distill import DistillConfig
from engine.runner import ModelRunner
from tests import exact


@pytest.fixture(autouse=True)
def _small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    training, held_out = train.corpus_files()
    small = sorted(training, key=lambda path: path.stat().st_size)[-40:-39]
    monkeypatch.setattr(distill, "corpus_files", lambda: (small, held_out[:2]))


def at(folder: Path, **changes: Any) -> DistillConfig:
    config = DistillConfig(
        exact.TARGET,
        exact.DRAFT,
        folder / "out",
        folder / "work",
        steps=4,
        batch_size=2,
        sequence_length=64,
        own_windows=4,
        warmup_steps=2,
        eval_every=2,
        device="cpu",
    )
    return replace(config, **changes)


def weights(config: DistillConfig) -> bytes:
    return (config.out / "model.safetensors").read_bytes()


def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = at(tmp_path / "whole"), at(tmp_path / "parts")
    figures = distill.distill(whole)
    batch_at = distill.batch_at

    def interrupted(step: int, *rest: Any) -> torch.Tensor:
        if step == 3:
            raise KeyboardInterrupt
        return batch_at(step, *rest)

    monkeypatch.setattr(distill, "batch_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill.distill(parts)
    assert weights(parts) != weights(whole)
    monkeypatch.setattr(distill, "batch_at", batch_at)
    assert distill.distill(parts) == figures
    assert weights(parts) == weights(whole)
    assert json.loads((whole.out / "distillation.json").read_text())["steps"] == 4
    assert ModelRunner(whole.out, dtype="float32", kv_tokens=64).vocab_size == 4096
    with pytest.raises(ValueError, match="another recipe"):
        distill.distill(replace(whole, seed=1))


def test_the_draft_comes_nearer_to_the_target(tmp_path: Path) -> None:
    """On the text that it was trained on."""
    config = at(tmp_path, steps=12, warmup_steps=1, learning_rate=1e-3)
    distill.distill(config)
    own = torch.load(_own_text(config), weights_only=True).to(torch.int64)
    assert own.shape == (4, 65)
    target = distill.load(config.target, "cpu")
    before, after = (
        distill.evaluate(target, distill.load(path, "cpu"), {"own": own})["own_kl"]
        for path in (config.draft, config.out)
    )
    assert after < before


def test_choices_are_equal_as_often_as_exponential_races_say() -> None:
    """Of two clocks' races with the same noise both are won by i with probability 1 / sum_j max(p_j / p_i, q_j / q_i).

    Daliri et al. 2024, https://arxiv.org/abs/2408.07978
    """
    generator = torch.Generator().manual_seed(0)
    draws = 100_000
    for _ in range(3):
        teacher = (3 * torch.randn(60, generator=generator)).log_softmax(-1)
        student = (teacher + torch.randn(60, generator=generator)).log_softmax(-1)
        ratios = torch.maximum(*(each[None] - each[:, None] for each in (teacher, student)))
        expected = float((-ratios.logsumexp(-1)).exp().sum())
        noise = -torch.empty(draws, 60).exponential_(generator=generator).log()
        assert abs(float(distill.equal_choices(teacher, student, noise)) - expected) < 4 * 0.5 / draws**0.5
        assert distill.equal_choices(teacher[None], student[None]) == (teacher.argmax() == student.argmax())


def test_added_layers_change_nothing_before_they_are_trained(tmp_path: Path) -> None:
    config = at(tmp_path, layers=4)
    tokens = torch.arange(40)[None]
    deeper, draft = (distill.load(path, "cpu") for path in (distill.first_draft(config), config.draft))
    assert deeper.config.num_hidden_layers == 4
    torch.testing.assert_close(deeper(tokens).logits, draft(tokens).logits)


def test_another_targets_text_and_state_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    config = at(tmp_path, steps=2)
    distill.distill(config)
    other = tmp_path / "other"
    shutil.copytree(config.target, other)
    with pytest.raises(ValueError, match="another recipe"):
        distill.distill(replace(config, target=other))
    assert len(list(config.work.glob("own-*.pt"))) == 4


def test_a_run_that_was_finished_is_written_to_another_folder_too(tmp_path: Path) -> None:
    config = at(tmp_path, steps=2)
    figures = distill.distill(config)
    assert distill.distill(replace(config, out=tmp_path / "again")) == figures
    weights = [(out / "model.safetensors").read_bytes() for out in (config.out, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_what_a_checkpoint_says_of_generation_does_not_change_its_own_text(tmp_path: Path) -> None:
    plain, changed = at(tmp_path / "plain", steps=1), at(tmp_path / "changed", steps=1, target=tmp_path / "target")
    shutil.copytree(plain.target, changed.target)
    settings = {"do_sample": True, "top_p": 0.1, "repetition_penalty": 5.0, "max_new_tokens": 7, "eos_token_id": 0}
    (changed.target / "generation_config.json").write_text(json.dumps(settings))
    texts = []
    for config in (plain, changed):
        distill.distill(config)
        texts.append(torch.load(_own_text(config), weights_only=True))
    assert torch.equal(*texts)


@pytest.mark.parametrize("source", ["target", "draft"])
def test_a_draft_is_not_written_over_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    config = at(tmp_path, **{source: tmp_path / source})
    shutil.copytree(getattr(at(tmp_path), source), tmp_path / source)
    (tmp_path / "link").symlink_to(tmp_path / source)
    monkeypatch.setattr(distill, "tokenize", lambda *_: pytest.fail("work was begun"))
    for out in (tmp_path / source, tmp_path / "link"):
        with pytest.raises(ModelError, match="holds a checkpoint that this is made from"):
            distill.distill(replace(config, out=out))
    assert not config.work.exists()


def _own_text(config: DistillConfig) -> Path:
    (found,) = (path for path in config.work.glob("own-*.pt") if "held-out" not in path.name)
    return found
