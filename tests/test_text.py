"""Text: pieces join to the whole, and stop strings cut the same text however it came in pieces."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.checkpoint import ModelError
from engine.text import OutputText, StopStrings, TextStream, load_tokenizer

TEXTS = ["def f(x):\n\treturn x  # ok\n", "Grüße, 世界 👩‍👩‍👧 \u0301e", "", "\x00\x7f<|endoftext|>\r\n", "a" * 50]


def streamed(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in tokens]


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_join_to_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert "".join(streamed(tokenizer, tokens)) == text.replace("<|endoftext|>", "")


def test_a_character_waits_for_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("👩")["input_ids"]
    assert len(tokens) > 1
    assert streamed(tokenizer, tokens) == [""] * (len(tokens) - 1) + ["👩"]


def test_what_nothing_completes_any_more_is_said_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("a \N{REPLACEMENT CHARACTER}")["input_ids"] + tokenizer("👩")["input_ids"][:-1]
    output = OutputText(tokenizer, ())
    text = "".join([*map(output.push, tokens), output.flush()])
    assert text == decoded(tokenizer, tokens)
    assert output.flush() == "", "once"


def test_random_tokens_never_fail_and_say_nothing_false(tokenizer: PreTrainedTokenizerFast) -> None:
    """Many are no valid UTF-8. What was said stands; what is still missing are the bytes of one character."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(rng.choice([257, 4096])) for _ in range(rng.randrange(1, 40))]
        text, whole = "".join(streamed(tokenizer, tokens)), decoded(tokenizer, tokens)
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\N{REPLACEMENT CHARACTER}"}


@pytest.fixture(scope="module")
def llamas() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: spaces are a part of words, and bytes stand where no word does."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁you", "e", "€"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_random_tokens_with_bytes_between_words_never_fail(llamas: PreTrainedTokenizerFast) -> None:
    """A decoder of this kind takes back what it said, where a stray byte follows a character made of bytes."""
    euro, stray, hello = [3 + 0xE2, 3 + 0x82, 3 + 0xAC], 3 + 0xC3, llamas.get_vocab()["▁Hello"]
    assert "".join(streamed(llamas, [*euro, stray, hello, *euro])) == "€� Hello€"
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.choice([rng.randrange(len(llamas)), 3 + rng.randrange(128, 256)]) for _ in range(60)]
        assert "".join(streamed(llamas, [*tokens, hello])).endswith(" Hello")


def test_the_first_space_is_one_behind_other_text(llamas: PreTrainedTokenizerFast) -> None:
    hello, you = (llamas.get_vocab()[word] for word in ("▁Hello", "▁you"))
    assert TextStream(llamas).push(you) == "you"
    assert TextStream(llamas, [hello]).push(you) == " you"
    assert TextStream(llamas, [hello, 3 + 0xE2]).push(you) in ("you", " you")  # the text before is no whole one


def test_what_gives_no_text_does_not_pile_up(
    tokenizer: PreTrainedTokenizerFast, llamas: PreTrainedTokenizerFast
) -> None:
    for each, tokens in ((tokenizer, [0] * 50), (llamas, [2] * 50)):  # end tokens, as with ignore_eos
        assert "".join(streamed(each, tokens)) == ""
    said = "".join(streamed(llamas, [3 + 0xE2] * 50))
    assert set(said) == {"�"}
    assert len(said) > 40


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def cut(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    out = "".join(strings.push(piece) for piece in pieces)
    return out + strings.flush(), strings.stopped


def reference(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Letter by letter: the text ends before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


letters = st.text("ab", min_size=0, max_size=8)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple),
    st.lists(letters, max_size=8),
)
def test_the_cut_does_not_depend_on_the_pieces(stops: tuple[str, ...], pieces: list[str]) -> None:
    assert cut(stops, pieces) == reference(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple), st.lists(letters, max_size=8))
def test_nothing_is_said_too_early_or_held_back_too_long(stops: tuple[str, ...], pieces: list[str]) -> None:
    strings = StopStrings(stops)
    said, seen = "", ""
    for piece in pieces:
        said, seen = said + strings.push(piece), seen + piece
        if strings.stopped:
            break
        held = seen.removeprefix(said)
        assert said + held == seen
        beginnings = [stop for stop in stops if held and stop.startswith(held)]
        assert not held or beginnings


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb"),
        (("stop",), ["st", "op"], ""),
        (("stop",), ["sto", "re"], "store"),
        (("abcd", "c"), ["abcd"], "ab"),  # complete first
        (("abcd", "c"), ["a", "b", "c", "d"], "ab"),
        (("bc", "c"), ["abc"], "a"),  # complete at once: the longer
        ((), ["abc"], "abc"),
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], expected: str) -> None:
    assert cut(stops, pieces)[0] == expected


def test_nothing_follows_a_stop() -> None:
    strings = StopStrings(("x",))
    assert [strings.push("ax"), strings.push("bc"), strings.flush()] == ["a", "", ""]


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        (["def", " f", "("], (), "def f"),  # an end token, which is no text
        (["def", " f", "("], (" f(",), "def"),  # the stop string that it completes
        (["def", " f", "("], (" f(x",), "def f"),  # and what was held back for one that does not come
        (["def", " f", "<|endoftext|>"], (), "def f"),
    ],
)
def test_the_token_that_ends_an_output_is_no_text(
    tokenizer: PreTrainedTokenizerFast, tokens: list[str], stops: tuple[str, ...], expected: str
) -> None:
    (*before, last) = [token for text in tokens for token in tokenizer(text)["input_ids"]]
    text = OutputText(tokenizer, stops)
    said = "".join(text.push(token) for token in before)
    assert said + text.end(last) + text.flush() == expected
    assert text.stopped == (expected == "def")


def test_bytes_before_the_token_that_ends_an_output_are_said(tokenizer: PreTrainedTokenizerFast) -> None:
    first = tokenizer("👩")["input_ids"][0]
    text = OutputText(tokenizer, ())
    (end,) = tokenizer("(")["input_ids"]
    assert text.push(first) + text.end(end) == "\ufffd"
