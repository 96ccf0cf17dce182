"""Drafts that leave, lie, hang or fail: the tokens are those of plain decoding."""

import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from cluster import draft as draft_module
from cluster import draft_state
from cluster.draft import DraftReplica
from cluster.link import Link, memory_link
from cluster.linked import LinkedDrafts
from cluster.target import TargetReplica
from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.prefix import HandleChain
from engine.runner import ModelRunner
from engine.types import Commit, Down, Growth, NeedPrefix, Open, SamplingParams, Up
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, growth, until
from tests.replicas.helpers import Case, MakeCase, Steps, drafting, memory, outputs, serving, submit


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
    counted: list[LinkedDrafts] = []
    monkeypatch.setattr(LinkedDrafts, "stepped", counted.append)
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
    """Too small for all sessions at once, in the second case for what they become. What is refused is asked for again."""
    monkeypatch.setattr(draft_state, "REFUSED_S", 0.0)  # these requests are over before the usual time is
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


def test_a_session_that_outgrows_the_draft_is_dropped_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_state, "REFUSED_S", 0.0)
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
        until(lambda: draft.pool.used_pages == 0, "its pages are free")  # in the same turn, which nobody waits for
        assert near.alive
