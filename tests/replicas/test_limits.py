"""A target's own limits: pages, queues, numbers that are none, requests that can't be run, ends of streams."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cluster import intake
from cluster.intake import Closed, Overloaded
from cluster.link import memory_link
from cluster.target import TargetReplica
from engine.attention import SequenceRows
from engine.decode import decode
from engine.drafters.model import ModelDrafter
from engine.kv import PAGE
from engine.runner import ModelRunner
from engine.types import GenerationRequest, Grammar, InvalidRequest, SamplingParams
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.replicas.helpers import (
    TOKENS,
    MakeCase,
    Steps,
    Stream,
    drafting,
    memory,
    outputs,
    over_grpc,
    serving,
    submit,
)


def test_requests_beyond_the_pool_wait_their_turn(draft: ModelRunner, case: MakeCase) -> None:
    wanted = case(0.7)
    small = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=400)
    with drafting(ModelDrafter(draft)) as drafts, serving(small) as replica, memory(replica, drafts):
        streams = submit(replica, wanted.requests)
        too_long = replace(
            wanted.requests[0], request_id="long", params=replace(wanted.requests[0].params, max_tokens=500)
        )
        with pytest.raises(InvalidRequest, match="make 517 tokens; the target has room for 352") as refused:
            replica.submit(too_long, print)  # at once, not when it would be its turn
        assert refused.value.param == "prompt"
        assert outputs(streams) == wanted.expected
        assert replica.wait_idle(PATIENCE_S)
        assert small.pool.used_pages == 0


def poison(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, prompt: exact.Tokens, position: int) -> None:
    """From this position on, what is computed for the sequence with this prompt is not a number, as in its KV."""
    forward = runner.forward
    leases: set[int] = set()

    def poisoned(batch: Sequence[SequenceRows]) -> torch.Tensor:
        logits = forward(batch).clone()
        row = 0
        for rows in batch:
            if tuple(rows.tokens) == prompt[: len(rows.tokens)] and rows.prefix == 0:
                leases.add(id(rows.lease))
            count = len(rows.tokens) - rows.wanted
            if id(rows.lease) in leases and rows.prefix >= position:
                logits[row : row + count] = torch.nan
                for page in {slot // PAGE for slot in rows.slots.tolist()}:
                    runner.pool.data[:, :, :, page * PAGE : (page + 1) * PAGE] = torch.nan
            row += count
        return logits

    monkeypatch.setattr(runner, "forward", poisoned)


def test_numbers_that_are_none_end_one_request_alone(
    target: ModelRunner, draft: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(0.7)[:4]
    victim = replace(wanted.requests[3], salt=b"its own")  # computes its whole prompt itself
    with drafting(ModelDrafter(draft)) as drafts, serving(target) as replica, memory(replica, drafts):
        poison(target, monkeypatch, victim.prompt, len(victim.prompt) + 5)
        streams = submit(replica, [*wanted.requests[:3], victim])
        last = streams.pop(3).end()
        assert last.finish_reason == "error"
        assert last.error is not None
        assert victim.request_id in last.error
        assert outputs(streams) == wanted.expected[:3]
        assert replica.wait_idle(PATIENCE_S)
        replica.check()  # nothing in the pool that is not a number
        monkeypatch.undo()
        assert outputs(submit(replica, wanted.requests)) == wanted.expected


def test_a_target_that_fails_tells_its_clients(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(0.7)[:3]
    replica = TargetReplica(target, exact.goodput(), max_batch=2)
    near, far = memory_link()
    replica.add_link(near)

    def fail() -> None:
        raise RuntimeError("at /some/where: out of memory")

    Steps(target, monkeypatch).at(5, fail)
    for stream in submit(replica, wanted.requests):
        assert stream.end().finish_reason == "error"
        assert stream.end().error == "the target failed"
    until(lambda: not replica.alive, "the target ends")
    assert not far.alive
    replica.check()
    with pytest.raises(Closed):
        replica.submit(wanted.requests[0], print)
    replica.close()


def test_all_clients_are_told_that_a_target_failed_although_nothing_can_be_freed(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = TargetReplica(target, exact.goodput(), max_batch=2)
    near, far = memory_link()
    replica.add_link(near)

    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(replica._batch, "leave", fail)
        Steps(target, patch).at(5, fail)
        for stream in submit(replica, case(0.7)[:3].requests):
            assert stream.end().error == "the target failed"
        until(lambda: not replica.alive, "the target ends")
    assert not far.alive
    for running in list(replica._running.values()):  # the pool is for other tests, too
        replica._batch.leave(running)
    replica.close()


def test_closing_a_target_ends_its_streams(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(0.7)[:3]
    replica = TargetReplica(target, exact.goodput(), max_batch=2)
    reached = threading.Event()
    Steps(target, monkeypatch).at(5, reached.set)
    streams = submit(replica, wanted.requests)
    assert reached.wait(PATIENCE_S)
    replica.close()
    for stream, tokens in zip(streams, wanted.expected, strict=True):
        assert stream.end().finish_reason == "cancelled"
        assert stream.tokens == tokens[: len(stream.tokens)]
    with pytest.raises(Closed):
        replica.submit(wanted.requests[0], print)
    replica.check()


@contextmanager
def busy(
    replica: TargetReplica, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, first: GenerationRequest
) -> Iterator[Stream]:
    """The target is in a step for `first`, which takes until the block ends."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(PATIENCE_S)

    Steps(runner, monkeypatch).at(1, hold)
    (stream,) = submit(replica, [first])
    assert entered.wait(PATIENCE_S)
    yield stream
    leave.set()


