"""Continuous batching: who shares a page, waits, gives way or is overtaken, the tokens are those of decoding alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cluster.batch import OVERTAKING, Batch
from cluster.intake import Intake, Running, Submitted
from engine.attention import Layout, SequenceRows
from engine.decode import decode
from engine.drafters.model import ModelDrafter
from engine.elastic import ElasticSequence
from engine.kv import KVPool
from engine.runner import ModelRunner
from engine.step import MAX_WINDOW
from engine.types import GenerationRequest, SamplingParams
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.replicas.helpers import Stream, drafting, memory, outputs, serving, submit

PAGE = 32


@pytest.fixture(scope="module")
def texts() -> list[exact.Tokens]:
    """Held-out prompts of 66 to 92 tokens."""
    return exact.load_prompts(24)


def alone(runner: ModelRunner, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """What plain decoding gives for them, nothing shared."""
    return [decode(runner, [request])[0].tokens for request in requests]


def passes(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Will hold the row counts of the sequences in every forward pass from now on."""
    seen: list[list[int]] = []
    layout = runner._layout

    def count(batch: Sequence[SequenceRows]) -> Layout:
        seen.append([len(rows.tokens) for rows in batch])
        return layout(batch)

    monkeypatch.setattr(runner, "_layout", count)
    return seen


