"""vLLM as the engine of a target replica, with our draft: one engine for all tests of this file."""

import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from engine.runner import ModelRunner
from engine.types import GenerationRequest, Grammar, InvalidRequest, SamplingParams, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S
from tests.vllm_targets import ENGINE_ARGS, STREAMS, Pair, drafted, run, tokens

TOKENS = 32

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this environment: make test-vllm"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM's own, on import
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with drafted() as made:
        yield made


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two that share a model, each with a core, where there are as many."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)  # the other engine's
    with drafted(tensor_parallel_size=2, cores=tuple(sorted(os.sched_getaffinity(0))[:2])) as made:
        yield made


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return exact.make_requests(exact.load_prompts(STREAMS), 0.0, TOKENS)


def named(request: GenerationRequest, name: str, **params: object) -> GenerationRequest:
    return replace(request, request_id=name, params=replace(request.params, **params))  # type: ignore[arg-type]


def test_streams_are_those_of_our_own_engine_with_drafts_that_come_and_go(
    pair: Pair, target: ModelRunner, requests: list[GenerationRequest]
) -> None:
    plain = exact.run(target, requests, batch=STREAMS)
    before = pair.target.stats()
    for number, addresses in enumerate([(pair.address,), (), (pair.address,)]):
        pair.follow(*addresses)
        asked = [replace(each, request_id=f"{number}-{each.request_id}") for each in requests]
        said = run(pair.target, asked)
        # In fp32 a tie could part them; none does here.
        assert [tokens(chunks) for chunks in said] == [generation.tokens for generation in plain]
        assert {chunks[-1].finish_reason for chunks in said} == {"length"}
        guessed = sum(chunk.origins.count("draft") for chunks in said for chunk in chunks)
        assert bool(guessed) == bool(addresses)
    stats = pair.target.stats()
    assert stats.tokens - before.tokens == 3 * STREAMS * TOKENS
    assert stats.requests - before.requests == 3 * STREAMS
    assert stats.accepted > before.accepted
    assert sum(pair.target.accepted_at()) == stats.accepted
    assert stats.link["grown"] > 0
    assert stats.verified >= stats.accepted


def test_a_text_that_fills_the_context_costs_no_other_its_drafts(
    pair: Pair, target: ModelRunner, requests: list[GenerationRequest]
) -> None:
    context = ENGINE_ARGS["max_model_len"]
    known = tuple(token for prompt in exact.load_prompts(32) for token in prompt)[: context - 24]
    made = [named(replace(requests[0], prompt=known), "full", max_tokens=24), named(requests[1], "beside")]
    plain = [generation.tokens for generation in exact.run(target, made, batch=2)]
    pair.follow()
    before = pair.target.stats().verified
    assert [tokens(chunks) for chunks in run(pair.target, made)] == plain
    assert pair.target.stats().verified == before  # where vLLM doesn't ask for drafts, it verifies zeros
    pair.follow(pair.address)
    said = run(pair.target, [replace(each, request_id=f"drafted-{each.request_id}") for each in made])
    assert [tokens(chunks) for chunks in said] == plain
    assert any("draft" in chunk.origins for chunk in said[1])


def test_log_probabilities_are_those_of_our_own_engine(
    pair: Pair, target: ModelRunner, requests: list[GenerationRequest]
) -> None:
    request = named(requests[0], "logprobs", logprobs=2)
    (plain,) = exact.run(target, [request], batch=1)
    said = [entry for chunk in run(pair.target, [request])[0] for entry in chunk.logprobs]
    assert [entry.chosen for entry in said] == pytest.approx([entry.chosen for entry in plain.logprobs], abs=1e-3)
    assert [[token for token, _ in entry.top] for entry in said] == [
        [token for token, _ in entry.top] for entry in plain.logprobs
    ]


def test_an_output_goes_on_where_another_replica_left_it(pair: Pair, requests: list[GenerationRequest]) -> None:
    whole = tokens(run(pair.target, [named(requests[0], "whole")])[0])
    rest = replace(named(requests[0], "rest"), resume_tokens=tuple(whole[:11]))
    assert tokens(run(pair.target, [rest])[0]) == whole[11:]


