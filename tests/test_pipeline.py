"""A target and its drafts in one process: whatever the link or the draft does, the tokens are those of plain decoding."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cluster import draft as draft_module
from cluster import draft_state, intake
from cluster import target as target_module
from cluster.draft import DraftReplica
from cluster.faulty_link import FaultyLink
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.intake import Closed, Overloaded
from cluster.link import Link, memory_link
from cluster.linked import LinkedDrafts
from cluster.target import TargetReplica
from engine.attention import SequenceRows
from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.decode import decode
from engine.drafters import Drafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.prefix import HandleChain
from engine.runner import ModelRunner
from engine.types import (
    Commit,
    Down,
    GenerationRequest,
    Grammar,
    Growth,
    InvalidRequest,
    NeedPrefix,
    Open,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Up,
)
from engine.windows import FixedChain, FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, growth, until

CANCELLED = int(os.environ.get("PACELINE_CANCELLED_REQUESTS", "60"))
TOKENS = 24
Ends = tuple[Link[Down, Up], Link[Up, Down]]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("paceline"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that pause go on for what comes in, or never."""
    monkeypatch.setattr(target_module, "_RENEW_EVERY_S", 10 * PATIENCE_S)
    monkeypatch.setattr(draft_module, "_EXPIRE_EVERY_S", 10 * PATIENCE_S)


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


@pytest.fixture(scope="module")
def _plain() -> dict[tuple[float, int], list[list[int]]]:
    return {}


@dataclass
class Case:
    """Requests and what plain decoding gives for them."""

    requests: list[GenerationRequest]
    expected: list[list[int]]

    def __getitem__(self, part: slice) -> "Case":
        return Case(self.requests[part], self.expected[part])


MakeCase = Callable[..., Case]


@pytest.fixture
def case(target: ModelRunner, _plain: dict[tuple[float, int], list[list[int]]]) -> MakeCase:
    lengths = [17, 1, 2, 65, 24, 9, 33, 12]
    prompts = [prompt[:length] for prompt, length in zip(exact.load_prompts(len(lengths)), lengths, strict=True)]

    def make(temperature: float = 0.7, tokens: int = TOKENS) -> Case:
        requests = exact.make_requests(prompts, temperature, tokens)
        key = (temperature, tokens)
        if key not in _plain:
            _plain[key] = [generation.tokens for generation in decode(target, requests)]
        return Case(requests, _plain[key])

    return make


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
    draft.add_link(FaultyLink(far, 2, drop=0.2, duplicate=0.2, delay=0.3, nonsense=0.1) if ends == 2 else far)
    target.add_link(FaultyLink(near, 1, drop=0.2, duplicate=0.2, delay=0.3, nonsense=0.1))
    yield


LINKS: dict[str, Callable[[TargetReplica, DraftReplica], object]] = {
    "memory": memory,
    "grpc": over_grpc,
    "faulty": lambda target, draft: faulty(target, draft, 1),
    "faulty-both": lambda target, draft: faulty(target, draft, 2),
}
WINDOWS: dict[str, Callable[[], Window]] = {
    "chain": lambda: FixedChain(5),
    "tree": lambda: FixedTree(12),
    "goodput": exact.goodput,
}


