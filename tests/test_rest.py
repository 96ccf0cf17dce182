"""Drafts of no use are left alone, and looked at again."""

from collections import Counter

import numpy as np

from cluster.link import memory_link
from cluster.linked import LinkedDrafts
from cluster.rest import Rest, Rests
from cluster.target_state import TargetState
from cluster.trace import Trace
from engine.types import Close, Growth, KVHandle, Open, SamplingParams


def test_drafts_that_are_never_right_are_mostly_left_alone_but_never_for_good() -> None:
    rest, alone, looks = Rest(), 0, 0
    for _ in range(20_000):
        alone += rest.resting
        looks += rest.stepped(heard=not rest.resting, accepted=0) and not rest.resting
    assert alone > 0.9 * 20_000
    assert looks > 15


def test_drafts_that_are_right_now_and_then_are_always_listened_to() -> None:
    rest = Rest()
    assert not any(rest.stepped(heard=True, accepted=step % 100 == 0) for step in range(5000))


def test_drafts_that_say_nothing_yet_are_waited_for() -> None:
    rest = Rest()
    assert not any(rest.stepped(heard=False, accepted=0) for _ in range(5000))


def test_a_draft_that_was_right_at_a_look_is_trusted_as_at_first() -> None:
    rest = Rest()
    assert [rest.stepped(heard=True, accepted=0) for _ in range(128)].index(True) == 127
    assert [rest.stepped(heard=False, accepted=0) for _ in range(256)].index(True) == 255
    rest.stepped(heard=True, accepted=1)
    assert sum(not rest.resting and not rest.stepped(heard=True, accepted=0) for _ in range(200)) == 127


def test_of_several_drafts_those_that_are_never_right_rest_and_come_back() -> None:
    rests = Rests()
    rests.joined(0)
    rests.joined(1)

    def step() -> bool:
        for draft in {0, 1} - rests.resting:
            rests.heard(draft)
        rests.accepted(1, 2)
        rests.accepted(7, 1)  # it has left
        return rests.stepped()

    assert [step() for _ in range(128)].index(True) == 127
    assert rests.resting == {0}
    assert [step() for _ in range(256)].index(True) == 255
    assert rests.resting == set()
    rests.left(0)
    assert not any(step() for _ in range(2000))


def test_a_step_is_judged_by_what_came_since_the_one_before() -> None:
    rests = Rests()
    rests.joined(0)
    for _ in range(500):
        rests.heard(0)
        assert rests.any_heard
        rests.passed_over()
        assert not rests.stepped()  # nothing was heard since
    for _ in range(127):
        rests.heard(0)
        assert not rests.stepped()
    rests.heard(0)
    assert rests.stepped()


def opened(state: TargetState, draft: int) -> list[tuple[int, tuple[int, ...]]]:
    messages = state.take_messages().get(draft, [])
    return [(message.session, message.tokens) for message in messages if isinstance(message, Open)]


def test_sessions_leave_drafts_that_are_left_alone_and_come_back() -> None:
    state = TargetState(16)
    state.draft_joined(0)
    first = state.session_opened([1, 2], SamplingParams())
    state.take_messages()
    state.drafts_left_alone({0})
    second = state.session_opened([3], SamplingParams())
    state.tokens_committed(first, [5])
    assert state.take_messages() == {0: [Close((first,))]}
    assert not state.attached(first)
    state.check()
    state.drafts_left_alone(set())
    assert opened(state, 0) == [(first, (1, 2, 5)), (second, (3,))]
    state.drafts_left_alone({0})
    state.draft_joined(1)  # another one, perhaps a better one
    assert state.attached(first)
    state.check()


def test_sessions_of_a_draft_that_is_left_alone_go_to_another() -> None:
    state = TargetState(16)
    state.draft_joined(0)
    state.draft_joined(1)
    first, second = (state.session_opened([token], SamplingParams()) for token in (1, 2))
    assert (state.draft_of(first), state.draft_of(second)) == (0, 1)
    state.take_messages()
    state.drafts_left_alone({0})
    assert state.draft_of(first) == 1
    assert state.take_messages() == {0: [Close((first,))], 1: [Open(first, (1,), SamplingParams(), 1)]}
    state.draft_left(1)
    assert not state.attached(first)
    state.drafts_left_alone(set())
    assert opened(state, 0) == [(first, (1,)), (second, (2,))]
    state.check()


def test_a_draft_that_is_never_right_loses_its_sessions_to_one_that_is() -> None:
    state = TargetState(16)
    drafts = LinkedDrafts(state, Trace(), None)
    links = [memory_link() for _ in range(2)]
    for near, _ in links:
        drafts.join(near)
    sessions = [state.session_opened([1], SamplingParams()) for _ in range(4)]
    of = [state.draft_of(session) for session in sessions]
    assert Counter(of) == {0: 2, 1: 2}
    below = np.full(1, -1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)

    def step() -> None:
        for draft, (_, far) in enumerate(links):
            held = [session for session in sessions if state.draft_of(session) == draft]
            far.send([Growth(session, KVHandle(1, bytes(16)), *below) for session in held])
        drafts.receive()
        for session in sessions:
            drafts.accepted(session, int(state.draft_of(session) == 1))
        drafts.stepped()

    for _ in range(128):
        assert [state.draft_of(session) for session in sessions] == of
        step()
    assert {state.draft_of(session) for session in sessions} == {1}
    for _ in range(256):
        step()
    assert {state.draft_of(session) for session in sessions} == {1}
    assert state.draft_of(state.session_opened([1], SamplingParams())) == 0  # it is looked at again
    state.check()
    drafts.close()
    for _, far in links:
        far.close()
