"""Drafts with another tokenizer: exact whatever they say, and of use where they are good."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.decode import Generation, Speculation
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.translate import OtherTokenizerDrafter, _shared_out
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.tree import Moved
from engine.types import SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.exact import Tokens, differences, make_requests, run

TOKENS = 20


@pytest.fixture(scope="module")
def small() -> PreTrainedTokenizerFast:
    """A byte-level BPE of few tokens: its pieces split words, and characters that are more than one byte."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([json.loads(line) for line in exact.PROMPTS.read_text().splitlines()[:20]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained)


@pytest.fixture(scope="module")
def spaced() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: spaces are a part of words, and one is put before every text."""
    trained = Tokenizer(models.BPE(unk_token="?"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False)
    trained.train_from_iterator(["the", "cat", "sat", "on", "mat"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained)


def decoded(
    target: ModelRunner, prompts: list[Tokens], temperature: float, drafter: OtherTokenizerDrafter
) -> list[Generation]:
    """Speculative output, after it was found equal to the plain one."""
    requests = make_requests(prompts, temperature, TOKENS)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    generations = run(target, requests, Speculation(drafter, FixedTree(15), 4))
    assert not list(differences(generations, plain))
    return generations


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_good_draft_with_another_vocabulary_guesses_well(
    target: ModelRunner,
    permuted: Path,
    prompts: list[Tokens],
    tokenizer: PreTrainedTokenizerFast,
    temperature: float,
) -> None:
    runner = ModelRunner(permuted, dtype="float32", kv_tokens=2048)
    inner = ModelDrafter(runner, Growing(lookup=0, max_depth=20))
    drafter = OtherTokenizerDrafter(inner, load_tokenizer(permuted), tokenizer)
    generations = decoded(target, [prompts[0], prompts[2], prompts[3]], temperature, drafter)
    per_step = sum(len(each.tokens) for each in generations) / sum(each.steps for each in generations)
    assert per_step > (2.0 if temperature == 0 else 1.2)
    assert runner.pool.used_pages == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_cuts_of_the_same_text_are_invisible(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    tokenizer: PreTrainedTokenizerFast,
    small: PreTrainedTokenizerFast,
    temperature: float,
) -> None:
    """The draft was not trained for this tokenizer: it talks nonsense."""
    drafter = OtherTokenizerDrafter(ModelDrafter(draft), small, tokenizer)
    decoded(target, prompts[1:3], temperature, drafter)


def guesses(drafter: OtherTokenizerDrafter, ids: Sequence[int], known: int, step: int = 1) -> int:
    """How many tokens behind the known ones are guessed when their turn comes; of each step, the first."""
    drafter.open(1, ids[:known], SamplingParams())
    guessed = 0
    for at in range(known, len(ids), step):
        for _ in range(12):
            drafter.grow()
        drafter.check()
        guessed += drafter.tree(1).child(0, ids[at]) >= 0
        drafter.commit(1, ids[at : at + step])
    return guessed


@pytest.mark.parametrize("line", ["x = 'déjà vu, 漢字' # ☃\n", "    for item in items:\n        total += item\n"])
def test_text_that_is_repeated_is_guessed_across_tokenizers(
    line: str, tokenizer: PreTrainedTokenizerFast, small: PreTrainedTokenizerFast
) -> None:
    """Token by token, whatever is between two of them: a word, half of one, half of a character."""
    ids: list[int] = tokenizer(line * 5)["input_ids"]
    known = len(ids) * 3 // 5
    drafter = OtherTokenizerDrafter(NgramDrafter(length=24), small, tokenizer, length=24)
    guessed = guesses(drafter, ids, known)
    drafter.close(1)
    drafter.check()
    assert guessed > 0.6 * (len(ids) - known), f"{guessed} of {len(ids) - known}"


class Recorded(NgramDrafter):
    """Remembers the prefix that it is told."""

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        super().open(session, tokens, params, prompt)
        self.prefix = list(tokens)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        self.prefix += tokens
        return super().commit(session, tokens)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_tokenizer_that_treats_beginnings_otherwise_cuts_no_beginnings_into_a_text(
    tokenizer: PreTrainedTokenizerFast, spaced: PreTrainedTokenizerFast, steps: int
) -> None:
    """Piece by piece, the draft's prefix is the text as its tokenizer cuts it whole, and guesses have their spaces."""
    text = "the cat sat on the mat " * 8
    ids: list[int] = tokenizer(text)["input_ids"]
    inner = Recorded(length=24)
    drafter = OtherTokenizerDrafter(inner, spaced, tokenizer, length=24)
    guessed = guesses(drafter, ids, 20, steps)
    whole = spaced(text, add_special_tokens=False)["input_ids"]
    assert inner.prefix == whole[: len(inner.prefix)]
    assert guessed > 0.5 * len(range(20, len(ids), steps))


def test_characters_that_are_bytes_to_the_draft_are_guessed(tokenizer: PreTrainedTokenizerFast) -> None:
    """Wherever the draft's prefix ends, decoders see whole characters behind it."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids: list[int] = tokenizer("뷁뷂뷃뷄뷅뷆뷇" * 6)["input_ids"]
    known = len(ids) * 3 // 5
    drafter = OtherTokenizerDrafter(NgramDrafter(length=24), PreTrainedTokenizerFast(tokenizer_object=made), tokenizer)
    guessed = guesses(drafter, ids, known)
    assert guessed > 0.8 * (len(ids) - known)


def test_a_tokens_confidence_is_that_of_the_drafts_tokens_that_begin_in_it() -> None:
    assert _shared_out([4, 6], [0, 2, 4, 6], [0.5, 0.8, 0.9]) == pytest.approx([0.4, 0.45])
    assert _shared_out([3, 6], [0, 6], [0.5]) == pytest.approx([0.5, 0.5])  # the last may go on


def test_the_audit_finds_tokens_that_are_not_the_texts(
    tokenizer: PreTrainedTokenizerFast, small: PreTrainedTokenizerFast
) -> None:
    drafter = OtherTokenizerDrafter(NgramDrafter(), small, tokenizer)
    drafter.open(1, tokenizer("def f(x):")["input_ids"], SamplingParams())
    drafter.check()
    drafter._sessions[1].tail.append(5)
    with pytest.raises(AssertionError, match="not the text's"):
        drafter.check()
