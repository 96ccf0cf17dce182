"""Drafts are used where a target is faster with them, as it measures itself."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cluster.link import memory_link
from cluster.linked import LinkedDrafts
from cluster.target_state import TargetState
from cluster.trace import Trace
from cluster.worth import Kind, Worth, kind_of
from engine.types import Growth, KVHandle, SamplingParams

ALONE, SAMPLED = kind_of(1, True), kind_of(1, False)


def share_without(worth: Worth, steps: int, kind: Kind, rate: Callable[[bool], float]) -> float:
    """Of so many steps the share that goes without drafts. rate: tokens per second, by that."""
    without = 0
    for _ in range(steps):
        without += worth.without
        worth.stepped(kind, 2, 2 / rate(worth.without), heard=True)
    return without / steps


def varying(factor: float, drawn: random.Random | None = None) -> Callable[[bool], float]:
    """Rates that are `factor` times as high with drafts as without, more or less where `drawn` is given."""
    return lambda without: (1.0 if without else factor) * (drawn.uniform(0.6, 1.4) if drawn else 1.0)


def test_drafts_that_pay_are_hardly_ever_left_alone() -> None:
    worth = Worth()
    assert share_without(worth, 100_000, ALONE, varying(1.5)) < 0.005


def test_drafts_that_do_not_pay_are_left_alone_but_looked_at_now_and_then() -> None:
    worth = Worth()
    share_without(worth, 200, ALONE, varying(0.8))
    assert 0.99 < share_without(worth, 100_000, ALONE, varying(0.8)) < 1


def test_speeds_that_vary_are_told_apart() -> None:
    drawn = random.Random(0)
    for factor, share in ((1.3, 0.0), (0.8, 1.0)):
        worth = Worth()
        found = share_without(worth, 50_000, ALONE, varying(factor, drawn))
        assert abs(found - share) < 0.05


def test_what_has_changed_is_noticed() -> None:
    worth = Worth()
    share_without(worth, 20_000, ALONE, varying(1.5))
    share_without(worth, 20_000, ALONE, lambda without: 1.5 if without else 1.0)
    assert share_without(worth, 1_000, ALONE, lambda without: 1.5 if without else 1.0) > 0.9


def test_each_kind_of_batch_has_its_own_answer() -> None:
    worth = Worth()
    pays = {ALONE: 1.5, SAMPLED: 0.8, kind_of(16, True): 0.9}
    for _ in range(3):
        for kind, factor in pays.items():
            share_without(worth, 3_000, kind, varying(factor))
    for kind, factor in pays.items():
        share_without(worth, 80, kind, varying(factor))
        assert (share_without(worth, 100, kind, varying(factor)) > 0.5) == (factor < 1)


def test_drafts_that_still_read_the_texts_are_waited_for() -> None:
    """They need 40 steps after each return before they say anything, and are worth it from then on."""
    worth, back = Worth(), 0
    without = 0
    for _ in range(50_000):
        without += worth.without
        back = 0 if worth.without else back + 1
        worth.stepped(ALONE, 2, 1.0 if back > 40 else 2.0, heard=back > 40)
    assert without < 0.01 * 50_000


def test_drafts_that_never_say_anything_are_not_waited_for_forever() -> None:
    worth, looks = Worth(), 0
    for _ in range(10_000):
        looks += worth.without
        worth.stepped(ALONE, 2, 2.0, heard=False)
    assert looks > 30


def test_a_batch_that_comes_and_goes_changes_nothing() -> None:
    """Every change would have all texts read again."""
    worth = Worth()
    share_without(worth, 3_000, ALONE, varying(1.5))
    share_without(worth, 3_000, SAMPLED, varying(0.8))
    changes = 0
    for step in range(6_000):
        before = worth.without
        kind = SAMPLED if step // 3 % 2 else ALONE
        worth.stepped(kind, 2, 2.0 if kind == ALONE or worth.without else 2.5, heard=True)
        changes += worth.without != before
    assert changes < 20


class Served:
    """One session of a target that decodes at given speeds."""

    def __init__(self, weighs: bool = True) -> None:
        self.state = TargetState(16)
        self.drafts = LinkedDrafts(self.state, Trace(), lambda: None, weighs)
        self.session = self.state.session_opened([1, 2], SamplingParams())
        self.links = [memory_link()]
        self.drafts.join(self.links[0][0])

    def step(self, seconds_with: float, seconds_without: float, accepted: int = 1) -> bool:
        """One step; whether the session is with a draft after it."""
        with_drafts = self.state.attached(self.session)
        if with_drafts:
            below = np.full(1, -1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
            self.links[-1][1].send([Growth(self.session, KVHandle(2, bytes(16)), *below)])
        self.drafts.receive()
        self.drafts.stepped(accepted)
        self.drafts.took(ALONE, 2, seconds_with if with_drafts else seconds_without)
        self.drafts.send()
        self.state.check()
        return self.state.attached(self.session)

    def close(self) -> None:
        self.drafts.close()
        for _, up in self.links:
            up.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_a_draft_that_joins_is_tried_where_another_was_left_alone(served: Served) -> None:
    while served.step(2.0, 1.0):
        pass
    for _ in range(100):
        served.step(2.0, 1.0)
    assert not served.state.attached(served.session)
    served.links.append(memory_link())
    served.drafts.join(served.links[-1][0])
    assert served.state.attached(served.session)
    assert all(served.step(1.0, 2.0) for _ in range(90))


def test_those_that_stay_are_tried_when_one_of_several_leaves(served: Served) -> None:
    served.links.append(memory_link())
    served.drafts.join(served.links[-1][0])
    while served.step(2.0, 1.0):
        pass
    for _ in range(100):
        served.step(2.0, 1.0)
    assert not served.state.attached(served.session)
    served.links[0][1].close()
    served.drafts.receive()
    assert len(served.drafts) == 1
    assert served.state.attached(served.session)
    served.state.check()


def test_drafts_that_are_never_right_and_slow_are_still_looked_at(served: Served) -> None:
    attached = [served.step(2.0, 1.0, accepted=0) for _ in range(20_000)]
    assert sum(attached) < 0.1 * 20_000
    assert any(attached[10_000:])


def test_sessions_leave_drafts_that_make_a_target_slower(served: Served) -> None:
    attached = [served.step(2.0, 1.0) for _ in range(3_000)]
    assert attached[0]
    assert not any(attached[200:1_000])
    assert any(attached[1_000:])


def test_drafts_are_not_left_alone_where_nobody_asked_for_that() -> None:
    served = Served(weighs=False)
    assert all(served.step(2.0, 1.0) for _ in range(500))
    served.close()
