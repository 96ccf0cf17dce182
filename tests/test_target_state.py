"""The target's state machine: events in, messages out."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.target_state import COMMIT_TAIL, MIRROR_NODES, SESSION_BITS, TargetState
from engine.prefix import HandleChain
from engine.tree import ROOT
from engine.types import Close, Commit, Growth, KVHandle, NeedPrefix, Open, Renew, SamplingParams, Up
from tests.cluster_fixtures import VOCAB, growth
from tests.faulty_link import nonsense

PARAMS = SamplingParams(temperature=1.0, seed=3)
A, B = 0, 1  # drafts
PROMPT = (1, 2, 3)


def handle(*tokens: int) -> KVHandle:
    return HandleChain(tokens).handle


def state_with(*drafts: int) -> TargetState:
    state = TargetState(VOCAB)
    for draft in drafts:
        state.draft_joined(draft)
    return state


def test_a_session_opens_commits_and_closes() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    assert state.take_messages() == {A: [Open(session, PROMPT, PARAMS, len(PROMPT))]}
    assert not state.tokens_committed(session, (4, 5))
    assert state.take_messages() == {A: [Commit(session, handle(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), False)]}
    state.session_closed(session)
    assert state.take_messages() == {A: [Close((session,))]}
    assert state.take_messages() == {}
    assert state.sessions == 0
    state.check()


def test_replicas_begin_with_different_drafts() -> None:
    states = [TargetState(VOCAB, replica) for replica in (1, 2)]
    for state in states:
        for draft in (A, B):
            state.draft_joined(draft)
        state.session_opened(PROMPT, PARAMS)
    assert [list(state.take_messages()) for state in states] == [[B], [A]]


def test_commits_repeat_a_bounded_tail() -> None:
    state = state_with(A)
    session = state.session_opened(range(8), PARAMS)
    state.tokens_committed(session, range(8, 14))
    state.tokens_committed(session, (14, 15) * 20)
    _, first, second = state.take_messages()[A]
    assert isinstance(first, Commit)
    assert isinstance(second, Commit)
    assert first.tokens == tuple(range(14))
    assert second.tokens == (14, 15) * 20  # never less than what is new
    state.tokens_committed(session, (3,))
    (third,) = state.take_messages()[A]
    assert isinstance(third, Commit)
    assert third.tokens == (*(14, 15) * 20, 3)[-COMMIT_TAIL:]


def test_session_ids_name_their_replica_and_are_never_reused() -> None:
    one, other = TargetState(VOCAB, replica=1), TargetState(VOCAB, replica=2)
    ids = []
    for state in (one, other):
        for _ in range(3):
            ids.append(state.session_opened(PROMPT, PARAMS))
            state.session_closed(ids[-1])
    assert len(set(ids)) == 6
    assert [session >> SESSION_BITS for session in ids] == [1, 1, 1, 2, 2, 2]


def test_growth_that_fits_becomes_the_mirror() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    assert not state.hit(session)
    state.received(A, growth(session, handle(*PROMPT), (-1, 4, 0.9), (0, 5, 0.8), (-1, 6, 0.1)))
    assert state.hit(session)
    assert state.mirror(session).path([4, 5]) == 2
    assert state.tokens_committed(session, (4,))
    (_, commit) = state.take_messages()[A]
    assert isinstance(commit, Commit)
    assert commit.mirrored
    assert not state.tokens_committed(session, (6,))
    assert (state.counters.grown, state.counters.dropped, state.counters.healed) == (3, 0, 1)
    state.check()


def test_of_a_draft_with_more_token_ids_what_the_target_knows_is_taken() -> None:
    """Vocabularies are padded to different sizes."""
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    state.received(
        A, growth(session, handle(*PROMPT), (-1, VOCAB, 0.5), (0, 5, 0.8), (-1, 4, 0.4), (2, -1, 0.9), (2, 6, 0.9))
    )
    assert state.mirror(session).path([4, 6]) == 2
    assert (state.mirror(session).size, state.counters.grown, state.counters.dropped) == (3, 2, 0)
    state.check()


def test_what_a_draft_says_is_told_apart_from_what_was_looked_up() -> None:
    """What both say is the draft's, too: else one that is right would rest where the text repeats itself."""
    state = TargetState(8, lookup=3)
    state.draft_joined(A)
    session = state.session_opened([1, 2, 3, 4, 1, 2], PARAMS)
    mirror = state.mirror(session)
    looked_up = mirror.along([3, 4, 1])
    assert len(looked_up) == 3
    assert not mirror.sent[looked_up].any()
    state.received(A, growth(session, handle(1, 2, 3, 4, 1, 2), (-1, 3, 0.9), (0, 5, 0.8)))
    assert mirror.sent[mirror.along([3, 5])].tolist() == [True, True]
    assert mirror.sent[mirror.along([3, 4, 1])].tolist() == [True, False, False]