@pytest.mark.parametrize(
    ("temperature", "window", "batch", "link"),
    [  # every pair of values once
        (0.0, "chain", 1, "memory"),
        (0.0, "tree", 3, "faulty"),
        (0.0, "goodput", 8, "grpc"),
        (0.0, "goodput", 3, "faulty-both"),
        (0.7, "chain", 3, "grpc"),
        (0.7, "tree", 8, "memory"),
        (0.7, "goodput", 1, "faulty"),
        (0.7, "tree", 1, "faulty-both"),
        (1.0, "chain", 8, "faulty"),
        (1.0, "tree", 1, "grpc"),
        (1.0, "goodput", 3, "memory"),
        (1.0, "chain", 8, "faulty-both"),
    ],
)
def test_streams_equal_plain_decoding(
    target: ModelRunner,
    draft: ModelRunner,
    case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    window: str,
    batch: int,
    link: str,
) -> None:
    wanted = case(temperature)[: max(batch, 2)]
    steps = Steps(target, monkeypatch)
    lookup = 8 if batch == 8 else 0
    replicas = serving(target, WINDOWS[window](), max_batch=batch, lookup=lookup)
    with drafting(ModelDrafter(draft)) as drafts, replicas as replica:
        with LINKS[link](replica, drafts):  # type: ignore[attr-defined]
            for count in (4, 8, 12):  # the draft gets a chance, however busy the machine is
                steps.at(count, lambda: drafts.wait_idle(PATIENCE_S))
            streams = submit(replica, wanted.requests)
            assert outputs(streams) == wanted.expected
            assert replica.wait_idle(PATIENCE_S)
            if "faulty" not in link:
                until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")
        stats = replica.stats()
        assert stats.tokens == sum(map(len, wanted.expected))
        assert stats.accepted == sum(stream.guessed for stream in streams) > 0
        assert 0 < stats.accepted <= stats.tried <= stats.verified
        assert drafts.wait_idle(PATIENCE_S)


def test_a_target_without_a_draft_decodes_alone(target: ModelRunner, case: MakeCase) -> None:
    wanted = case()[:3]
    with serving(target) as replica:
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        assert replica.stats().verified == 0


def test_a_step_that_ends_a_prompt_is_no_decoding(target: ModelRunner, case: MakeCase) -> None:
    part = case(1.0)[:4]
    requests = [replace(request, salt=b"nobody else's") for request in part.requests]  # no prefix is known
    seen: list[int] = []  # rows of the steps that say what rows cost
    with serving(target, max_batch=1, on_step=lambda rows, milliseconds: seen.append(rows)) as alone:
        assert outputs(submit(alone, requests)) == part.expected
        assert alone.wait_idle(PATIENCE_S)
        stats = alone.stats()
    total = sum(map(len, part.expected))
    assert (stats.tokens, stats.decoded) == (total, total - sum(len(request.prompt) > 1 for request in requests))
    assert seen == [1] * stats.decoded
    assert stats.steps == stats.sequence_steps == len(seen)
    assert stats.prefill_s > 0
    assert 0 < stats.forward_s <= stats.active_s


def test_drafts_read_a_prompt_while_the_target_does(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case()[:1]
    near, far = memory_link()
    told: list[Down] = []
    with serving(target) as replica:
        replica.add_link(near)
        Steps(target, monkeypatch).at(1, lambda: told.extend(far.receive()))  # as the first pass begins
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
    assert [type(message) for message in told] == [Open]


def test_audits_pass_between_any_two_steps(target: ModelRunner, draft: ModelRunner, case: MakeCase) -> None:
    wanted = case()[:4]
    with drafting(ModelDrafter(draft)) as drafts, serving(target) as replica, memory(replica, drafts):
        streams = submit(replica, wanted.requests)
        while any(stream.last is None for stream in streams):
            replica.check()
            drafts.check()
        assert outputs(streams) == wanted.expected


def test_a_request_goes_on_where_its_client_left_off(target: ModelRunner, draft: ModelRunner, case: MakeCase) -> None:
    wanted = case(1.0)
    resumed = [
        replace(request, resume_tokens=tuple(tokens[: 3 * index + 1]))
        for index, (request, tokens) in enumerate(zip(wanted.requests, wanted.expected, strict=True))
    ]
    with drafting(ModelDrafter(draft)) as drafts, serving(target) as replica, memory(replica, drafts):
        rest = outputs(submit(replica, resumed))
    assert [[*request.resume_tokens, *tokens] for request, tokens in zip(resumed, rest, strict=True)] == wanted.expected


def test_several_targets_share_several_drafts(target: ModelRunner, draft: ModelRunner, case: MakeCase) -> None:
    wanted = case(1.0)
    second = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=2048)
    with ExitStack() as stack:
        targets = [stack.enter_context(serving(runner, replica=i)) for i, runner in enumerate([target, second])]
        drafters: list[Drafter] = [ModelDrafter(draft), NgramDrafter()]
        drafts = [stack.enter_context(drafting(drafter)) for drafter in drafters]
        for each in targets:
            for helper in drafts:
                stack.enter_context(memory(each, helper))
        streams = [submit(each, wanted.requests) for each in targets]
        assert [outputs(part) for part in streams] == [wanted.expected] * 2
        for each in targets:
            assert each.wait_idle(PATIENCE_S)
            assert each.stats().drafts == 2
            assert each.stats().link["attached"] == len(wanted.requests)
        for helper in drafts:
            until(lambda helper=helper: helper.stats().sessions == 0, "the draft forgets its sessions")  # type: ignore[misc]
            assert helper.stats().streams == 2
            assert helper.stats().steps > 0


