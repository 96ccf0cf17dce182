"""The pieces of outputs as OpenAI's answers: whole, or as a stream of chunks."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from deployments import openai_answers as shapes
from deployments.chat import TaggedCalls, WholeCall
from deployments.logprobs import TokenTexts
from deployments.service import Piece, ServedModel, Speculation
from engine.types import GenerationRequest

Pieces = AsyncGenerator[tuple[int, Piece]]


@dataclass(frozen=True)
class Job:
    """A client's request on its way: choice i of the answer is what comes of requests[i]."""

    id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: Sequence[GenerationRequest]
    samples: int  # requests of each prompt
    include_usage: bool = False
    stats: bool = False


class Answer(ABC):
    """Shapes pieces. `object` and the classes of chunks and wholes are the subclasses'."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._written = [0] * len(job.requests)
        self._speculation = [Speculation()] * len(job.requests)
        self._known = [0] * len(job.requests)

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> BaseModel | None:
        """A chunk's choice for a piece; None when the piece says nothing yet."""

    @abstractmethod
    def chunk(self, choices: Sequence[Any], fields: dict[str, Any]) -> BaseModel:
        """A chunk of a stream."""

    @abstractmethod
    def complete(self, choices: Sequence[Sequence[Any]], fields: dict[str, Any]) -> BaseModel:
        """The whole answer, from the chunks' choices of each index."""

    async def events(self, pieces: Pieces) -> AsyncGenerator[str]:
        """The data of a stream's events, the last apart."""
        usage: dict[str, Any] = {"usage": None} if self.job.include_usage else {}
        async with aclosing(pieces):
            async for index, piece in pieces:
                self._count(index, piece)
                choice = self.choice(index, piece)
                if choice is not None:
                    done = piece.finish_reason is not None
                    yield _json(
                        self.chunk([choice], {**self._fields, **usage, **(self._stats([index]) if done else {})})
                    )
        if self.job.include_usage:
            yield _json(self.chunk([], {**self._fields, "usage": self._usage()}))

    async def whole(self, pieces: Pieces) -> str:
        """The whole answer, as JSON."""
        choices: list[list[BaseModel]] = [[] for _ in self.job.requests]
        async with aclosing(pieces):
            async for index, piece in pieces:
                self._count(index, piece)
                choice = self.choice(index, piece)
                if choice is not None:
                    choices[index].append(choice)
        stats = self._stats(range(len(self.job.requests)))
        return _json(self.complete(choices, {**self._fields, "usage": self._usage(), **stats}))

    @property
    def _fields(self) -> dict[str, Any]:
        model = self.job.model
        return {
            "id": self.job.id,
            "created": self.job.created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def _count(self, index: int, piece: Piece) -> None:
        self._written[index] += len(piece.tokens)
        self._known[index] = piece.known
        if piece.speculation is not None:
            self._speculation[index] = piece.speculation

    def _usage(self) -> shapes.Usage:
        read = sum(len(request.prompt) for request in self.job.requests[:: self.job.samples])
        written, known = sum(self._written), sum(self._known[:: self.job.samples])
        return shapes.Usage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=shapes.PromptDetails(cached_tokens=known),
        )

    def _stats(self, indices: Sequence[int]) -> dict[str, Any]:
        if not self.job.stats:
            return {}
        choices = [self._choice_stats(index) for index in indices]
        return {"paceline": shapes.Stats(seed=self.job.requests[0].params.seed, choices=choices)}

    def _choice_stats(self, index: int) -> shapes.ChoiceStats:
        done = self._speculation[index]
        return shapes.ChoiceStats(
            index=index,
            seed=self.job.requests[index].params.seed,
            tokens=done.tokens,
            steps=done.steps,
            tokens_per_step=round(done.tokens_per_step, 3),
            accepted=done.accepted,
            accepted_share=round(done.accepted_share, 3),
            resumed=done.resumed,
        )


