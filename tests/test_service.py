"""Serving, without a protocol: text and statistics of an output, stops, deadlines, and going on when a target is lost."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.intake import Overloaded
from cluster.target import TargetReplica
from deployments import service as service_module
from deployments.fields import GenerationFields, make_requests
from deployments.generate import texts
from deployments.service import (
    Backend,
    DeadlineExceeded,
    GenerationFailed,
    Piece,
    ReplicaLost,
    ServedModel,
    Service,
    Unavailable,
)
from engine.decode import Generation, decode
from engine.runner import ModelRunner
from engine.text import OutputText
from engine.types import GenerationRequest, InvalidRequest, TokenChunk, TokenLogprobs
from tests.cluster_fixtures import PATIENCE_S
from tests.http_fixtures import PROMPT, serving_replica
from tests.local_backend import LocalBackend


@pytest.fixture
def replica(target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[TargetReplica]:
    with serving_replica(target, tokenizer) as replica:
        yield replica


@pytest.fixture
def served(replica: TargetReplica, tokenizer: PreTrainedTokenizerFast) -> Callable[[Backend | None], ServedModel]:
    def make(backend: Backend | None = None) -> ServedModel:
        return ServedModel(
            name="code",
            tokenizer=tokenizer,
            context=1024,
            vocab_size=4096,
            fingerprint="fp_test",
            created=0,
            backend=backend or LocalBackend(replica),
        )

    return make


Make = Callable[..., ServedModel]


def requests_for(model: ServedModel, **fields: Any) -> list[GenerationRequest]:
    return make_requests(GenerationFields(prompt=PROMPT, **{"max_tokens": 32, "seed": 5, **fields}), model, "r")


def collect(model: ServedModel, request: GenerationRequest, **options: Any) -> list[Piece]:
    async def read() -> list[Piece]:
        return [piece async for piece in Service(**options).run(model, request)]

    return asyncio.run(read())


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def oracle(target: ModelRunner, tokenizer: PreTrainedTokenizerFast, request: GenerationRequest) -> Generation:
    """What the request gives in one process. The replica must be idle."""
    (generation,) = decode(target, [request], tokenizer=tokenizer)
    return generation


class Flaky:
    """A backend that loses its replica behind every `every` tokens; implements Backend."""

    def __init__(self, inner: Backend, every: int, how: str = "raise") -> None:
        self._inner, self._every, self._how = inner, every, how
        self.seen: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        self.seen.append(request)
        left = self._every
        async with aclosing(self._inner.generate(request)) as chunks:
            async for chunk in chunks:
                if left <= 0 or len(chunk.tokens) > left:
                    break
                left -= len(chunk.tokens)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        if self._how == "raise":
            raise ReplicaLost
        if self._how == "cancelled":
            yield TokenChunk(request.request_id, (), (), "cancelled")
        if self._how == "failed":
            yield TokenChunk(request.request_id, (), (), "error", "the target failed")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_tokens_and_statistics_are_those_of_one_process(
    served: Make, replica: TargetReplica, target: ModelRunner, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    model = served()
    (request,) = requests_for(model, temperature=temperature, ignore_eos=True, logprobs=2)
    pieces = collect(model, request)
    assert replica.wait_idle(PATIENCE_S)
    expected = oracle(target, tokenizer, request)
    assert tokens_of(pieces) == expected.tokens
    text = OutputText(tokenizer, ())
    assert text_of(pieces) == "".join(text.push(token) for token in expected.tokens)
    logprobs: list[TokenLogprobs] = [entry for piece in pieces for entry in piece.logprobs]
    assert logprobs == expected.logprobs
    last = pieces[-1]
    assert last.finish_reason == "length"
    assert last.speculation is not None
    stats = replica.stats()
    assert (last.speculation.tokens, last.speculation.steps) == (
        32,
        stats.tokens - stats.decoded + stats.sequence_steps,
    )
    assert last.speculation.accepted == stats.accepted


def test_text_ends_before_a_stop_string_with_all_its_tokens_counted(served: Make) -> None:
    model = served()
    (request,) = requests_for(model, temperature=0.0, ignore_eos=True)
    whole = text_of(collect(model, request))
    stop = whole[10:13]
    (request,) = requests_for(model, temperature=0.0, ignore_eos=True, stop=stop)
    pieces = collect(model, request)
    assert text_of(pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].speculation is not None
    assert pieces[-1].speculation.tokens == len(tokens_of(pieces)) < 32


def test_an_end_token_is_counted_and_is_no_text(served: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    model = served()
    (request,) = requests_for(model, temperature=0.0, ignore_eos=True)
    tokens = tokens_of(collect(model, request))
    end = next(token for at, token in enumerate(tokens) if at > 3 and token not in tokens[:at])
    at = tokens.index(end)
    assert tokenizer.decode([end])
    (request,) = requests_for(model, temperature=0.0, ignore_eos=True, stop_token_ids=(end,))
    pieces = collect(model, request)
    assert tokens_of(pieces) == tokens[: at + 1]
    assert text_of(pieces) == tokenizer.decode(tokens[:at])
    assert pieces[-1].finish_reason == "stop"
    *others, last = [TokenChunk("r", (token,), ("target",)) for token in tokens[: at + 1]]
    chunks = iter([*others, replace(last, finish_reason="stop")])
    assert "".join(texts(chunks, tokenizer, request)) == text_of(pieces)


@pytest.mark.parametrize("how", ["raise", "cancelled", "failed", "end"])
@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_lost_replica_changes_nothing_about_the_output(
    served: Make, replica: TargetReplica, every: int, how: str
) -> None:
    """Stop strings, min_tokens, penalties, detokenising and logprobs go on as if nothing had happened."""
    fields = {"temperature": 1.0, "ignore_eos": True, "logprobs": 1, "frequency_penalty": 1.0, "min_tokens": 8}
    model = served()
    (request,) = requests_for(model, **fields)
    stop = text_of(collect(model, request))[40:43]
    (request,) = requests_for(model, **fields, stop=[stop])
    plain = collect(model, request)
    flaky = Flaky(LocalBackend(replica), every, how)
    resumed = collect(served(flaky), request)
    assert len(flaky.seen) > 1
    assert len({request.request_id for request in flaky.seen}) == len(flaky.seen)
    assert (text_of(resumed), tokens_of(resumed)) == (text_of(plain), tokens_of(plain))
    assert [entry for piece in resumed for entry in piece.logprobs] == [e for piece in plain for e in piece.logprobs]
    assert resumed[-1].finish_reason == plain[-1].finish_reason
    assert resumed[-1].speculation is not None
    assert resumed[-1].speculation.resumed == len(flaky.seen) - 1


def test_replicas_that_bring_nothing_are_tried_a_few_times(served: Make, replica: TargetReplica) -> None:
    flaky = Flaky(LocalBackend(replica), 0)
    (request,) = requests_for(served())
    with pytest.raises(Unavailable):
        collect(served(flaky), request, resumes=2)
    assert len(flaky.seen) == 3


class Full:
    """Refuses; implements Backend."""

    room = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        if not self.room:
            raise Overloaded("full")
        yield TokenChunk(request.request_id, (), (), "stop")


class Broken:
    """Fails after a token; implements Backend."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        yield TokenChunk(request.request_id, (5,), ("target",))
        yield TokenChunk(request.request_id, (), (), "error", "not finite")