# --- cancellation


def cancel_at(target: TargetReplica, after: int) -> Callable[[Stream], None]:
    """Cancels a stream when its client has this many tokens."""

    def look(stream: Stream) -> None:
        if len(stream.tokens) >= after and stream.last is None:
            target.cancel(stream.request.request_id)

    return look


def test_requests_cancelled_at_random_points_leave_nothing(
    target: ModelRunner, draft: ModelRunner, case: MakeCase
) -> None:
    wanted = case(1.0)
    random = Random(5)
    with drafting(ModelDrafter(draft)) as drafts, serving(target, max_batch=8) as replica, memory(replica, drafts):
        streams, rows = [], []
        for index in range(CANCELLED):
            row = index % len(wanted.requests)
            after = random.randrange(-4, TOKENS + 2)  # below 0: at once; beyond the length: not at all
            request = replace(wanted.requests[row], request_id=f"r{index}")
            stream = Stream(request, cancel_at(replica, max(after, 1)))
            replica.submit(request, stream.sink)
            if after < 0:
                replica.cancel(request.request_id)
            streams.append(stream)
            rows.append(row)
        reasons = [stream.end().finish_reason for stream in streams]
        for stream, row in zip(streams, rows, strict=True):
            complete = stream.last is not None and stream.last.finish_reason == "length"
            assert stream.tokens == wanted.expected[row][: None if complete else len(stream.tokens)]
        assert set(reasons) == {"cancelled", "length"}
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
        until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")
        assert drafts.wait_idle(PATIENCE_S)
        drafts.check()
        assert draft.pool.used_pages == 0
        replica.cancel("r0")  # long gone
        replica.cancel("nobody")


# --- drafts that leave, lie, hang or fail