def test_pages_that_nothing_was_written_to_are_not_looked_through(
    target: ModelRunner, texts: list[exact.Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that may become long and ends soon gives most of its pages back as they were."""
    looked: list[int] = []
    is_finite = target.pool._is_finite

    def look(page: int) -> bool:
        looked.append(page)
        return is_finite(page)

    monkeypatch.setattr(target.pool, "_is_finite", look)
    sequence = ElasticSequence(GenerationRequest("", texts[0], SamplingParams(max_tokens=500)), target, None)
    sequence.enter()
    pages = len(sequence.lease.pages)
    sequence.trim()
    assert not looked
    sequence.reserve()
    sequence.leave()
    assert 0 < len(looked) <= -(-(len(texts[0]) + MAX_WINDOW + 1) // PAGE) < pages


# --- shared prefixes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_that_share_a_prefix_equal_streams_that_do_not(
    target: ModelRunner, draft: ModelRunner, texts: list[exact.Tokens], temperature: float
) -> None:
    prompts = [texts[0][:70] + text[:9] for text in texts[1:5]]
    prompts += [texts[0][:64]] * 2  # wholly known: its last page is copied
    requests = exact.make_requests(prompts, temperature, 16)
    expected = alone(target, requests)
    with drafting(ModelDrafter(draft)) as drafts, serving(target) as replica, memory(replica, drafts):
        assert outputs(submit(replica, requests[:1])) == expected[:1]
        before = replica.stats().shared
        assert outputs(submit(replica, requests[1:])) == expected[1:]
        assert replica.stats().shared - before == 3 * 64 + 2 * 63
        assert replica.wait_idle(PATIENCE_S)
        assert target.pool.used_pages == 0


def test_a_dialogue_goes_on_from_the_pages_of_its_last_turn(target: ModelRunner, texts: list[exact.Tokens]) -> None:
    (first,) = exact.make_requests([texts[6]], 1.0, 24)
    with serving(target) as replica:
        (answer,) = outputs(submit(replica, [first]))
        history = (*first.prompt, *answer, *texts[7][:5])
        second = replace(first, request_id="second", prompt=history)
        expected = alone(target, [second])
        before = replica.stats().shared
        assert outputs(submit(replica, [second])) == expected
        computed = len(first.prompt) + len(answer) - 1  # the last token of an answer is never run
        assert replica.stats().shared - before == computed // PAGE * PAGE


def test_tenants_with_different_salts_share_nothing(target: ModelRunner, texts: list[exact.Tokens]) -> None:
    (request,) = exact.make_requests([texts[8]], 0.0, 4)
    with serving(target) as replica:
        for index, salt in enumerate((b"a", b"b", b"a")):
            submit(replica, [replace(request, request_id=str(index), salt=salt)])[0].end()
            assert replica.stats().shared == (64 if index == 2 else 0)


def test_samples_of_one_prompt_that_come_at_once_compute_it_once(
    target: ModelRunner, texts: list[exact.Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = texts[9] + texts[10]
    params = SamplingParams(1.0, max_tokens=6, ignore_eos=True)
    requests = [GenerationRequest(str(seed), prompt, replace(params, seed=seed)) for seed in range(6)]
    expected = alone(target, requests)
    seen = passes(target, monkeypatch)
    with serving(target) as replica:
        assert outputs(submit(replica, requests)) == expected
    assert len({tuple(tokens) for tokens in expected}) > 1
    rows = sum(map(sum, seen))
    assert rows <= len(prompt) + 5 * (len(prompt) % PAGE) + 6 * 5


def test_a_draft_that_opens_a_prefix_again_does_not_compute_it_again(
    draft: ModelRunner, texts: list[exact.Tokens]
) -> None:
    drafter = ModelDrafter(draft)
    tokens = list(texts[11][:66])
    trees, known = [], []
    for session in (1, 2):
        drafter.open(session, tokens, SamplingParams())
        known.append(drafter._sessions[session].computed)
        drafter.grow()
        drafter.grow()
        trees.append(drafter.tree(session))
        drafter.check()
        drafter.close(session)
    assert known == [0, 64]
    assert trees[1].size > trees[0].size  # it was a step ahead


# --- preemption


@pytest.fixture(scope="module")
def _tight() -> ModelRunner:
    """Seven pages: two of the crowd get in, one can stay."""
    return ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=7 * PAGE)


@pytest.fixture
def tight(_tight: ModelRunner) -> Iterator[ModelRunner]:
    yield _tight
    _tight.pool.check()
    assert _tight.pool.used_pages == 0


def crowd(texts: Sequence[exact.Tokens], temperature: float) -> list[GenerationRequest]:
    """They get in with three pages each and soon need a fourth."""
    prompts = [text[:length] for text, length in zip(texts[12:], [28, 30, 17, 31, 29, 24], strict=False)]
    return exact.make_requests(prompts, temperature, 48)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "alone"])
def test_preempted_streams_go_on_as_if_nothing_had_happened(
    target: ModelRunner,
    tight: ModelRunner,
    draft: ModelRunner,
    texts: list[exact.Tokens],
    temperature: float,
    with_draft: bool,
) -> None:
    requests = crowd(texts, temperature)
    expected = [generation.tokens for generation in decode(target, requests)]
    with drafting(ModelDrafter(draft)) as drafts, serving(tight) as replica:
        if with_draft:
            with memory(replica, drafts):
                assert outputs(submit(replica, requests)) == expected
        else:
            assert outputs(submit(replica, requests)) == expected
        assert replica.wait_idle(PATIENCE_S)
        stats = replica.stats()
        assert stats.preempted >= 3
        assert stats.requests == len(requests)
        assert stats.tokens == sum(map(len, expected))
        until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")


def test_streams_survive_any_number_of_preemptions_anywhere(
    target: ModelRunner, draft: ModelRunner, texts: list[exact.Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chance lets somebody give way at most steps, while reading the prompt as well as later."""
    prompts = [text[:length] for text, length in zip(texts[12:], [28, 65, 1, 80, 33, 64], strict=False)]
    requests = exact.make_requests(prompts, 1.0, 48)
    expected = [generation.tokens for generation in decode(target, requests)]
    make_room, random = Batch.make_room, Random(3)

    def hostile(batch: Batch) -> list[Running]:
        preempted = make_room(batch)
        if len(batch.running) > 1 and random.random() < 0.6:
            preempted.append(batch._preempt())
        return preempted

    monkeypatch.setattr(Batch, "make_room", hostile)
    with drafting(ModelDrafter(draft)) as drafts, serving(target, prefill_tokens=40) as replica:
        with memory(replica, drafts):
            streams = submit(replica, requests)
            assert outputs(streams) == expected
        assert replica.stats().preempted >= 10
        assert replica.stats().shared > 0
        assert not any(stream.end().known for stream in streams), "their own pages are not what others had computed"
        assert replica.stats().tokens == sum(map(len, expected))


def test_a_preempted_stream_keeps_its_stop_strings_and_hands_out_what_it_has(
    target: ModelRunner, tight: ModelRunner, tokenizer: PreTrainedTokenizerFast, texts: list[exact.Tokens]
) -> None:
    requests = crowd(texts, 0.0)
    expected = [generation.tokens for generation in decode(target, requests)]
    ends = [str(tokenizer.decode(tokens[18:20])) for tokens in expected]
    requests = [
        replace(request, params=replace(request.params, stop=(end,)))
        for request, end in zip(requests, ends, strict=True)
    ]
    stopped = decode(target, requests, tokenizer=tokenizer)
    with serving(tight, tokenizer=tokenizer, flush_s=PATIENCE_S) as replica:
        streams = submit(replica, requests)
        assert [stream.end().finish_reason for stream in streams] == [g.finish_reason for g in stopped]
        assert [stream.tokens for stream in streams] == [g.tokens for g in stopped]
        assert replica.stats().preempted > 0


def test_requests_cancelled_while_they_are_preempted_leave_nothing(
    tight: ModelRunner, target: ModelRunner, texts: list[exact.Tokens]
) -> None:
    requests = crowd(texts, 1.0)
    expected = [generation.tokens for generation in decode(target, requests)]
    with serving(tight) as replica:
        streams: list[Stream] = []

        def cancel_the_waiting(stream: Stream) -> None:
            """With the oldest one's 20th token: by then somebody has given way."""
            if len(stream.tokens) == 20:
                for other in streams[1:]:
                    replica.cancel(other.request.request_id)

        streams.extend(Stream(request, cancel_the_waiting) for request in requests)
        for stream in streams:
            replica.submit(stream.request, stream.sink)
        assert streams[0].end().finish_reason == "length"
        for stream, tokens in zip(streams, expected, strict=True):
            stream.end()
            assert stream.tokens == tokens[: len(stream.tokens)]
        assert replica.stats().preempted > 0
        assert replica.wait_idle(PATIENCE_S)
        replica.check()


def test_audits_pass_between_any_two_steps_under_pressure(tight: ModelRunner, texts: list[exact.Tokens]) -> None:
    with serving(tight) as replica:
        streams = submit(replica, crowd(texts, 1.0)[:3])
        while any(stream.last is None for stream in streams):
            replica.check()  # also that sessions have their sequences' tokens
        assert replica.stats().preempted > 0


# --- admission and shares of a step: the rules alone, nothing is computed

Books = Callable[..., tuple[Batch, Intake]]


@pytest.fixture
def books(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Books:
    """Makes a batch over an own pool of so many pages."""

    def make(pages: int, max_batch: int = 64, prefill_tokens: int = 128) -> tuple[Batch, Intake]:
        pool = KVPool(1, 1, 1, pages * PAGE, torch.float32, page_size=PAGE)
        monkeypatch.setattr(target, "pool", pool)
        intake = Intake()
        sequence = lambda request: ElasticSequence(request, target, None)  # noqa: E731
        return Batch(pool, intake, sequence, max_batch, prefill_tokens), intake

    return make


def queue(intake: Intake, name: str, tokens: int, max_tokens: int = 1, token: int = 1) -> None:
    request = GenerationRequest(name, (token,) * tokens, SamplingParams(max_tokens=max_tokens))
    intake.submit(Submitted(request, lambda chunk: None))


def names(batch: Batch, intake: Intake) -> str:
    """Of those that run, and of those that wait."""
    waiting = " ".join(submitted.request.request_id for submitted in intake.in_line())
    return f"{' '.join(batch.running)} | {waiting}"


def enter(batch: Batch) -> list[str]:
    return [running.submitted.request.request_id for running in batch.admit()]


def end(batch: Batch, name: str) -> None:
    assert batch.leave(batch.running[name])
    batch.check()


def test_first_come_is_first_served(books: Books) -> None:
    batch, intake = books(20, max_batch=3)
    for name in "abcd":
        queue(intake, name, 10)
    assert enter(batch) == ["a", "b", "c"]
    end(batch, "b")
    assert enter(batch) == ["d"]
    batch.check()


def test_a_big_request_lets_a_few_small_ones_pass_and_no_more(books: Books) -> None:
    batch, intake = books(10)
    queue(intake, "first", 10)
    queue(intake, "big", 200)  # nine pages
    for index in range(OVERTAKING + 2):
        queue(intake, str(index), 10)
    assert enter(batch) == ["first", "0"]
    for index in range(1, OVERTAKING):
        end(batch, str(index - 1))
        assert enter(batch) == [str(index)]
    end(batch, str(OVERTAKING - 1))
    assert enter(batch) == []  # though another would fit
    end(batch, "first")
    assert enter(batch) == ["big"]
    end(batch, "big")
    assert enter(batch) == [str(OVERTAKING), str(OVERTAKING + 1)]


def test_room_taken_in_advance_is_given_back_to_those_who_need_it(books: Books) -> None:
    batch, intake = books(12)
    queue(intake, "generous", 10, max_tokens=100)
    assert enter(batch) == ["generous"]
    lease = batch.running["generous"].sequence.lease
    assert lease.capacity >= 10 + 100 + MAX_WINDOW + 1
    queue(intake, "big", 180)  # eight pages
    assert enter(batch) == ["big"]
    assert lease.capacity == 3 * PAGE
    batch.check()


def test_the_last_admitted_gives_way_first_and_comes_back_first(books: Books) -> None:
    batch, intake = books(12)
    for token, name in enumerate("abc"):
        queue(intake, name, 10, max_tokens=300, token=token)
    queue(intake, "d", 10)
    assert enter(batch) == ["a", "b", "c"]
    oldest = batch.running["a"].sequence
    oldest.tokens += [1] * 120
    assert [running.submitted.request.request_id for running in batch.make_room()] == ["c"]
    assert names(batch, intake) == "a b | c d"
    oldest.tokens += [1] * 120
    assert [running.submitted.request.request_id for running in batch.make_room()] == ["b"]
    assert names(batch, intake) == "a | b c d"
    batch.check()
    end(batch, "a")
    assert enter(batch) == ["b", "c", "d"]


def steps(batch: Batch, count: int) -> list[dict[str, int]]:
    """The shares of so many steps, after each of which everybody has computed theirs."""
    shares = []
    for _ in range(count):
        shares.append(batch.prefills())
        for name, tokens in shares[-1].items():
            sequence = batch.running[name].sequence
            sequence.advance(min(sequence.computed + tokens, len(sequence.tokens) - 1))
    return shares


def test_the_shortest_prefixes_come_first_and_the_oldest_goes_on(books: Books) -> None:
    batch, intake = books(256, prefill_tokens=100)
    for number in range(20):
        queue(intake, f"decodes {number}", 1, token=8)
    for token, (name, tokens) in enumerate({"long": 500, "longer": 600, "short": 20, "mean": 70}.items()):
        queue(intake, name, tokens, token=token)
    enter(batch)
    first, second, third = steps(batch, 3)
    assert first == {"short": 20, "mean": 16, "long": 64}
    assert second == {"mean": 36, "long": 64}
    assert third == {"mean": 18, "longer": 18, "long": 64}
    queue(intake, "new", 10, token=9)
    assert enter(batch) == ["new"]
    assert steps(batch, 1) == [{"new": 10, "longer": 26, "long": 64}]
    total = Counter[str]()
    for shares in steps(batch, 10):
        assert sum(shares.values()) <= 100
        total.update(shares)
    assert not any(running.sequence.prefilling for running in batch.running.values())


def test_what_others_leave_is_the_oldest_ones(books: Books) -> None:
    batch, intake = books(128, prefill_tokens=200)
    for number in range(20):
        queue(intake, f"decodes {number}", 1, token=8)
    queue(intake, "long", 500, token=0)
    queue(intake, "short", 20, token=1)
    enter(batch)
    assert steps(batch, 1) == [{"short": 20, "long": 180}]


def test_where_many_wait_beside_those_that_decode_the_bound_is_higher(books: Books) -> None:
    batch, intake = books(64, prefill_tokens=100)
    for token in range(8):
        queue(intake, f"long {token}", 90, token=token)
    enter(batch)
    assert sum(steps(batch, 1)[0].values()) == 400
    for number in range(12):
        queue(intake, f"decodes {number}", 1, token=8)
    enter(batch)
    waiting = sum(running.sequence.prefilling for running in batch.running.values())
    decoding = len(batch.running) - waiting
    assert 1 < 4 * waiting / decoding < 4
    assert sum(steps(batch, 1)[0].values()) == int(100 * 4 * waiting / decoding)


def test_a_page_that_another_computes_in_this_step_is_waited_for(books: Books) -> None:
    batch, intake = books(64)
    for name in "abc":
        queue(intake, name, 150)
    enter(batch)
    assert steps(batch, 3) == [{"a": 150}, {"b": 22, "c": 22}, {}]
    pages = [running.sequence.lease.pages[:4] for running in batch.running.values()]
    assert pages[0] == pages[1] == pages[2]
    batch.check()


# --- everything at once


def test_decoding_streams_go_on_while_a_long_prompt_is_read(
    target: ModelRunner, texts: list[exact.Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = exact.make_requests([texts[17][:5], sum(texts[18:22], ())], 0.7, 12)
    expected = alone(target, [early, late])
    seen = passes(target, monkeypatch)
    with serving(target, prefill_tokens=32) as replica:
        streams = [Stream(early), Stream(late)]
        streams[0] = Stream(early, lambda stream: late_comes(stream))

        def late_comes(stream: Stream) -> None:
            if len(stream.tokens) == 2:
                replica.submit(late, streams[1].sink)

        replica.submit(early, streams[0].sink)
        assert outputs(streams) == expected
    assert all(sum(rows) <= 32 + 2 for rows in seen)
    assert sum(len(rows) == 2 for rows in seen) >= 9


def test_64_sequences_of_mixed_lengths_equal_one_at_a_time(
    texts: list[exact.Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=12 * 1024)
    prompts = [texts[i % 24][: 1 + 7 * i % 67] for i in range(64)]
    requests = [
        replace(request, params=replace(request.params, max_tokens=2 + i % 3))
        for i, request in enumerate(exact.make_requests(prompts, 0.8, 1))
    ]
    expected = alone(runner, requests)
    seen = passes(runner, monkeypatch)
    with serving(runner, prefill_tokens=4096) as replica:
        assert outputs(submit(replica, requests)) == expected
    assert max(map(len, seen)) > 48
    assert runner.pool.used_pages == 0