def test_too_many_waiting_requests_are_refused_at_once(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 3)
    wanted = case(0.7)[:6]
    with serving(target, max_batch=2) as replica:
        with busy(replica, target, monkeypatch, wanted.requests[0]) as first:
            streams = [first, *submit(replica, wanted.requests[1:4])]
            for request in wanted.requests[4:]:
                with pytest.raises(Overloaded, match="3 requests are waiting"):
                    replica.submit(request, print)
        assert outputs(streams) == wanted.expected[:4]
        assert outputs(submit(replica, wanted.requests[4:])) == wanted.expected[4:]


def test_a_request_that_waits_can_be_cancelled(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(0.7)[:3]
    with serving(target, max_batch=1) as replica:
        with busy(replica, target, monkeypatch, wanted.requests[0]) as first:
            waiting = submit(replica, wanted.requests[1:])
            replica.cancel(wanted.requests[1].request_id)
        assert (waiting[0].end().finish_reason, waiting[0].tokens) == ("cancelled", [])
        assert outputs([first, waiting[1]]) == [wanted.expected[0], wanted.expected[2]]


def test_bad_requests_are_refused_by_name(target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = case(0.7)[:1]
    (good,) = wanted.requests
    params = good.params
    bad = {
        "prompt": [
            replace(good, prompt=()),
            replace(good, prompt=(target.vocab_size,)),
            replace(good, prompt=(-1,)),
            replace(good, prompt=(1,) * target.max_length),
        ],
        "resume_tokens": [replace(good, resume_tokens=(1,) * params.max_tokens)],
        "stop": [replace(good, params=replace(params, stop=("x",)))],
        "request_id": [good],
    }
    with serving(target) as replica:
        with busy(replica, target, monkeypatch, good) as stream:
            for param, requests in bad.items():
                for request in requests:
                    with pytest.raises(InvalidRequest) as refused:
                        replica.submit(request, print)
                    assert refused.value.param == param
        assert outputs([stream]) == wanted.expected
        assert outputs(submit(replica, [good])) == wanted.expected  # the id is free again


def test_stop_strings_end_streams(
    target: ModelRunner, draft: ModelRunner, tokenizer: PreTrainedTokenizerFast, case: MakeCase
) -> None:
    wanted = case(0.0)
    request, tokens = wanted.requests[0], wanted.expected[0]
    stop = str(tokenizer.decode(tokens[10:12]))
    stopping = replace(request, params=replace(request.params, stop=(stop,)))
    (alone,) = decode(target, [stopping], tokenizer=tokenizer)
    with drafting(ModelDrafter(draft)) as drafts, serving(target, tokenizer=tokenizer) as each, memory(each, drafts):
        (stream,) = submit(each, [stopping])
        assert stream.end().finish_reason == "stop"
        assert stream.tokens == alone.tokens == tokens[: len(alone.tokens)]
        assert len(stream.tokens) <= 12


def test_processed_streams_equal_plain_decoding(
    target: ModelRunner, draft: ModelRunner, tokenizer: PreTrainedTokenizerFast, case: MakeCase
) -> None:
    """Every processor crosses the link; log probabilities come with their tokens."""
    shapes = [
        SamplingParams(1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2, logprobs=2),
        SamplingParams(0.0, logit_bias=((199, -3.0),), bad_words=((11,), (14, 283)), min_tokens=8, logprobs=0),
        SamplingParams(0.8, top_p=0.9, grammar=Grammar("regex", "[a-z_]{2,9}[.][a-z]{3,12}")),
    ]
    requests = [
        replace(request, params=replace(shape, seed=seed, max_tokens=TOKENS))
        for seed, (request, shape) in enumerate(zip(case().requests, shapes, strict=False))
    ]
    alone = decode(target, requests, tokenizer=tokenizer)
    drafter = ModelDrafter(draft, tokenizer=tokenizer)
    with drafting(drafter) as drafts, serving(target, tokenizer=tokenizer) as replica, over_grpc(replica, drafts):

        def guessed() -> bool:
            streams = submit(replica, requests)
            assert [stream.end().finish_reason for stream in streams] == [each.finish_reason for each in alone]
            assert [stream.tokens for stream in streams] == [each.tokens for each in alone]
            assert [stream.logprobs for stream in streams] == [each.logprobs for each in alone]
            return any(stream.guessed for stream in streams)

        until(guessed, "a draft token is accepted")


def test_a_request_that_allows_no_token_ends_with_an_error(
    target: ModelRunner, draft: ModelRunner, tokenizer: PreTrainedTokenizerFast, case: MakeCase
) -> None:
    wanted = case()[:2]
    bad = tuple((tokenizer(word)["input_ids"][0],) for word in ("y", "ye", "yes"))
    params = SamplingParams(grammar=Grammar("regex", "yes"), bad_words=bad)
    with drafting(ModelDrafter(draft)) as drafts, serving(target, tokenizer=tokenizer) as each, memory(each, drafts):
        streams = submit(each, wanted.requests)
        (stuck,) = submit(each, [GenerationRequest("stuck", (5, 6), params)])
        assert (stuck.end().finish_reason, stuck.tokens) == ("error", [])
        assert outputs(streams) == wanted.expected
