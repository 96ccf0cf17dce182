"""Targets and drafts in this process, linked in every way; and what clients get of them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from cluster.draft import DraftReplica
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.link import Link, memory_link
from cluster.target import TargetReplica
from engine.attention import SequenceRows
from engine.budget import Window
from engine.drafters import Drafter
from engine.runner import ModelRunner
from engine.types import Down, GenerationRequest, TokenChunk, TokenLogprobs, Up
from tests import cluster_fixtures, exact
from tests.cluster_fixtures import PATIENCE_S

TOKENS = 24
Ends = tuple[Link[Down, Up], Link[Up, Down]]


class Stream:
    """What a client got of one request."""

    def __init__(self, request: GenerationRequest, on_chunk: Callable[["Stream"], None] = lambda stream: None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.guessed = 0  # tokens that a draft guessed
        self.last: TokenChunk | None = None
        self._on_chunk = on_chunk
        self._ended = threading.Event()

    def sink(self, chunk: TokenChunk) -> None:
        assert self.last is None, "a chunk after the last one"
        assert chunk.request_id == self.request.request_id
        assert len(chunk.tokens) == len(chunk.origins)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.guessed += chunk.origins.count("draft")
        if chunk.finish_reason is not None:
            self.last = chunk
            self._ended.set()
        self._on_chunk(self)

    def end(self) -> TokenChunk:
        """The last chunk."""
        assert self._ended.wait(PATIENCE_S), "the stream did not end"
        assert self.last is not None
        return self.last


def submit(target: TargetReplica, requests: Sequence[GenerationRequest]) -> list[Stream]:
    streams = [Stream(request) for request in requests]
    for stream in streams:
        target.submit(stream.request, stream.sink)
    return streams


def outputs(streams: Sequence[Stream]) -> list[list[int]]:
    """Of streams that all reach their length."""
    assert [stream.end().finish_reason for stream in streams] == ["length"] * len(streams)
    return [stream.tokens for stream in streams]


@dataclass
class Case:
    """Requests and what plain decoding gives for them."""

    requests: list[GenerationRequest]
    expected: list[list[int]]

    def __getitem__(self, part: slice) -> "Case":
        return Case(self.requests[part], self.expected[part])


MakeCase = Callable[..., Case]


class Steps:
    """Does things when the target has run so many passes."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._todo: dict[int, Callable[[], object]] = {}
        self._run = 0
        self._forward = runner.forward
        monkeypatch.setattr(runner, "forward", self._count)

    def at(self, count: int, action: Callable[[], object]) -> None:
        self._todo[self._run + count] = action

    def _count(self, batch: Sequence[SequenceRows]) -> torch.Tensor:
        self._run += 1
        self._todo.pop(self._run, lambda: None)()
        return self._forward(batch)


@contextmanager
def serving(runner: ModelRunner, window: Window | None = None, **options: object) -> Iterator[TargetReplica]:
    """A target, audited in the end."""
    replica = TargetReplica(runner, window or exact.goodput(), **options)  # type: ignore[arg-type]
    try:
        yield replica
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
        assert replica.stats().running == replica.stats().waiting == 0
    finally:
        replica.close()


@contextmanager
def drafting(drafter: Drafter) -> Iterator[DraftReplica]:
    replica = DraftReplica(drafter)
    try:
        yield replica
        replica.check()
    finally:
        replica.close()


@contextmanager
def memory(target: TargetReplica, draft: DraftReplica) -> Iterator[Ends]:
    ends = memory_link()
    draft.add_link(ends[1])
    target.add_link(ends[0])
    yield ends


@contextmanager
def over_grpc(target: TargetReplica, draft: DraftReplica) -> Iterator[None]:
    server = DraftServer("127.0.0.1", 0, draft.add_link)
    link = connect(server.address, PATIENCE_S)
    target.add_link(link)
    yield
    link.close()
    server.stop()


@contextmanager
def faulty(target: TargetReplica, draft: DraftReplica, ends: int) -> Iterator[None]:
    """Faults at the target's end, or at both."""
    near, far = memory_link()
    draft.add_link(cluster_fixtures.faulty(far, 2) if ends == 2 else far)
    target.add_link(cluster_fixtures.faulty(near, 1))
    yield