def _json(answer: BaseModel) -> str:
    return answer.model_dump_json(exclude_unset=True)


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    def __init__(self, job: Job, texts: TokenTexts, echo: Sequence[str]) -> None:
        """echo: for each request what its text begins with."""
        super().__init__(job)
        self._texts, self._echo = texts, list(echo)
        self._offsets = [len(text) for text in echo]  # where the text of the next token begins

    def choice(self, index: int, piece: Piece) -> shapes.CompletionChoice | None:
        """See Answer."""
        text = self._echo[index] + piece.text
        self._echo[index] = ""
        logprobs = None
        if piece.logprobs:
            offset = self._offsets[index]
            logprobs, self._offsets[index] = self._texts.completion(piece.tokens, piece.logprobs, offset)
        if not text and logprobs is None and piece.finish_reason is None:
            return None
        return shapes.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=piece.finish_reason)

    def chunk(self, choices: Sequence[shapes.CompletionChoice], fields: dict[str, Any]) -> shapes.Completion:
        """See Answer."""
        return shapes.Completion(object="text_completion", choices=list(choices), **fields)

    def complete(
        self, choices: Sequence[Sequence[shapes.CompletionChoice]], fields: dict[str, Any]
    ) -> shapes.Completion:
        """See Answer."""
        return self.chunk([_joined(parts) for parts in choices], fields)


def _joined(parts: Sequence[shapes.CompletionChoice]) -> shapes.CompletionChoice:
    text, finish = "".join(part.text for part in parts), parts[-1].finish_reason
    found = [part.logprobs for part in parts if part.logprobs is not None]
    logprobs = None
    if found:
        logprobs = shapes.CompletionLogprobs(
            tokens=[token for part in found for token in part.tokens],
            token_logprobs=[value for part in found for value in part.token_logprobs],
            top_logprobs=[top for part in found for top in part.top_logprobs],
            text_offset=[offset for part in found for offset in part.text_offset],
        )
    return shapes.CompletionChoice(index=parts[0].index, text=text, logprobs=logprobs, finish_reason=finish)


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    def __init__(self, job: Job, texts: TokenTexts, readers: Sequence[TaggedCalls | WholeCall | None]) -> None:
        """readers: for each request what reads tool calls out of its text, if any are possible."""
        super().__init__(job)
        self._texts, self._readers = texts, readers
        self._begun = [False] * len(job.requests)
        self._calls = [0] * len(job.requests)

    def choice(self, index: int, piece: Piece) -> shapes.ChatChunkChoice | None:
        """See Answer."""
        content, calls = self._read(index, piece)
        delta = shapes.AnswerMessage(**({} if self._begun[index] else {"role": "assistant", "content": ""}))
        if content:
            delta.content = content
        if calls:
            delta.tool_calls = calls
        logprobs = self._texts.chat(piece.tokens, piece.logprobs) if piece.logprobs else None
        if not (content or calls or logprobs or piece.finish_reason):
            return None
        self._begun[index] = True
        called = piece.finish_reason == "stop" and self._calls[index]
        finish: shapes.ChatFinish | None = "tool_calls" if called else piece.finish_reason
        return shapes.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)

    def _read(self, index: int, piece: Piece) -> tuple[str, list[shapes.AnsweredCall]]:
        reader = self._readers[index]
        if reader is None:
            return piece.text, []
        found = reader.push(piece.text)
        if piece.finish_reason is not None:
            found += reader.flush()
        calls = []
        for call in found:
            if not isinstance(call, str):
                call_id, at = f"call_{uuid.uuid4().hex}", self._calls[index]
                calls.append(shapes.AnsweredCall(index=at, id=call_id, type="function", function=call))
                self._calls[index] += 1
        return "".join(text for text in found if isinstance(text, str)), calls

    def chunk(self, choices: Sequence[shapes.ChatChunkChoice], fields: dict[str, Any]) -> shapes.ChatChunk:
        """See Answer."""
        return shapes.ChatChunk(object="chat.completion.chunk", choices=list(choices), **fields)

    def complete(
        self, choices: Sequence[Sequence[shapes.ChatChunkChoice]], fields: dict[str, Any]
    ) -> shapes.ChatCompletion:
        """See Answer."""
        return shapes.ChatCompletion(object="chat.completion", choices=[_message(parts) for parts in choices], **fields)


def _message(parts: Sequence[shapes.ChatChunkChoice]) -> shapes.ChatChoice:
    content = "".join(part.delta.content or "" for part in parts)
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    message = shapes.AnswerMessage(role="assistant", content=content or (None if calls else ""))
    if calls:
        message.tool_calls = [
            shapes.AnsweredCall(id=call.id, type="function", function=call.function) for call in calls
        ]
    found = [part.logprobs for part in parts if part.logprobs is not None]
    logprobs = shapes.ChatLogprobs(content=[entry for part in found for entry in part.content]) if found else None
    finish = parts[-1].finish_reason
    assert finish is not None, "the last piece has a finish reason"
    return shapes.ChatChoice(index=parts[0].index, message=message, logprobs=logprobs, finish_reason=finish)
