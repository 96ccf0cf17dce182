"""The answers of OpenAI's API."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from deployments.openai import ToolCall


class PromptDetails(BaseModel):
    """Of the tokens that were read."""

    cached_tokens: int  # whose KV was there already; those of samples beyond the first don't count


class Usage(BaseModel):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChoiceStats(BaseModel):
    """What speculation did for one output, when `"paceline": {"stats": true}` asks for it."""

    index: int
    seed: int  # of this sample
    tokens: int
    steps: int  # of the target
    tokens_per_step: float
    accepted: int  # tokens guessed by the draft
    accepted_share: float  # of all tokens
    resumed: int  # times that the output went on at another replica


class Stats(BaseModel):
    """The extra field `paceline` of answers."""

    seed: int  # of the request: sent again, it gives the same answer
    choices: list[ChoiceStats]


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An output, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    paceline: Stats | None = None


class Completion(_Answer):
    """The answer of /v1/completions, or a chunk of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


# --- /v1/chat/completions


class TopLogprob(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the output, with the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprob]


class AnsweredCall(ToolCall):
    """A call in an answer; `index` in streams only."""

    index: int | None = None


class AnswerMessage(BaseModel):
    """What the model says; in streams what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """An output."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish


class ChatCompletion(_Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunkChoice(BaseModel):
    """A piece of an output."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None


class ChatChunk(_Answer):
    """A chunk of a streamed answer of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


# --- the others


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int  # tokens, prompt and output together


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str