def test_what_was_known_of_a_prompt_is_told(pair: Pair, requests: list[GenerationRequest]) -> None:
    prompt = tuple(token for text in exact.load_prompts(8) for token in reversed(text))[:200]  # of no other test
    known = [
        run(pair.target, [named(replace(requests[0], prompt=prompt), name)])[0][-1].known for name in ("new", "old")
    ]
    assert known[0] < 16 <= 128 <= known[1] <= len(prompt)


def test_a_limit_beyond_what_vllm_can_be_told_is_none(pair: Pair, requests: list[GenerationRequest]) -> None:
    request = named(requests[0], "all", temperature=1.0, top_k=10**30)
    assert run(pair.target, [request])[0][-1].finish_reason in ("stop", "length")
    pair.target.check()


def test_a_cancelled_request_ends_and_its_id_is_free_again(pair: Pair, requests: list[GenerationRequest]) -> None:
    request = named(requests[0], "cancelled", max_tokens=300)
    got: list[TokenChunk] = []
    ended = threading.Event()

    def sink(chunk: TokenChunk) -> None:
        got.append(chunk)
        if len(got) == 3:
            with pytest.raises(InvalidRequest, match="running"):
                pair.target.submit(request, sink)
            pair.target.cancel("cancelled")
        if chunk.finish_reason is not None:
            ended.set()

    pair.target.submit(request, sink)
    assert ended.wait(PATIENCE_S)
    assert got[-1].finish_reason == "cancelled"
    assert len(tokens(got)) < 300
    assert run(pair.target, [named(request, "cancelled", max_tokens=2)])[0][-1].finish_reason == "length"
    ended.clear()
    pair.target.submit(named(request, "at once"), sink)
    pair.target.cancel("at once")  # before it has begun
    assert ended.wait(PATIENCE_S)
    assert (got[-1].request_id, got[-1].finish_reason) == ("at once", "cancelled")


def test_what_vllm_samples_is_what_was_asked_for(
    pair: Pair, requests: list[GenerationRequest], tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = tokens(run(pair.target, [named(requests[0], "free")])[0])
    asked: dict[str, dict[str, object]] = {
        "banned": {"bad_words": ((plain[0],), (plain[4], plain[5]))},
        "long": {"ignore_eos": False, "stop_token_ids": (plain[3],), "min_tokens": 6},
        "short": {"ignore_eos": False, "stop_token_ids": (plain[3],)},
        "regex": {"ignore_eos": False, "grammar": Grammar("regex", "[ab]{5}")},
    }
    made = [named(requests[0], name, **params) for name, params in asked.items()]
    banned, long, short, regex = (tokens(chunks) for chunks in run(pair.target, made))
    assert plain[0] != banned[0]
    assert plain[4:6] not in [banned[at : at + 2] for at in range(len(banned))]
    assert len(long) > len(short) == plain.index(plain[3]) + 1
    assert re.fullmatch("[ab]{5}", str(tokenizer.decode(regex, skip_special_tokens=True)))


@pytest.mark.parametrize(
    ("params", "resumed", "param"),
    [
        (SamplingParams(temperature=1.0, min_p=0.1), (), "min_p"),
        (SamplingParams(logit_bias=((5, 1.0),)), (), "logit_bias"),
        (SamplingParams(max_tokens=4000), (), "prompt"),
        (SamplingParams(grammar=Grammar("json_schema", "{")), (), "grammar"),
        (SamplingParams(grammar=Grammar("json_object")), (7,), "grammar"),
        (SamplingParams(frequency_penalty=1.0), (7,), "frequency_penalty"),
        (SamplingParams(bad_words=((7, 8),)), (7,), "bad_words"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    pair: Pair, params: SamplingParams, resumed: tuple[int, ...], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pair.target.submit(GenerationRequest("refused", (1, 2), params, resumed), lambda chunk: None)
    assert refused.value.param == param


def test_of_ranks_that_share_a_model_the_first_is_drafted_for(
    ranks: Pair, target: ModelRunner, requests: list[GenerationRequest]
) -> None:
    plain = exact.run(target, requests, batch=STREAMS)
    assert [tokens(chunks) for chunks in run(ranks.target, requests)] == [generation.tokens for generation in plain]
    assert ranks.draft.stats().streams == 1
    assert ranks.target.stats().accepted > 0