class Forgetful:
    """Is lost after a token, and can't go on with the output elsewhere; implements Backend."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        if request.resume_tokens:
            raise InvalidRequest("grammar", "an output that has it can't be resumed")
        yield TokenChunk(request.request_id, (5,), ("target",))
        raise ReplicaLost


class Silent:
    """Says nothing after a token; implements Backend."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        try:
            yield TokenChunk(request.request_id, (5,), ("target",))
            await asyncio.Event().wait()
        finally:
            self.closed += 1


def test_errors_come_through(served: Make) -> None:
    (request,) = requests_for(served())
    with pytest.raises(Overloaded):
        collect(served(Full()), request)
    with pytest.raises(GenerationFailed, match="not finite"):
        collect(served(Broken()), request)
    with pytest.raises(GenerationFailed, match="its replica was lost, and the others can't go on: an output"):
        collect(served(Forgetful()), request)  # the request was in order: its client is not to blame


def test_a_drained_service_admits_nothing_and_finishes_what_runs(served: Make) -> None:
    model = served()
    (request,) = requests_for(model)

    async def ask() -> None:
        service = Service()
        pieces = service.run(model, request)
        first = await anext(pieces)
        service.drain()
        with pytest.raises(Unavailable):
            service.admit(model)
        rest = [piece async for piece in pieces]
        assert [first, *rest][-1].finish_reason is not None

    asyncio.run(ask())


