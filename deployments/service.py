"""What serving is, whatever the protocol: models by name, something that runs their requests, and the text that comes out.

HTTP and gRPC both end here; Ray Serve, or one replica in this process, stands behind `Backend`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from cluster.intake import TARGET_FAILED, Closed, Overloaded
from deployments.fields import TextModel
from engine.text import OutputText
from engine.types import GenerationRequest, InvalidRequest, TokenChunk, TokenLogprobs

_PIECES = 16  # of each sample that a slow client leaves unread; generation waits then
_PAUSE_S = 0.1  # before going on elsewhere; twice as long each time that brings nothing
_LONGEST_PAUSE_S = 2.0
_COMPILERS = 2  # threads for grammars: clients could keep any number of them busy
_GRAMMAR_S = 15.0  # for what takes longer than any sensible grammar, the reading of a vocabulary included

Result = TypeVar("Result")


class ReplicaLost(RuntimeError):
    """The target that ran a request is gone: the request can go on elsewhere with the tokens received so far."""


class Unavailable(RuntimeError):
    """No replica could be found to run a request, or to go on with it."""


class DeadlineExceeded(RuntimeError):
    """A request took longer than it may."""


class GenerationFailed(RuntimeError):
    """The target gave a request up; the message is for the client."""


class Backend(Protocol):
    """Runs the requests of one model."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """The chunks of a request; closing the iterator cancels it within one step.

        Raises InvalidRequest, Overloaded, Closed or ReplicaLost.
        """


@dataclass(frozen=True, kw_only=True)
class ServedModel(TextModel):
    """A model that clients can name."""

    name: str
    fingerprint: str  # of everything that shapes its outputs: OpenAI's system_fingerprint
    created: int  # seconds since 1970
    backend: Backend


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one output."""

    tokens: int = 0
    accepted: int = 0  # of them, guessed by the draft
    steps: int = 0  # target steps that brought tokens: each ends with a token of the target's own, but for the last
    resumed: int = 0  # times that the output went on elsewhere

    @property
    def accepted_share(self) -> float:
        """Of all tokens; 0 without any."""
        return self.accepted / max(1, self.tokens)

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency; 0 without any."""
        return self.tokens / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an output, in order; the last one has a finish reason. Its text may lag behind its tokens."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    finish_reason: Literal["stop", "length"] | None = None
    speculation: Speculation | None = None  # with the finish reason
    known: int = 0  # tokens of the prompt whose KV the target had already


@dataclass(eq=False)
class _Output:
    """What came of a request so far."""

    request: GenerationRequest
    text: OutputText
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    steps: int = 0
    resumed: int = 0
    known: int = 0
    open_step: bool = False  # the last token was the draft's: its step may not have ended with it

    def take(self, chunk: TokenChunk) -> Piece:
        """The next piece. What follows a stop string in a chunk is cut off; raises GenerationFailed or ReplicaLost.

        An end token is one of the piece's tokens, but none of its text.
        """
        if chunk.finish_reason == "cancelled" or chunk.error == TARGET_FAILED:
            finish: Literal["stop", "length"] | None = None  # by the replica, not by us: its tokens count
        elif chunk.finish_reason == "error":
            raise GenerationFailed(chunk.error or "the target gave the request up")
        else:
            finish = chunk.finish_reason
        if not self.resumed and not self.tokens:
            self.known = min(chunk.known, len(self.request.prompt))
        texts, used = [], 0
        for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
            used += 1
            ended = chunk.finish_reason == "stop" and used == len(chunk.tokens)
            texts.append(self.text.end(token) if ended else self.text.push(token))
            self.tokens.append(token)
            self.accepted += origin == "draft"
            self.open_step = origin == "draft"
            self.steps += not self.open_step
            if self.text.stopped:
                finish = "stop"
                break
        if finish is None and len(self.tokens) >= self.request.params.max_tokens:
            finish = "length"
        if finish is not None:
            texts.append(self.text.flush())
        stats = self.speculation() if finish is not None else None
        return Piece("".join(texts), chunk.tokens[:used], chunk.logprobs[:used], finish, stats, self.known)

    def speculation(self) -> Speculation:
        """Statistics so far."""
        return Speculation(len(self.tokens), self.accepted, self.steps + self.open_step, self.resumed)

    def remaining(self) -> GenerationRequest:
        """What another replica has to do."""
        if not self.resumed:
            return self.request
        request_id = f"{self.request.request_id}.{self.resumed}"  # the old one may still be known somewhere
        return replace(self.request, request_id=request_id, resume_tokens=tuple(self.tokens))


class Service:
    """Runs requests: text out of tokens, deadlines, and going on elsewhere when a target is lost."""

    def __init__(self, timeout_s: float = 600.0, resumes: int = 3, full_s: float = 0.1) -> None:
        """timeout_s: for a whole request. resumes: times in a row that going on elsewhere may bring nothing.

        full_s: a refusal speaks for the requests that come so soon after it, unless one ends before.
        """
        self._timeout_s = timeout_s
        self._resumes, self._full_s = resumes, full_s
        self._full: dict[str, float] = {}  # models that just refused a request, and until when that counts
        self._draining = False
        self.preparing = 0  # requests that `prepare` has in hand
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="paceline-grammars")

    def drain(self) -> None:
        """Admits no more requests; those that run go on."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether it was drained."""
        return self._draining

    def admit(self, model: ServedModel) -> None:
        """Raises Unavailable while draining, Overloaded when a request to this model would be refused after all.

        So that it can be before it is read and tokenized: with ten times too many requests, refusing is much of the work.
        """
        if self._draining:
            raise Unavailable("the server is going away")
        if time.monotonic() < self._full.get(model.name, 0.0):
            raise Overloaded("other requests are waiting already")

    async def prepare(
        self, make: Callable[[], Result], grammar: bool, arrived: float, timeout_s: float | None = None
    ) -> Result:
        """What `make` makes of a client's fields, on another thread, in the request's time: see `run`.

        grammar: it compiles one, which can take long: on threads of their own, and for so long only. Raises
        DeadlineExceeded, and what `make` does.
        """
        deadline = self._deadline(arrived, timeout_s)
        loop = asyncio.get_running_loop()
        if grammar:
            deadline = min(deadline, loop.time() + _GRAMMAR_S)
        self.preparing += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await loop.run_in_executor(self._compilers if grammar else None, make)
        except TimeoutError:
            what = "the grammar took longer to compile" if grammar else "the request took longer"
            raise DeadlineExceeded(f"{what} than it may") from None
        finally:
            self.preparing -= 1

    def _deadline(self, arrived: float | None, timeout_s: float | None) -> float:
        """In the loop's time."""
        seconds = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        passed = 0.0 if arrived is None else time.monotonic() - arrived
        return asyncio.get_running_loop().time() + seconds - passed

    async def run(
        self,
        model: ServedModel,
        request: GenerationRequest,
        timeout_s: float | None = None,
        arrived: float | None = None,
    ) -> AsyncGenerator[Piece]:
        """The pieces of one sample; closing the iterator cancels the request.

        timeout_s: when shorter than the service's own. arrived: when the request came, by time.monotonic; None: now.
        Raises InvalidRequest, Overloaded, Unavailable, DeadlineExceeded or GenerationFailed.
        """
        deadline = self._deadline(arrived, timeout_s)
        params = request.params
        output = _Output(request, OutputText(model.tokenizer, params.stop, params.min_tokens, request.prompt))
        failures = 0
        while True:
            held = len(output.tokens)
            try:
                async with aclosing(_until(deadline, model.backend.generate(output.remaining()))) as chunks:
                    async for chunk in chunks:
                        piece = output.take(chunk)
                        if piece.tokens or piece.finish_reason is not None:
                            yield piece
                        if piece.finish_reason is not None:
                            self._full.pop(model.name, None)  # there is room
                            return
            except (ReplicaLost, Closed):
                pass
            except InvalidRequest as error:
                if not output.tokens:
                    raise
                raise GenerationFailed(f"its replica was lost, and the others can't go on: {error.message}") from None
            except Overloaded:
                if not output.tokens:
                    self._full[model.name] = time.monotonic() + self._full_s
                    raise
            failures = 0 if len(output.tokens) > held else failures + 1
            if failures > self._resumes:
                raise Unavailable("no replica could take the request")
            output.resumed += 1
            await _pause(failures, deadline)

    async def run_all(
        self,
        model: ServedModel,
        requests: Sequence[GenerationRequest],
        timeout_s: float | None = None,
        arrived: float | None = None,
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """(index of the request, piece) of several samples at the same time; the first error ends them all. See `run`."""
        if len(requests) == 1:
            async with aclosing(self.run(model, requests[0], timeout_s, arrived)) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(_PIECES * len(requests))

        async def pump(index: int, request: GenerationRequest) -> None:
            try:
                async with aclosing(self.run(model, request, timeout_s, arrived)) as pieces:
                    async for piece in pieces:
                        await queue.put((index, piece))
            except Exception as error:  # noqa: BLE001  raised again where the pieces are read
                await queue.put((index, error))

        tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
        try:
            ended = 0
            while ended < len(requests):
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                ended += item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _until(deadline: float, chunks: AsyncGenerator[TokenChunk]) -> AsyncGenerator[TokenChunk]:
    """The same chunks, all before `deadline`, in the loop's time. Raises DeadlineExceeded."""
    async with aclosing(chunks):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded("the request took longer than it may") from None
            yield chunk


async def _pause(failures: int, deadline: float) -> None:
    """Before the next attempt. Raises DeadlineExceeded."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2**failures) if failures else 0)
            return
    raise DeadlineExceeded("the request took longer than it may")
