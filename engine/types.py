"""What crosses a boundary: requests, chunks, and the messages between a target and a draft. Small and frozen."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["draft", "target"]
GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf"]

LEAST_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # presence and frequency, either sign
LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0  # float32 could not hold logits over much less
MAX_BIAS = 100.0
MAX_BIASED = 1024  # tokens of one request
MAX_BAD_WORDS = 2048
MAX_BAD_WORD_TOKENS = 32  # of each: every length that there is takes a lookup of each row
MAX_BAD_TOKENS = MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
MAX_STOP_TOKENS = 4096
MAX_TOKEN_ID = 2**31 - 1  # whatever the vocabulary: token ids are int32 in arrays
MAX_LOGPROBS = 20
MAX_GRAMMAR = 100_000  # characters
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1
_BIAS_RANGE = f"token ids must not be negative, biases between {-MAX_BIAS:g} and {MAX_BIAS:g}"


class InvalidRequest(ValueError):
    """A field of a request is out of range; `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)  # both, or it could not be pickled out of an actor
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return f"{self.param}: {self.message}"


def require(condition: bool, param: str, message: str) -> None:
    """Raises InvalidRequest naming `param` unless `condition` holds."""
    if not condition:
        raise InvalidRequest(param, message)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output has to look like. Raises InvalidRequest for text that is too long, or missing."""

    kind: GrammarKind
    text: str = ""  # the schema, expression or grammar; none for "json_object"

    def __post_init__(self) -> None:
        require(self.kind in get_args(GrammarKind), "grammar", f"its kind must be one of {get_args(GrammarKind)}")
        require(len(self.text) <= MAX_GRAMMAR, "grammar", f"at most {MAX_GRAMMAR} characters")
        require(bool(self.text) == (self.kind != "json_object"), "grammar", "json_object takes no text, others need it")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The output is a function of prompt, these fields and the model.

    Raises InvalidRequest, naming the field, when a value is out of range.
    """

    temperature: float = 0.0  # 0 is greedy, and so is what is below LEAST_TEMPERATURE
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    min_tokens: int = 0  # nothing ends the output before, be it an end token or a stop string
    repetition_penalty: float = 1.0  # divides the logits of tokens in prompt or output; 1 is none
    presence_penalty: float = 0.0  # subtracted once for a token that is in the output
    frequency_penalty: float = 0.0  # subtracted for every time that a token is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that never come in the output
    grammar: Grammar | None = None
    logprobs: int | None = None  # report each token's log probability, and of so many likeliest ones

    def __post_init__(self) -> None:
        in_range = math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE
        require(in_range, "temperature", f"must be between 0 and {MAX_TEMPERATURE:g}")
        if self.temperature < LEAST_TEMPERATURE:  # float32 could not hold logits over it
            object.__setattr__(self, "temperature", 0.0)
        require(self.top_k >= 0, "top_k", "must be 0 (no limit) or positive")
        require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "must be between 0 and 1")
        require(0 <= self.seed <= MAX_SEED, "seed", "must be between 0 and 2^63 - 1")
        require(1 <= self.max_tokens <= 2**31 - 1, "max_tokens", "must be at least 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be between 0 and max_tokens")
        self._check_penalties()
        require(len(self.logit_bias) <= MAX_BIASED, "logit_bias", f"at most {MAX_BIASED} tokens")
        require(all(token >= 0 and abs(bias) <= MAX_BIAS for token, bias in self.logit_bias), "logit_bias", _BIAS_RANGE)
        unique = len(dict(self.logit_bias)) == len(self.logit_bias)
        require(unique, "logit_bias", "one bias for each token")
        require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        require(all(self.bad_words), "bad_words", "words must not be empty")
        longest = max(map(len, self.bad_words), default=0)
        require(
            longest <= MAX_BAD_WORD_TOKENS, "bad_words", f"at most {MAX_BAD_WORD_TOKENS} tokens each, not {longest}"
        )
        require(len(self.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} of them")
        known = all(0 <= token <= MAX_TOKEN_ID for token in self.stop_token_ids)
        require(known, "stop_token_ids", f"token ids are between 0 and {MAX_TOKEN_ID}")
        require(not (self.grammar and self.ignore_eos), "ignore_eos", "a grammar says where the output ends")
        in_range = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        require(in_range, "logprobs", f"must be between 0 and {MAX_LOGPROBS}")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings")
        require(all(self.stop), "stop", "stop strings must not be empty")

    def _check_penalties(self) -> None:
        least, most = LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        in_range = least <= self.repetition_penalty <= most
        require(in_range, "repetition_penalty", f"must be between {least:g} and {most:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            in_range = abs(getattr(self, name)) <= MAX_PENALTY
            require(in_range, name, f"must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate."""

    request_id: str
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams = field(default_factory=SamplingParams)
    resume_tokens: tuple[int, ...] = ()  # output the client already holds: generation goes on behind it
    salt: bytes = b""  # of the tenant: KV is shared among requests with the same one; set by the server
    window: str = ""  # what is verified, as engine.window_choice names it; none: the target's own window
    documents: tuple[tuple[int, ...], ...] = ()  # token ids of texts that the output may quote: they ground its drafts


def check_prompt(request: GenerationRequest, vocab_size: int, room: int) -> None:
    """Raises InvalidRequest for an empty or too long prompt, and for unknown tokens. room: the model's context."""
    tokens = request.prompt + request.resume_tokens
    require(bool(request.prompt), "prompt", "must not be empty")
    known = min(tokens) >= 0 and max(tokens) < vocab_size
    require(known, "prompt", f"token ids must be between 0 and {vocab_size - 1}")
    require(len(request.resume_tokens) < request.params.max_tokens, "resume_tokens", "must be fewer than max_tokens")
    total = len(request.prompt) + request.params.max_tokens
    require(total <= room, "prompt", f"prompt and max_tokens make {total} tokens; the model's context is {room}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position, of the model as it is: before temperature and all processors."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log probability), the likeliest first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A piece of a stream, in order; the last one has a finish reason."""

    request_id: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]  # who guessed each token first: the draft, or nobody before the target chose it
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with the finish reason "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    known: int = 0  # tokens of the prefix whose KV the target had already


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A name for the KV of a prefix: the prefix is the version. Never accepted from clients."""

    length: int  # tokens
    digest: bytes  # 16 bytes: hash chain over the tokens; a pool's own pages are salted per tenant, see HandleChain


@dataclass(frozen=True, slots=True)
class Open:
    """Target to draft: hold a session for this prefix. Also the answer to NeedPrefix; repeating it is harmless."""

    session: int  # minted by the target replica, never reused
    tokens: tuple[int, ...]  # the whole prefix: prompt and output so far
    params: SamplingParams  # the sampling key and what shapes the choice; stop strings and limits do not cross
    prompt: int = 0  # how many of the tokens are the prompt; penalties tell it from the output


@dataclass(frozen=True, slots=True)
class Commit:
    """Target to draft: the sequence is now this long. Cumulative: a later one makes up for a lost one."""

    session: int
    handle: KVHandle  # of the whole prefix including `tokens`
    tokens: tuple[int, ...]  # the last committed tokens; they end at handle.length
    mirrored: bool  # whether the target's mirror holds a child below the new root


@dataclass(frozen=True, slots=True)
class Renew:
    """Target to draft: these sessions still live."""

    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Target to draft: these sessions ended; free what they hold."""

    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """Draft to target: a piece of a session's token tree, parents before children, rooted at the base handle's end.

    Nodes already known to the target are merged by (parent, token), so a repeated growth is harmless.
    """

    session: int
    base: KVHandle
    parents: IntArray  # [n]: index into this growth's nodes, or -1 for the base
    tokens: IntArray  # [n]
    confidences: FloatArray  # [n]: the draft's probability that the target chooses this child, given its parent


@dataclass(frozen=True, slots=True)
class NeedPrefix:
    """Draft to target: these sessions are unknown here or do not match; open them again."""

    sessions: tuple[int, ...]


Down = Open | Commit | Renew | Close
Up = Growth | NeedPrefix
