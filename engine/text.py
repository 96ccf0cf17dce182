"""Tokens to text and back: loading a tokenizer, incremental detokenising, stop strings."""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.checkpoint import ModelError

_BEFORE = 6  # tokens that say how a text begins behind them
_BYTES = 8  # tokens without text that may yet become some: a character has at most four bytes
UNFINISHED = "\ufffd"  # what decoders make of a part of a character


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a checkpoint; raises ModelError when there is none."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001  whatever a file of another shape makes tokenizers and transformers raise
        raise ModelError(f"{file} can't be read: {type(error).__name__}: {error}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{path} has no fast tokenizer (tokenizer.json)")
    return tokenizer


def find_tokenizer(path: Path | str) -> PreTrainedTokenizerFast | None:
    """The fast tokenizer of a checkpoint, if there is one."""
    return load_tokenizer(path) if (Path(path) / "tokenizer.json").is_file() else None


def word_tokens(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Words as token sequences, each as it is written at a text's beginning and behind a space: for `bad_words`."""
    spellings = [spelling for word in words for spelling in (word, f" {word}")]
    return tuple(dict.fromkeys(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in spellings))


@lru_cache(maxsize=32)
def special_tokens(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The ids that decoding leaves out."""
    return frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)


class TextStream:
    """Text of a token stream, piece by piece: bytes of an unfinished character wait for the rest of it.

    Those that nothing can complete any more become U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, before: Sequence[int] = (), special: bool = False) -> None:
        """before: the tokens that the stream goes on behind: they say whether a space at its beginning is one.

        special: special tokens are text too.
        """
        self._tokenizer = tokenizer.backend_tokenizer
        self._skipped = frozenset[int]() if special else special_tokens(tokenizer)
        self._skips = not special
        self._whole: list[int] = []  # some of the last tokens whose text is one
        self._pending: list[int] = []  # since the last text
        self._begin(list(before[-_BEFORE:]))

    def push(self, token: int) -> str:
        """The text that this token completes, often empty or several characters."""
        if token in self._skipped:  # the stream would keep it, and decode it again and again
            return ""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001  of tokenizers' own: what came is no beginning of what it makes of it now
            return self._give_up()
        if text:
            self._whole, self._pending = self._pending, []
            return str(text)
        return self._give_up() if len(self._pending) > _BYTES else ""

    def flush(self) -> str:
        """What is pending when the stream ends: nothing completes it any more."""
        text = self._decode(self._pending)
        self._pending = []
        return text

    def _give_up(self) -> str:
        """What is pending as it is; the stream begins anew behind it."""
        pending = self._pending.copy()
        self._pending.clear()
        text = self._decode(pending)
        if text.endswith(UNFINISHED) and 1 < len(pending) <= _BYTES:  # the last one may be a beginning
            self._begin([])
            return self._decode(pending[:-1]) + self.push(pending[-1])
        self._begin(pending)
        return text

    def _begin(self, before: list[int]) -> None:
        text = self._decode(before)
        if text and not text.endswith(UNFINISHED):
            self._whole = before
        self._stream = DecodeStream(ids=self._whole, skip_special_tokens=self._skips)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips))


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

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stops: tuple[str, ...],
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """before: the prompt, see TextStream."""
        self._stream, self._stops = TextStream(tokenizer, before), StopStrings(stops)
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

    def end(self, token: int) -> str:
        """The rest, behind which this token ended the output: by a stop string that it completes, or by itself.

        By itself, as an end token, it is no text.
        """
        before = self._stream.flush()
        stops = copy(self._stops)
        cut = stops.push(self._stream.push(token) + self._stream.flush())
        if stops.stopped:
            self._stops = stops
            return cut
        return self._stops.push(before) + self._stops.flush()

    def flush(self) -> str:
        """What was held back, when the stream ended for another reason."""
        return self._stops.push(self._stream.flush()) + self._stops.flush()