def test_growth_below_a_root_that_moved_on_is_grafted() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    state.tokens_committed(session, (4, 5))
    late = growth(
        session, handle(*PROMPT), (-1, 4, 0.9), (0, 5, 0.9), (1, 6, 0.9), (1, 7, 0.9), (0, 8, 0.9), (-1, 9, 0.9)
    )
    state.received(A, late)
    mirror = state.mirror(session)
    assert mirror.token[1 : mirror.size].tolist() == [6, 7]
    state.received(A, late)  # doubled: nothing new
    assert mirror.size == 3
    assert (state.counters.grown, state.counters.dropped) == (2, 1)


@pytest.mark.parametrize(
    "late",
    [
        growth(0, handle(*PROMPT), (-1, 6, 0.9), (0, 5, 0.9)),  # another path than the committed one
        growth(0, handle(1, 2, 9), (-1, 4, 0.9)),  # another prefix
        growth(0, handle(1, 2, 3, 4, 5), (-1, 4, 0.9)),  # a prefix that is not committed yet
        growth(0, KVHandle(3, bytes(16)), (-1, 4, 0.9)),
        growth(0, KVHandle(2**31, bytes(16)), (-1, 4, 0.9)),
        growth(99, handle(*PROMPT), (-1, 4, 0.9)),  # an unknown session
        growth(0, handle(*PROMPT)),
        growth(0, handle(*PROMPT), (-1, 4, 0.9), (0, VOCAB, 0.9)),  # unknown tokens
        growth(0, handle(*PROMPT), (-1, -1, 0.9)),
    ],
)
def test_growth_that_fits_nothing_is_dropped_and_counted(late: Growth) -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    assert session == 0
    state.tokens_committed(session, (4,))
    state.received(A, late)
    assert not state.hit(session)
    assert (state.counters.grown, state.counters.dropped) == (0, 1)
    state.check()


def test_confidences_that_are_none_are_no_confidence() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    values = (math.nan, math.inf, -math.inf, -1.0, 2.0, 0.5)
    state.received(A, growth(session, handle(*PROMPT), *((-1, token, value) for token, value in enumerate(values))))
    mirror = state.mirror(session)
    assert mirror.confidence[1 : mirror.size].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 0.5]


def test_a_full_mirror_takes_no_more() -> None:
    state = TargetState(10_000)
    session = state.session_opened(PROMPT, PARAMS)
    for first in (0, 1):
        tokens = range(first, first + MIRROR_NODES)
        state.received(A, growth(session, handle(*PROMPT), *((-1, token, 0.5) for token in tokens)))
        assert state.mirror(session).size == MIRROR_NODES
    assert (state.counters.grown, state.counters.dropped) == (MIRROR_NODES - 1, 1)
    state.check()


def test_a_prefix_is_sent_again_to_the_draft_that_has_the_session() -> None:
    state = state_with(A, B)
    session = state.session_opened(PROMPT, PARAMS)
    state.tokens_committed(session, (4,))
    state.take_messages()
    state.received(B, NeedPrefix((session,)))
    state.received(A, NeedPrefix((99,)))
    assert state.take_messages() == {}
    state.received(A, NeedPrefix((session,)))
    assert state.take_messages() == {A: [Open(session, (*PROMPT, 4), PARAMS, len(PROMPT))]}
    assert state.counters.reopened == 1


def test_a_prefix_is_sent_once_however_often_a_message_asks_for_it() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    state.received(A, NeedPrefix((session,)))  # it is on its way
    assert state.take_messages() == {A: [Open(session, PROMPT, PARAMS, len(PROMPT))]}
    state.received(A, NeedPrefix((session,) * 4096))
    assert len(state.take_messages()[A]) == 1


