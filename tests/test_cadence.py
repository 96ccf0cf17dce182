"""When a draft tells its target what grew: before it looks, again in long steps, at once when it waits."""

import threading
import time

import pytest

from cluster.cadence import Cadence
from cluster.draft import DraftReplica
from cluster.draft_state import CloseSession, CommitTokens
from cluster.link import memory_link
from engine.prefix import HandleChain
from engine.types import Commit, Open, SamplingParams
from tests.cluster_fixtures import PATIENCE_S, GuessingDrafter, until

STEP, TURN = 0.010, 0.003


@pytest.fixture
def cadence() -> Cadence:
    return rhythm(STEP, TURN)


def rhythm(step: float, turn: float) -> Cadence:
    """Of a target whose steps take so long and a draft with such turns; the target's last step began at 1.0."""
    known = Cadence()
    for commit in range(101):
        known.committed(0, 1.0 - (100 - commit) * step, hit=True)
        known.turned(turn)
    return known


def test_without_knowing_the_rhythm_growth_goes_out_at_once() -> None:
    assert Cadence().due(0.0)


def test_growth_waits_until_the_next_turn_would_be_too_late(cadence: Cadence) -> None:
    moments = [1.0 + TURN * turn for turn in range(1, 4)]
    assert [cadence.due(moment) for moment in moments] == [False, True, True]


def test_a_target_whose_step_is_a_quarter_shorter_than_usual_has_been_told(cadence: Cadence) -> None:
    for _ in range(50):
        cadence.turned(STEP / 100)
    assert not cadence.due(1.0 + STEP / 2)
    assert cadence.due(1.0 + 0.75 * STEP)


def test_in_a_short_step_growth_is_told_once() -> None:
    known = rhythm(step=0.002, turn=0.0003)
    known.sent(1.0 + 0.0015, waited_for=False)
    assert not known.due(1.0 + 0.002)
    assert known.due(1.0 + 2 * 0.002), "a target whose step takes longer than expected is told again"


def test_a_slow_draft_tells_each_of_its_last_steps() -> None:
    known = rhythm(step=0.014, turn=0.0016)
    for turned in (0.0100, 0.0116, 0.0132):
        assert known.due(1.0 + turned)
        known.sent(1.0 + turned, waited_for=False)


def test_in_a_long_step_growth_is_told_again_and_again() -> None:
    known = rhythm(step=0.1, turn=0.001)
    known.sent(1.0 + 0.076, waited_for=False)
    assert not known.due(1.0 + 0.084)
    assert known.due(1.0 + 0.0851), "a tenth of a step later"


def test_the_commits_of_many_sessions_are_one_step(cadence: Cadence) -> None:
    began = 1.0
    for _ in range(50):
        began += STEP
        for session in range(8):  # in messages of their own, one right behind the other
            cadence.committed(session, began + 0.00001 * session, hit=True)
    assert not cadence.due(began + TURN)
    assert cadence.due(began + 2 * TURN)


def test_a_target_waits_when_nothing_at_all_is_there_to_verify(cadence: Cadence) -> None:
    began = 1.0
    for hits, waits in (((False,), True), ((False, False), True), ((False, True), False), ((True, False), False)):
        began += STEP
        for session, hit in enumerate(hits):
            cadence.committed(session, began + 0.00001 * session, hit)
        assert cadence.waits == waits
    cadence.closed(0)
    assert cadence.waits, "the one that hit has ended"
    cadence.sent(began + TURN, waited_for=True)
    assert not cadence.waits, "it has what it waited for"


def test_a_session_commits_once_in_a_step_however_short(cadence: Cadence) -> None:
    cadence.committed(0, 1.0 + STEP, hit=True)
    cadence.committed(0, 1.0 + STEP + STEP / 20, hit=False)
    assert cadence.waits


def test_only_what_is_new_begins_a_step(cadence: Cadence) -> None:
    """Late and doubled commits, and those of unknown sessions, command nothing."""
    cadence.heard([], 1.0 + STEP, 1.0 + STEP)
    assert cadence.due(1.0 + STEP + TURN)
    cadence.heard([CommitTokens(0, (1,), resend=True)], 1.0 + STEP, 1.0 + STEP)
    assert not cadence.due(1.0 + STEP + TURN)
    assert cadence.waits
    cadence.heard([CloseSession(0)], 1.0 + STEP, 1.0 + STEP)
    assert not cadence.waits


def test_a_commit_that_came_in_before_growth_was_sent_is_no_step(cadence: Cadence) -> None:
    cadence.sent(1.005, waited_for=True)
    cadence.committed(0, 1.004, hit=True)
    assert not cadence.due(1.005 + TURN)
    assert cadence.due(1.005 + 2 * TURN)


def test_a_target_that_waited_begins_its_step_when_growth_comes(cadence: Cadence) -> None:
    cadence.sent(1.005, waited_for=True)
    assert not cadence.due(1.005 + TURN)
    assert cadence.due(1.005 + 2 * TURN)
    began = 1.005
    for _ in range(50):  # it waits every time, but the waiting is no part of its step
        began += STEP + 0.005
        cadence.committed(0, began - 0.005, hit=False)
        cadence.sent(began, waited_for=True)
    assert not cadence.due(began + TURN)
    assert cadence.due(began + 2 * TURN)


def test_a_new_session_wants_growth_at_once_and_its_pause_is_no_step(cadence: Cadence) -> None:
    cadence.opened(100.0)
    assert cadence.due(100.0)
    cadence.committed(0, 100.02, hit=True)
    assert not cadence.due(100.02 + TURN)
    assert cadence.due(100.02 + 2 * TURN)


class _Held(GuessingDrafter):
    """A draft step of it takes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def grow(self) -> list[int]:
        grown = super().grow()
        if grown:
            self.steps.release()
            assert self.go.acquire(timeout=PATIENCE_S)
        return grown


def test_a_step_begins_when_its_commit_comes_in_not_when_the_draft_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    monkeypatch.setattr(Cadence, "committed", lambda self, key, now, hit: began.append(now))
    near, far = memory_link()
    drafter = _Held()
    replica = DraftReplica(drafter)
    try:
        replica.add_link(far)
        near.send([Open(1, (3, 4), SamplingParams())])
        assert drafter.steps.acquire(timeout=PATIENCE_S)  # the draft is in a step
        near.send([Commit(1, HandleChain([3, 4, 5]).handle, (5,), mirrored=False)])
        before = time.monotonic()
        for _ in range(100):  # more than it can take
            drafter.go.release()
        until(lambda: bool(began), "the draft looks")
        assert began[0] <= before
    finally:
        near.close()
        replica.close()
