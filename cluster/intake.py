"""Requests on a target, from submission to the last chunk."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.drafters.retrieval import Documents
from engine.elastic import ElasticSequence
from engine.types import FinishReason, GenerationRequest, Origin, TokenChunk, TokenLogprobs, require

Sink = Callable[[TokenChunk], None]
TARGET_FAILED = "the target failed"  # the error of every request when a target ends: others could go on with them
MAX_WAITING = 1024  # requests that wait for KV; more are refused, preempted ones apart


class Overloaded(RuntimeError):
    """Too many requests wait already."""


class Closed(RuntimeError):
    """The replica has ended."""


@dataclass(eq=False, slots=True)
class Submitted:
    """A request and who gets its chunks."""

    request: GenerationRequest
    sink: Sink
    documents: Documents | None = None  # those of the request, as an index
    grammar: object = None  # compiled, and held until the loop needs it
    overtaken: int = 0  # by how many that came later
    running: "Running | None" = None  # once the loop has looked at it

    def last(self, reason: FinishReason, error: str | None = None) -> TokenChunk:
        """The chunk that ends it, with the tokens that its client did not get yet."""
        if self.running is not None:
            return self.running.unsent.flush(reason, error)
        return TokenChunk(self.request.request_id, (), (), reason, error)


@dataclass(eq=False, slots=True)
class Unsent:
    """What there is of a request's output that its client did not get yet."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of these tokens
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of these tokens, if asked for
    known: int = 0  # see TokenChunk

    def add(self, tokens: Sequence[int], accepted: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """accepted: how many of the tokens, the first ones, a draft guessed."""
        self.tokens += tokens
        self.origins += ["draft"] * accepted
        self.origins += ["target"] * (len(tokens) - accepted)
        self.logprobs += logprobs

    def flush(self, reason: FinishReason | None = None, error: str | None = None) -> TokenChunk:
        """A chunk of everything."""
        tokens, origins, logprobs = tuple(self.tokens), tuple(self.origins), tuple(self.logprobs)
        for part in (self.tokens, self.origins, self.logprobs):
            part.clear()
        return TokenChunk(self.request_id, tokens, origins, reason, error, logprobs, self.known)


@dataclass(eq=False)
class Running:
    """A request in the batch, or one that was preempted and will go on where it was."""

    submitted: Submitted
    sequence: ElasticSequence
    unsent: Unsent
    session: int = -1  # on the drafts, while it is in the batch
    started: bool = False  # it was in the batch before
    flushed: float = 0.0  # seconds: when its client last got something
    preempted: bool = False

    @property
    def window(self) -> str:
        """What the request says of its window."""
        return self.submitted.request.window


class Intake:
    """All requests that have not ended. Any thread may submit; everything else is for the replica's loop."""

    def __init__(self) -> None:
        self.waiting: deque[Submitted] = deque()
        self._submitted: dict[str, Submitted] = {}  # by request id, the waiting ones included
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, submitted: Submitted) -> None:
        """Queues a request. Raises InvalidRequest for an id that is taken, Overloaded or Closed."""
        request_id = submitted.request.request_id
        with self._lock:
            self.check_room()
            require(request_id not in self._submitted, "request_id", "a request with this id is running")
            self._submitted[request_id] = submitted
            self.waiting.append(submitted)

    def check_room(self) -> None:
        """Raises Overloaded or Closed where one more could not be queued now."""
        if self._closed:
            raise Closed("the target has ended")
        if len(self.waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are waiting already")

    def find(self, request_id: str) -> Submitted | None:
        """The request with this id, if it has not ended."""
        return self._submitted.get(request_id)

    def in_line(self) -> list[Submitted]:
        """Those that wait, the first first."""
        with self._lock:
            return list(self.waiting)

    def admitted(self, submitted: Submitted) -> None:
        """It waits no longer."""
        with self._lock:
            self.waiting.remove(submitted)

    def put_back(self, submitted: Submitted) -> None:
        """It waits again, before all others."""
        with self._lock:
            self.waiting.appendleft(submitted)

    def end(self, submitted: Submitted, last: TokenChunk) -> None:
        """Forgets a request and hands out its last chunk."""
        with self._lock:
            del self._submitted[submitted.request.request_id]
            if submitted in self.waiting:
                self.waiting.remove(submitted)
        submitted.sink(last)

    def close(self) -> list[Submitted]:
        """Takes no more; the requests that have not ended."""
        with self._lock:
            self._closed = True
            return list(self._submitted.values())