def test_a_draft_that_asks_for_ever_is_told_more_and_more_seldom() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    told = []
    for step in range(40):
        told += [step for message in state.take_messages()[A] if isinstance(message, Open)]
        state.tokens_committed(session, (4,))
        state.received(A, NeedPrefix((session,)))
    assert told == [0, 1, 2, 4, 8, 16, 32]
    state.received(A, growth(session, handle(*state.tokens(session)), (-1, 5, 0.5)))  # it does grow something
    state.received(A, NeedPrefix((session,)))
    assert any(isinstance(message, Open) for message in state.take_messages()[A])


def test_growth_that_ends_before_the_root_is_dropped_unread() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    state.tokens_committed(session, (4, 5, 6))
    state.received(A, growth(session, handle(*PROMPT), (-1, 4, 0.5), (0, 5, 0.5)))
    assert (state.counters.dropped, state.mirror(session).size) == (1, 1)


def test_a_session_of_which_nothing_can_be_told_goes_without_drafts() -> None:
    state = state_with(A)
    session = state.session_opened(PROMPT, PARAMS)
    state.take_messages()
    state.not_told(Open(session, PROMPT, PARAMS, len(PROMPT)))
    state.not_told(Commit(99, handle(*PROMPT), (4,), True))
    state.tokens_committed(session, (4,))
    state.draft_joined(B)
    assert state.take_messages() == {}
    state.session_closed(session)


def test_sessions_go_to_the_draft_with_the_fewest() -> None:
    state = state_with(A, B)
    sessions = [state.session_opened(PROMPT, PARAMS) for _ in range(4)]
    state.session_closed(sessions[1])
    sessions.append(state.session_opened(PROMPT, PARAMS))
    opened = {
        draft: [message.session for message in messages if isinstance(message, Open)]
        for draft, messages in state.take_messages().items()
    }
    assert opened == {A: [0, 2], B: [1, 3, 4]}


def test_sessions_of_a_draft_that_left_go_to_the_others_and_keep_their_mirrors() -> None:
    state = state_with(A, B)
    sessions = [state.session_opened(PROMPT, PARAMS) for _ in range(6)]
    state.received(A, growth(0, handle(*PROMPT), (-1, 4, 0.9)))
    state.take_messages()
    state.draft_left(A)
    state.check()
    assert state.take_messages() == {B: [Open(session, PROMPT, PARAMS, len(PROMPT)) for session in (0, 2, 4)]}
    assert state.hit(0)
    state.draft_left(B)
    state.check()
    assert not any(state.attached(session) for session in sessions)
    assert state.tokens_committed(0, (4,)) is False
    assert state.take_messages() == {}
    state.draft_joined(2)
    assert all(state.attached(session) for session in sessions)
    opened = state.take_messages()[2]
    assert opened[0] == Open(0, (*PROMPT, 4), PARAMS, len(PROMPT))
    assert len(opened) == 6
    state.received(
        A, growth(0, handle(*PROMPT, 4), (-1, 5, 0.9))
    )  # still on its way when the draft left: as good as any
    assert state.hit(0)
    state.draft_left(A)  # twice
    state.check()


def test_growth_beyond_all_room_is_dropped_unread_and_so_is_that_of_a_draft_left_alone() -> None:
    state = state_with(A, B)
    session = state.session_opened(PROMPT, PARAMS)
    state.received(A, growth(session, handle(*PROMPT), *((-1, token, 0.5) for token in range(MIRROR_NODES + 1))))
    state.drafts_left_alone({A})
    state.received(A, growth(session, handle(*PROMPT), (-1, 4, 0.9)))
    assert (state.counters.grown, state.counters.dropped, state.hit(session)) == (0, 2, False)
    state.received(B, growth(session, handle(*PROMPT), (-1, 4, 0.9)))
    assert state.hit(session)


def test_sessions_that_change_their_draft_are_counted() -> None:
    state = state_with(A)
    state.session_opened(PROMPT, PARAMS)
    assert (state.counters.attached, state.counters.reattached) == (1, 0)
    state.draft_left(A)
    assert (state.counters.attached, state.counters.reattached) == (1, 0)
    state.draft_joined(B)
    assert (state.counters.attached, state.counters.reattached) == (2, 1)
    state.draft_joined(A)
    state.draft_left(B)
    assert (state.counters.attached, state.counters.reattached) == (3, 2)


