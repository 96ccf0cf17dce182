"""What crosses a boundary: requests, chunks, and the messages between a target and a draft. Small and frozen."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["draft", "target"]

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1


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
class SamplingParams:
    """How tokens are chosen. The output is a function of prompt, these fields and the model.

    Raises InvalidRequest, naming the field, when a value is out of range.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        in_range = math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE
        require(in_range, "temperature", f"must be between 0 and {MAX_TEMPERATURE:g}")
        require(self.top_k >= 0, "top_k", "must be 0 (no limit) or positive")
        require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "must be between 0 and 1")
        require(0 <= self.seed <= MAX_SEED, "seed", "must be between 0 and 2^63 - 1")
        require(1 <= self.max_tokens <= 2**31 - 1, "max_tokens", "must be at least 1")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings")
        require(all(self.stop), "stop", "stop strings must not be empty")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate."""

    request_id: str
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams = field(default_factory=SamplingParams)
    resume_tokens: tuple[int, ...] = ()  # output the client already holds: generation goes on behind it
    salt: bytes = b""  # of the tenant: KV is shared among requests with the same one; set by the server


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A piece of a stream, in order; the last one has a finish reason."""

    request_id: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]  # who guessed each token first: the draft, or nobody before the target chose it
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with the finish reason "error"


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A name for the KV of a prefix: the prefix is the version. Never accepted from clients."""

    length: int  # tokens
    digest: bytes  # 16 bytes: hash chain over the tokens, salted per tenant


@dataclass(frozen=True, slots=True)
class Open:
    """Target to draft: hold a session for this prefix. Also the answer to NeedPrefix; repeating it is harmless."""

    session: int  # minted by the target replica, never reused
    tokens: tuple[int, ...]  # the whole prefix: prompt and output so far
    params: SamplingParams  # the sampling key and what shapes the choice; stop conditions do not cross


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
