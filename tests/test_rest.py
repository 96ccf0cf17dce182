"""Drafts of no use are left alone, and looked at again."""

from cluster.rest import Rest
from cluster.target_state import TargetState
from engine.types import Close, Open, SamplingParams


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


def test_sessions_leave_drafts_that_are_left_alone_and_come_back() -> None:
    state = TargetState(16)
    state.draft_joined(0)
    first = state.session_opened([1, 2], SamplingParams())
    state.take_messages()
    state.drafts_left_alone()
    second = state.session_opened([3], SamplingParams())
    state.tokens_committed(first, [5])
    assert state.take_messages() == {0: [Close((first,))]}
    assert not state.attached(first)
    state.check()
    state.drafts_asked_again()
    opened = [(message.session, message.tokens) for message in state.take_messages()[0] if isinstance(message, Open)]
    assert opened == [(first, (1, 2, 5)), (second, (3,))]
    state.drafts_left_alone()
    state.draft_joined(1)  # another one, perhaps a better one
    assert state.attached(first)
    state.check()
