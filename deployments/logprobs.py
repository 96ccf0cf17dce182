"""Log probabilities with the text of their tokens, in OpenAI's two shapes."""

import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from deployments.openai_answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from engine.text import UNFINISHED, special_tokens
from engine.types import TokenLogprobs

_LOWEST = -9999.0  # JSON has no -inf
_SPACE = "\u2581"  # how vocabularies of SentencePiece's kind write it
_ONE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # and how they write bytes


class TokenTexts:
    """Single tokens as text and as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)
        self.text = lru_cache(maxsize=None)(self._text)

    def _text(self, token: int) -> str:
        """What a token alone stands for; a part of a character is the replacement character."""
        text, written = str(self._tokenizer.decode([token])), self._written(token)
        return f" {text}" if written == f"{_SPACE}{text}" and not self._byte_level else text

    def bytes(self, token: int) -> list[int]:
        """The bytes of a token, also when they are a part of a character."""
        written = self._written(token)
        if self._byte_level and all(character in _BYTES for character in written):
            return [_BYTES[character] for character in written]
        if byte := _ONE_BYTE.fullmatch(written):
            return [int(byte[1], 16)]
        return list(self.text(token).encode())

    def _written(self, token: int) -> str:
        """As the vocabulary has it: empty for the ids behind it that some models have."""
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def name(self, token: int) -> str:
        """Its text; of a part of a character, which has none, its bytes, as OpenAI's completions write them."""
        text = self.text(token)
        if UNFINISHED not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def length(self, token: int) -> int:
        """How many characters of the text begin in it: none in a special token."""
        if token in special_tokens(self._tokenizer):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token))

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """As /v1/completions has them, and where the text of the next token begins; `offset`: where this one does."""
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + self.length(token))
        shape = CompletionLogprobs(
            tokens=[self.name(token) for token in tokens],
            token_logprobs=[_finite(entry.chosen) for entry in logprobs],
            top_logprobs=[
                # The chosen token is always there, at the end where it is none of the likeliest.
                {self.name(t): _finite(value) for t, value in dict([*entry.top, (token, entry.chosen)]).items()}
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
            text_offset=offsets[:-1],
        )
        return shape, offsets[-1]

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """As /v1/chat/completions has them."""
        content = []
        for token, entry in zip(tokens, logprobs, strict=True):
            top = [self._top(other, value) for other, value in entry.top]
            own = self._top(token, entry.chosen)
            content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top(self, token: int, value: float) -> TopLogprob:
        return TopLogprob(token=self.text(token), logprob=_finite(value), bytes=self.bytes(token))


def _finite(value: float) -> float:
    return max(value, _LOWEST)


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with (Radford et al. 2019, GPT-2's encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