def test_sessions_that_come_back_from_another_place_are_not_counted_as_changing_their_draft() -> None:
    """Places are measured by turns, and drafts rest: that is no link that breaks."""
    state = state_with(A, B)
    state.session_opened(PROMPT, PARAMS)
    for alone in ({A, B}, set(), {A}, {A, B}, set()):
        state.drafts_left_alone(alone)
    assert (state.counters.attached, state.counters.reattached) == (4, 0)
    state.draft_left(A)
    assert (state.counters.attached, state.counters.reattached) == (5, 1)


def test_renewals_name_the_live_sessions_of_each_draft() -> None:
    state = state_with(A, B)
    for _ in range(4):
        state.session_opened(PROMPT, PARAMS)
    state.session_closed(1)
    state.session_closed(3)
    state.take_messages()
    state.renewal_due()
    assert state.take_messages() == {A: [Renew((0, 2))]}


class Events:
    """Drives a target with whatever comes; knows the committed tokens."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.state = TargetState(VOCAB)
        self.tokens: dict[int, list[int]] = {}
        self.drafts: set[int] = set()
        self.joined = 0

    def join(self) -> None:
        self.drafts.add(self.joined)
        self.state.draft_joined(self.joined)
        self.joined += 1

    def leave(self) -> None:
        if self.drafts:
            self.drafts.discard(draft := self.random.choice(sorted(self.drafts)))
            self.state.draft_left(draft)

    def open(self) -> None:
        tokens = self.random.choices(range(VOCAB), k=self.random.randint(1, 4))
        self.tokens[self.state.session_opened(tokens, PARAMS)] = tokens

    def close(self) -> None:
        if self.tokens:
            session = self.random.choice(list(self.tokens))
            del self.tokens[session]
            self.state.session_closed(session)

    def commit(self) -> None:
        for session, tokens in self.tokens.items():
            new = self.random.choices(range(3), k=self.random.randint(1, 3))
            tokens += new
            self.state.tokens_committed(session, new)

    def hear(self) -> None:
        """Growth below some committed prefix, well-formed, else anything; or a question."""
        random = self.random
        session = random.choice([*self.tokens] * 3 + [77])
        tokens = self.tokens.get(session, [1])
        base = handle(*tokens[: random.randint(max(0, len(tokens) - 3), len(tokens))])
        nodes = [(random.randrange(-1, i), random.randrange(3), random.random()) for i in range(random.randint(0, 9))]
        message: Up = NeedPrefix((session, 78)) if random.random() < 0.2 else growth(session, base, *nodes)
        if random.random() < 0.3:
            message = nonsense(message, random)
        self.state.received(random.choice([*self.drafts, -1]), message)

    def renew(self) -> None:
        self.state.renewal_due()

    def take(self) -> None:
        for draft, messages in self.state.take_messages().items():
            assert draft in self.drafts
            assert messages

    def check(self) -> None:
        self.state.check()
        assert self.state.sessions == len(self.tokens)
        for session, tokens in self.tokens.items():
            mirror = self.state.mirror(session)
            held = mirror.token[: mirror.size]
            assert mirror.token[ROOT] == tokens[-1]
            assert held.min() >= 0
            assert held.max() < VOCAB
            assert np.isfinite(mirror.probability[: mirror.size]).all()
            assert self.state.attached(session) == bool(self.drafts)


@given(
    st.randoms(),
    st.lists(st.sampled_from(["join", "leave", "open", "close", "commit", "commit", "hear", "hear", "renew", "take"])),
)
@settings(deadline=None, derandomize=True)
def test_any_events_leave_a_consistent_state(random: Random, names: list[str]) -> None:
    events = Events(random)
    events.open()
    for name in names:
        getattr(events, name)()
        events.check()


@pytest.mark.parametrize("seed", range(20))
def test_many_events_leave_a_consistent_state(seed: int) -> None:
    events = Events(Random(seed))
    names = ["join", "leave", "open", "open", "close", "commit", "hear", "renew", "take"]
    for name in events.random.choices(names, [1, 1, 1, 1, 1, 2, 6, 1, 1], k=200):
        getattr(events, name)()
        events.check()
    assert events.state.counters.grown > 0