def test_a_new_draft_takes_over_mid_stream(
    target: ModelRunner, draft: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(1.0, 40)[:3]
    first, replacements, hits = DraftReplica(ModelDrafter(draft)), [], []
    with serving(target) as replica, memory(replica, first):
        steps = Steps(target, monkeypatch)
        submit(replica, [replace(wanted.requests[0], request_id="before")])[0].end()

        def replaced() -> None:
            hits.append(replica.stats().hits)
            replacements.append(DraftReplica(ModelDrafter(draft)))
            near, far = memory_link()
            replacements[0].add_link(far)
            replica.add_link(near)

        steps.at(4, first.close)
        steps.at(6, replaced)
        steps.at(8, lambda: replacements[0].wait_idle(PATIENCE_S))  # it has drawn level
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        assert replica.wait_idle(PATIENCE_S)
        stats = replica.stats()
        assert stats.drafts == 1
        assert stats.link["attached"] == 1 + 2 * len(wanted.requests)
        assert stats.hits > hits[0]
        until(lambda: replacements[0].stats().sessions == 0, "the draft forgets its sessions")
        replacements[0].check()
    replacements[0].close()


def test_sessions_of_a_dead_draft_go_to_the_living_one(
    target: ModelRunner, draft: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(1.0)
    dying = DraftReplica(NgramDrafter())
    with drafting(ModelDrafter(draft)) as living, serving(target) as replica:
        with memory(replica, dying), memory(replica, living):
            Steps(target, monkeypatch).at(3, dying.close)
            assert outputs(submit(replica, wanted.requests)) == wanted.expected
            until(lambda: living.stats().sessions == 0, "the draft forgets its sessions")
        assert replica.stats().drafts == 1
        assert replica.stats().link["attached"] > len(wanted.requests)


Garbage = Callable[
    [Random, int], list[tuple[int, int, float]]
]  # random, vocabulary size -> (parent, token, confidence)
GARBAGE: dict[str, Garbage] = {
    "unknown ids": lambda random, size: [(-1, size + random.randrange(9), 0.9), (0, -1, 0.9), (1, 2**31 - 1, 0.9)],
    "wrong parents": lambda random, size: [(random.choice([5, 1, -2]), random.randrange(size), 0.9) for _ in range(3)],
    "no numbers": lambda random, size: [
        (i - 1, random.randrange(size), random.choice([np.nan, np.inf, -np.inf, -1.0, 9.0])) for i in range(6)
    ],
    "lies": lambda random, size: [(random.randrange(-1, i), random.randrange(size), 0.99) for i in range(12)],
}


class NonsenseDraft:
    """Answers every message with growth that makes no sense, below a prefix that does or not."""

    def __init__(self, link: Link[Up, Down], garbage: Garbage, vocab_size: int) -> None:
        self._link, self._garbage, self._vocab_size = link, garbage, vocab_size
        self._random = Random(7)
        self.said = 0
        self._thread = threading.Thread(target=self._run, name="paceline-nonsense")
        self._thread.start()

    def close(self) -> None:
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        while self._link.alive:
            self._link.wait(PATIENCE_S)
            answers = [answer for message in self._link.receive() for answer in self._answers(message)]
            self._link.send(answers)
            self.said += len(answers)

    def _answers(self, message: Down) -> list[Growth]:
        if isinstance(message, Open):
            base = HandleChain(message.tokens).handle
        elif isinstance(message, Commit):
            base = message.handle
        else:
            return []
        return [growth(message.session, base, *self._garbage(self._random, self._vocab_size)) for _ in range(2)]


def steep() -> Window:
    """Draft tokens that are rarely right don't pay."""
    cost = CostModel()
    for rows, milliseconds in ((1, 10.0), (2, 15.0), (32, 160.0)):
        cost.start(rows, milliseconds)
    return GoodputWindow(Calibration(), cost)


def falls_silent(target: TargetReplica, case: Case) -> bool:
    before = target.stats().verified
    assert outputs(submit(target, case.requests)) == case.expected
    return target.stats().verified - before <= 4


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("window", [lambda: FixedTree(12), steep], ids=["tree", "goodput"])
def test_nonsense_from_a_draft_changes_nothing(
    target: ModelRunner, case: MakeCase, kind: str, window: Callable[[], Window]
) -> None:
    wanted = case(0.7)[:4]
    with serving(target, window()) as replica:
        near, far = memory_link()
        stub = NonsenseDraft(far, GARBAGE[kind], target.vocab_size)
        replica.add_link(near)
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        if isinstance(window(), GoodputWindow):
            until(lambda: falls_silent(replica, wanted), "the target stops verifying what is never right")
        stats = replica.stats()
        assert stub.said > 0
        assert stats.accepted <= 3  # by chance
        if kind in ("unknown ids", "wrong parents"):
            assert stats.verified == 0
        stub.close()


def test_prompts_alone_put_no_draft_to_rest(
    target: ModelRunner, draft: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(LinkedDrafts, "stepped", lambda self, accepted: counted.append(accepted))
    long = [request for request in case().requests if len(request.prompt) > 1]
    ones = [replace(each, params=replace(each.params, max_tokens=1), salt=b"read once") for each in long]
    with drafting(ModelDrafter(draft)) as drafts, serving(target, max_batch=1) as replica, memory(replica, drafts):
        assert [len(tokens) for tokens in outputs(submit(replica, ones))] == [1] * len(ones)
    assert counted == [], "steps that read prompts only"


def test_a_hung_draft_holds_nobody_up(target: ModelRunner, case: MakeCase) -> None:
    wanted = case(0.7)[:4]
    near, far = memory_link()
    with serving(target) as replica:
        replica.add_link(near)  # nobody ever reads at the far end
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        assert replica.stats().verified == 0
        assert replica.stats().empty > 0
    assert not far.alive


def test_a_draft_that_fails_is_a_draft_that_left(
    target: ModelRunner, draft: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = case(0.7)[:4]
    drafter = ModelDrafter(draft)
    replica_of_draft = DraftReplica(drafter)
    with serving(target) as replica, memory(replica, replica_of_draft) as (near, _):
        grow, count = drafter.grow, iter(range(5))

        def fail() -> list[int]:
            if next(count, None) is None:
                raise RuntimeError("out of memory")
            return grow()

        monkeypatch.setattr(drafter, "grow", fail)
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        until(lambda: not near.alive, "the link ends")
        assert not replica_of_draft.alive
        replica_of_draft.check()
        assert draft.pool.used_pages == 0
        assert replica.wait_idle(PATIENCE_S)
    replica_of_draft.close()


@pytest.mark.parametrize("kv_tokens", [256, 400])
def test_a_draft_without_room_costs_speed_only(
    target: ModelRunner, case: MakeCase, monkeypatch: pytest.MonkeyPatch, kv_tokens: int
) -> None:
    """Too small for all sessions at once, in the second case for what they become."""
    wanted = case(0.7)
    small = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=kv_tokens)
    drafter = ModelDrafter(small, Growing(max_nodes=32))
    steps = Steps(target, monkeypatch)
    with drafting(drafter) as drafts, serving(target) as replica, memory(replica, drafts):
        steps.at(6, lambda: drafts.wait_idle(PATIENCE_S))
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        assert replica.wait_idle(PATIENCE_S)
        assert replica.stats().link["reopened"] > 0
        until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")
        drafts.check()
        assert small.pool.used_pages == 0


def test_a_session_that_outgrows_the_draft_is_dropped_and_asked_for_again() -> None:
    small = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=64)  # two pages
    with drafting(ModelDrafter(small, Growing(max_nodes=32))) as drafts:
        near, far = memory_link()
        drafts.add_link(far)
        near.send([Open(1, tuple(range(10)), SamplingParams())])
        until(lambda: drafts.stats().steps >= 2, "there is growth that the link does not take")
        longer = tuple(range(40))
        near.send([Commit(1, HandleChain(longer).handle, longer[10:], False)])
        until(lambda: drafts.stats().sessions == 0, "the draft drops the session")
        near.send([Commit(1, HandleChain(longer).handle, longer[10:], False)])
        heard: list[Up] = []
        while NeedPrefix((1,)) not in heard:
            assert near.wait(PATIENCE_S)
            heard += near.receive()
        drafts.check()
        assert small.pool.used_pages == 0


def test_token_ids_beyond_the_drafts_vocabulary_do_it_no_harm(draft: ModelRunner) -> None:
    with drafting(ModelDrafter(draft)) as drafts:
        near, far = memory_link()
        drafts.add_link(far)
        unknown = (draft.vocab_size, 2**31 - 1)
        near.send([Open(1, unknown, SamplingParams())])
        near.send([Commit(1, HandleChain((*unknown, 2**30)).handle, (2**30,), False)])
        assert near.wait(PATIENCE_S)
        assert drafts.alive
        near.close()
        until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")


def test_sessions_that_nobody_renews_end(draft: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "_EXPIRE_EVERY_S", 0.02)
    monkeypatch.setattr(draft_state, "LEASE_S", 0.1)
    with drafting(ModelDrafter(draft)) as drafts:
        near, far = memory_link()
        drafts.add_link(far)
        near.send([Open(1, (1, 2, 3), SamplingParams())])
        assert near.wait(PATIENCE_S)  # it grew
        until(lambda: drafts.stats().sessions == 0, "the lease runs out")
        assert drafts.wait_idle(PATIENCE_S)
        assert draft.pool.used_pages == 0
        assert near.alive


# --- the target's own limits


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
                runner.pool.data[:, :, :, rows.slots] = torch.nan
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
        streams = submit(replica, requests)
        assert [stream.end().finish_reason for stream in streams] == [each.finish_reason for each in alone]
        assert [stream.tokens for stream in streams] == [each.tokens for each in alone]
        assert [stream.logprobs for stream in streams] == [each.logprobs for each in alone]
        assert sum(stream.guessed for stream in streams) > 0


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
