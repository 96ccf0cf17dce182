"""Drafts are used where a target is faster with them, as it measures itself."""

import random
from collections.abc import Callable

from cluster.link import memory_link
from cluster.linked import LinkedDrafts
from cluster.target_state import TargetState
from cluster.trace import Trace
from cluster.worth import Kind, Worth, kind_of
from engine.types import SamplingParams

ALONE, SAMPLED = kind_of(1, True), kind_of(1, False)


def share_without(worth: Worth, steps: int, kind: Kind, rate: Callable[[bool], float]) -> float:
    """Of so many steps the share that goes without drafts. rate: tokens per second, by that."""
    without = 0
    for _ in range(steps):
        without += worth.without
        worth.stepped(kind, 2, 2 / rate(worth.without))
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
        share_without(worth, 40, kind, varying(factor))
        assert (share_without(worth, 100, kind, varying(factor)) > 0.5) == (factor < 1)


def test_sessions_leave_drafts_that_make_a_target_slower() -> None:
    state = TargetState(16)
    drafts = LinkedDrafts(state, Trace(), lambda: None, weighs=True)
    down, up = memory_link()
    drafts.join(down)
    session = state.session_opened([1, 2], SamplingParams())
    attached = []
    for _ in range(2_000):
        seconds = 2.0 if state.attached(session) else 1.0
        drafts.stepped(accepted=1)
        drafts.took(ALONE, 2, seconds)
        drafts.send()
        attached.append(state.attached(session))
    assert attached[0]
    assert not any(attached[200:1_000])
    assert any(attached[1_000:])
    state.check()
    drafts.close()
    up.close()


def test_drafts_are_not_left_alone_where_nobody_asked_for_that() -> None:
    state = TargetState(16)
    drafts = LinkedDrafts(state, Trace(), lambda: None)
    down, up = memory_link()
    drafts.join(down)
    session = state.session_opened([1, 2], SamplingParams())
    for _ in range(500):
        drafts.stepped(accepted=1)
        drafts.took(ALONE, 2, 2.0 if state.attached(session) else 1.0)
    assert state.attached(session)
    drafts.close()
    up.close()
