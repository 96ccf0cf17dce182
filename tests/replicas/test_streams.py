"""Whatever the link does and whoever cancels, the tokens are those of plain decoding."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
import torch

from cluster.draft import DraftReplica
from cluster.link import memory_link
from cluster.target import TargetReplica
from engine import torch_calls
from engine.budget import Window
from engine.compiled_pass import Passed
from engine.decode import decode
from engine.drafters import Drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.runner import ModelRunner
from engine.types import Down, Open
from engine.windows import FixedChain, FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.replicas.helpers import (
    TOKENS,
    MakeCase,
    Steps,
    Stream,
    drafting,
    faulty,
    memory,
    outputs,
    over_grpc,
    serving,
    submit,
)

CANCELLED = int(os.environ.get("PACELINE_CANCELLED_REQUESTS", "60"))
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


@pytest.mark.skipif(not torch_calls.narrow_available(), reason="bfloat16 is emulated")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_as_users_have_them_streams_equal_plain_decoding(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, outside invariant mode: compiled passes give a row the same bits beside any others."""
    target, draft = ModelRunner(exact.TARGET, kv_tokens=2048), ModelRunner(exact.DRAFT, kv_tokens=4096)
    requests = exact.make_requests(exact.load_prompts(4), temperature, TOKENS)
    expected = [generation.tokens for generation in decode(target, requests)]
    passes, best = count(1), target.best
    with drafting(ModelDrafter(draft)) as drafts, serving(target, max_batch=3, lookup=8) as replica:

        def patient(*batch: Any) -> Passed:
            if next(passes) in (4, 8, 12):  # the draft gets a chance, however busy the machine is
                drafts.wait_idle(PATIENCE_S)
            return best(*batch)

        monkeypatch.setattr(target, "best", patient)
        with over_grpc(replica, drafts):
            assert outputs(submit(replica, requests)) == expected
        assert replica.stats().accepted > 0
    for runner in (target, draft):
        assert runner.dtype == torch.bfloat16
        assert runner.pool.used_pages == 0


def test_a_target_without_a_draft_decodes_alone(target: ModelRunner, case: MakeCase) -> None:
    wanted = case()[:3]
    with serving(target) as replica:
        assert outputs(submit(replica, wanted.requests)) == wanted.expected
        assert replica.stats().verified == 0


def test_a_step_that_ends_a_prompt_is_no_decoding(target: ModelRunner, case: MakeCase) -> None:
    part = case(1.0)[:4]
    requests = [replace(request, salt=b"nobody else's") for request in part.requests]  # no prefix is known
    seen: list[int] = []  # rows of the steps that say what rows cost
    with serving(target, max_batch=1, on_step=lambda rows, milliseconds, sequences: seen.append(rows)) as alone:
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

        def served() -> bool:
            streams = [submit(each, wanted.requests) for each in targets]
            assert [outputs(part) for part in streams] == [wanted.expected] * 2
            return True

        assert served()
        for each in targets:
            assert each.wait_idle(PATIENCE_S)
            assert each.stats().drafts == 2
            assert each.stats().link["attached"] == len(wanted.requests)
        for helper in drafts:
            until(lambda helper=helper: helper.stats().sessions == 0, "the draft forgets its sessions")  # type: ignore[misc]
            assert helper.stats().streams == 2
        until(lambda: all(helper.stats().steps for helper in drafts) or not served(), "every draft takes part")


# --- cancellation


class CancelAt:
    """Cancels a stream whenever its client gets something and has this many tokens."""

    def __init__(self, target: TargetReplica, after: int) -> None:
        self.times = 0
        self._target, self._after = target, after

    def __call__(self, stream: Stream) -> None:
        if len(stream.tokens) >= self._after and stream.last is None:
            self.times += 1
            self._target.cancel(stream.request.request_id)


def test_requests_cancelled_at_random_points_end_within_a_step_and_leave_nothing(
    target: ModelRunner, draft: ModelRunner, case: MakeCase
) -> None:
    wanted = case(1.0)
    random = Random(5)
    with drafting(ModelDrafter(draft)) as drafts, serving(target, max_batch=8) as replica, memory(replica, drafts):
        streams, cancels, rows = [], [], []
        for index in range(CANCELLED):
            row = index % len(wanted.requests)
            after = random.randrange(-4, TOKENS + 2)  # below 0: at once; beyond the length: not at all
            request = replace(wanted.requests[row], request_id=f"r{index}")
            cancel = CancelAt(replica, max(after, 1))
            stream = Stream(request, cancel)
            replica.submit(request, stream.sink)
            if after < 0:
                replica.cancel(request.request_id)
            streams.append(stream)
            cancels.append((after, cancel))
            rows.append(row)
        reasons = [stream.end().finish_reason for stream in streams]
        for stream, row in zip(streams, rows, strict=True):
            complete = stream.last is not None and stream.last.finish_reason == "length"
            assert stream.tokens == wanted.expected[row][: None if complete else len(stream.tokens)]
        assert set(reasons) == {"cancelled", "length"}
        for stream, (after, cancel) in zip(streams, cancels, strict=True):
            assert stream.last is not None
            if stream.last.finish_reason == "cancelled":
                assert not stream.last.tokens
                assert cancel.times == 1 or (after < 0 and not cancel.times)
            else:
                assert not cancel.times
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
        until(lambda: drafts.stats().sessions == 0, "the draft forgets its sessions")
        assert drafts.wait_idle(PATIENCE_S)
        drafts.check()
        assert draft.pool.used_pages == 0
        replica.cancel("r0")  # long gone
        replica.cancel("nobody")
