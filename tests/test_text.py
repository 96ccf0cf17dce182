"""Text: pieces join to the whole, and stop strings cut the same text however it came in pieces."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.text import StopStrings, TextStream, load_tokenizer

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


def test_random_tokens_never_fail_and_say_nothing_false(tokenizer: PreTrainedTokenizerFast) -> None:
    """Many are no valid UTF-8. What was said stands; what is still missing are the bytes of one character."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(rng.choice([257, 4096])) for _ in range(rng.randrange(1, 40))]
        text, whole = "".join(streamed(tokenizer, tokens)), decoded(tokenizer, tokens)
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\N{REPLACEMENT CHARACTER}"}


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
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