def test_a_refusal_speaks_for_what_follows_until_a_request_ends(served: Make) -> None:
    full = Full()
    model, other = served(full), replace(served(), name="other")
    (request,) = requests_for(model)

    async def ask() -> None:
        service = Service(full_s=PATIENCE_S)
        service.admit(model)
        with pytest.raises(Overloaded):
            await anext(service.run(model, request))
        with pytest.raises(Overloaded):
            service.admit(model)
        service.admit(other)
        full.room = True
        assert [piece async for piece in service.run(model, request)]
        service.admit(model)

    asyncio.run(ask())


def test_what_a_request_needs_before_it_runs_is_in_its_time(served: Make) -> None:
    silent, may = Silent(), threading.Event()
    (request,) = requests_for(served())

    async def ask() -> None:
        service = Service()
        for grammar in (False, True):
            with pytest.raises(DeadlineExceeded):
                await service.prepare(partial(may.wait, PATIENCE_S), grammar, time.monotonic(), 0.05)
            assert service.preparing == 0
        with pytest.raises(DeadlineExceeded):
            _ = [piece async for piece in service.run(served(silent), request, 60.0, time.monotonic() - 60.0)]
        may.set()  # the loop does not end before its threads

    asyncio.run(ask())


def test_grammars_wait_for_each_other_and_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_GRAMMAR_S", 0.1)
    may = threading.Event()

    async def ask() -> None:
        service = Service()
        grammars = [
            asyncio.ensure_future(service.prepare(partial(may.wait, PATIENCE_S), True, time.monotonic()))
            for _ in range(40)
        ]
        await asyncio.sleep(0)
        assert service.preparing == 40, "a server that goes away waits for them"
        assert await service.prepare(lambda: "others go on", False, time.monotonic()) == "others go on"
        assert all(
            isinstance(each, DeadlineExceeded) for each in await asyncio.gather(*grammars, return_exceptions=True)
        )
        may.set()

    asyncio.run(ask())


def test_a_deadline_ends_the_work(served: Make) -> None:
    silent = Silent()
    (request,) = requests_for(served())
    with pytest.raises(DeadlineExceeded):
        collect(served(silent), request, timeout_s=0.05)
    assert silent.closed == 1


def test_closing_the_pieces_cancels_the_request(served: Make, replica: TargetReplica) -> None:
    model = served()
    (request,) = requests_for(model, max_tokens=900, ignore_eos=True)

    async def read_one() -> None:
        async with aclosing(Service().run(model, request)) as pieces:
            await anext(pieces)

    asyncio.run(read_one())
    assert replica.wait_idle(PATIENCE_S)
    assert replica.stats().tokens < 900


def test_samples_run_together_each_with_its_own_seed(
    served: Make, replica: TargetReplica, target: ModelRunner, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = served()
    requests = requests_for(model, n=3, temperature=1.0, ignore_eos=True)

    async def read() -> list[tuple[int, Piece]]:
        return [item async for item in Service().run_all(model, requests)]

    items = asyncio.run(read())
    assert replica.wait_idle(PATIENCE_S)
    outputs = [tokens_of([piece for at, piece in items if at == index]) for index in range(3)]
    assert outputs == [oracle(target, tokenizer, request).tokens for request in requests]
    assert len({tuple(output) for output in outputs}) == 3


def test_a_slow_reader_of_several_samples_holds_their_backend_up(served: Make, tokenizer: Any) -> None:
    """What is unread stays bounded: the backend's iterators wait."""
    produced = 0

    class Endless:
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
            nonlocal produced
            while True:
                produced += 1
                yield TokenChunk(request.request_id, (5,), ("target",))

    model = served(Endless())
    requests = [
        replace(request, params=replace(request.params, max_tokens=900)) for request in requests_for(model, n=2)
    ]

    async def read_slowly() -> None:
        async with aclosing(Service().run_all(model, requests)) as items:
            await anext(items)
            for _ in range(1000):  # all that could run has its turns
                await asyncio.sleep(0)

    asyncio.run(read_slowly())
    assert produced < 100
