"""Training: the corpus is split once and for all, and an interrupted run ends with the weights of a whole one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine import train
from engine.checkpoint import ModelError
from engine.runner import ModelRunner
from engine.train import TrainingConfig

TINY = TrainingConfig(
    steps=4, batch_size=2, sequence_length=16, warmup_steps=2, vocab_size=300, eval_every=2, device="cpu"
)
WEIGHTS = [f"code-{name}/model.safetensors" for name in ("target", "draft")]
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)


class Interrupted(Exception):
    """Stands for whatever ends a run."""


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small models and a few small files."""
    training, held_out = train.corpus_files()
    small = sorted(training, key=lambda path: path.stat().st_size)[-40:-37]
    monkeypatch.setattr(train, "corpus_files", lambda: (small, held_out[:2]))
    monkeypatch.setattr(train, "TARGET_SHAPE", SMALL)
    monkeypatch.setattr(train, "DRAFT_SHAPE", SMALL)


def at(folder: Path, **changes: Any) -> TrainingConfig:
    return replace(TINY, out=folder / "models", work=folder / "work", **changes)


def weights(config: TrainingConfig) -> list[bytes]:
    return [(config.out / name).read_bytes() for name in WEIGHTS]


def interrupt(monkeypatch: pytest.MonkeyPatch, at_step: int) -> Callable[[], None]:
    """Ends the run before this step; returns what lets it pass."""
    batch_at = train.batch_at

    def interrupted(step: int, data: torch.Tensor, config: TrainingConfig) -> torch.Tensor:
        if step == at_step:
            raise Interrupted
        return batch_at(step, data, config)

    monkeypatch.setattr(train, "batch_at", interrupted)
    return lambda: monkeypatch.setattr(train, "batch_at", batch_at)


def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = at(tmp_path / "whole"), at(tmp_path / "parts")
    figures = train.train(whole)
    go_on = interrupt(monkeypatch, at_step=3)  # one step after the last saved state
    with pytest.raises(Interrupted):
        train.train(parts)
    assert weights(parts) != weights(whole)
    go_on()
    assert train.train(parts) == figures
    assert weights(parts) == weights(whole)


def test_a_run_that_was_finished_is_written_to_another_folder_too(tmp_path: Path) -> None:
    first = at(tmp_path)
    figures = train.train(first)
    other = replace(first, out=tmp_path / "other" / "models")
    assert train.train(other) == figures
    assert weights(other) == weights(first)
    assert (other.out / "heldout.jsonl").read_text() == (first.out / "heldout.jsonl").read_text()


def test_another_vocabulary_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    config = at(tmp_path, steps=1)
    train.train(config)
    (config.work / "state.pt").unlink()
    train.train(replace(config, vocab_size=290))
    assert ModelRunner(config.out / "code-target", dtype="float32", kv_tokens=64).vocab_size == 290


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second = at(tmp_path / "first", steps=1), at(tmp_path / "second", steps=1, seed=1)
    train.train(first)
    train.train(second)
    assert all(a != b for a, b in zip(weights(first), weights(second), strict=True))


@pytest.mark.parametrize("change", [{"steps": 5}, {"batch_size": 3}, {"warmup_steps": 1}, {"seed": 1}])
def test_the_state_of_another_recipe_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    train.train(at(tmp_path, steps=1))
    with pytest.raises(ValueError, match="another recipe"):
        train.train(at(tmp_path, **({"steps": 1} | change)))


def test_what_was_trained_can_be_run(tmp_path: Path) -> None:
    config = at(tmp_path, steps=1)
    figures = train.train(config)
    assert figures["steps"] == 1
    for name in WEIGHTS:
        assert ModelRunner((config.out / name).parent, dtype="float32", kv_tokens=64).vocab_size == 300


def test_the_corpus_is_split_the_same_way_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    training, held_out = train.corpus_files()
    assert train.corpus_files() == (training, held_out)
    assert training == sorted(training)
    assert held_out == sorted(held_out)
    assert not set(training) & set(held_out)
    assert 10 < len(held_out) < len(training) / 10


def test_tests_and_installed_packages_are_no_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    training, held_out = train.corpus_files()
    assert not {part for path in training + held_out for part in path.parts} & {"site-packages", "tests"}


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    data = torch.arange(1000)
    batch = train.batch_at(3, data, TINY)
    assert batch.shape == (TINY.batch_size, TINY.sequence_length + 1)
    assert torch.equal(batch, train.batch_at(3, data, TINY))
    assert not torch.equal(batch, train.batch_at(4, data, TINY))
    assert not torch.equal(batch, train.batch_at(3, data, replace(TINY, seed=1)))
    assert bool((batch.diff() == 1).all()), "a window is consecutive"


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    config = TrainingConfig(steps=100, warmup_steps=10)
    rates = [train.learning_rate(step, config) / config.learning_rate for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.05)


def test_encoding_is_undone_by_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("def f():\n    return 'ü👩'\n", "  leading", "\t\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_without_an_end_token_is_named_before_the_work(tmp_path: Path) -> None:
    train.train_tokenizer(iter(["some text"]), 300).save_pretrained(tmp_path)
    endless = PreTrainedTokenizerFast.from_pretrained(tmp_path, eos_token=None)
    texts = iter(["first"])
    with pytest.raises(ModelError, match=f"{tmp_path} has no end token"):
        train.tokenize(endless, texts)
    assert next(texts) == "first"


def test_prompts_are_whole_lines_of_at_most_so_many_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(f"line_{i} = {i}\n" for i in range(200))
    pieces = list(train.line_pieces(text, tokenizer, 40))
    assert text.startswith("".join(pieces))
    assert len(pieces) > 10
    assert all(piece.endswith("\n") and 20 < len(tokenizer(piece)["input_ids"]) <= 40 for piece in pieces)
