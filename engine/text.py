"""Tokens to text and back: loading a tokenizer, incremental detokenising, stop strings."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a checkpoint; raises ValueError when there is none."""
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{path} has no fast tokenizer (tokenizer.json)")
    return tokenizer


def find_tokenizer(path: Path | str) -> PreTrainedTokenizerFast | None:
    """The fast tokenizer of a checkpoint, if there is one."""
    return load_tokenizer(path) if (Path(path) / "tokenizer.json").is_file() else None


def word_tokens(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Words as token sequences, each as it is written at a text's beginning and behind a space: for `bad_words`."""
    spellings = [spelling for word in words for spelling in (word, f" {word}")]
    return tuple(dict.fromkeys(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in spellings))


class TextStream:
    """Text of a token stream, piece by piece: bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes, often empty or several characters."""
        return self._stream.step(self._tokenizer, token) or ""


class StopStrings:
    """Cuts a text before the first stop string; text that may be the beginning of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to be before any stop string and was not returned yet."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, at = min(found)  # of the one complete first: however the text came in pieces, the cut is the same
            return self._release(at)
        held_back = max((self._overlap(stop) for stop in self._stops), default=0)
        return self._release(len(self._held) - held_back)

    def flush(self) -> str:
        """What was held back, when the stream ended for another reason."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        lengths = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if self._held.endswith(stop[:n])), 0)


class OutputText:
    """The text of an output, token by token, up to its first stop string; stop strings begin at `min_tokens` at earliest."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._stream, self._stops = TextStream(tokenizer), StopStrings(stops)
        self._free = max(0, min_tokens - 1)  # tokens to come in which no stop string counts

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """The part of the text that is certain now and was not returned yet."""
        text = self._stream.push(token)
        if self._free:
            self._free -= 1
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        """What was held back, when the stream ended for another reason."""
        return self._stops.flush()
