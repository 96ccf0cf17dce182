"""The draft's state machine: events in, commands out; and both state machines together over a link that misbehaves."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import draft_state
from cluster.draft_state import (
    LEASE_S,
    MOST_TOLD,
    REFUSED_S,
    CloseSession,
    CommitTokens,
    DraftState,
    OpenSession,
    resend,
)
from engine.prefix import HandleChain
from engine.tree import TokenTree
from engine.types import Close, Commit, Down, NeedPrefix, Open, Renew, SamplingParams
from tests.cluster_fixtures import VOCAB, DraftSide, World
from tests.faulty_link import nonsense

PARAMS = SamplingParams(temperature=1.0, seed=3)
A, B = 1, 2  # streams


def commit(session: int, tokens: list[int], tail: int, mirrored: bool = True) -> Commit:
    """A commit of a sequence that now is `tokens`, whose last `tail` tokens it carries."""
    return Commit(session, HandleChain(tokens).handle, tuple(tokens[len(tokens) - tail :]), mirrored)


def opened(*sessions: int, tokens: tuple[int, ...] = (1, 2, 3), most_told: int = MOST_TOLD) -> DraftState:
    """A state with sessions on stream A; their keys count from 0."""
    state = DraftState(most_told)
    for key, session in enumerate(sessions):
        assert state.received(A, Open(session, tokens, PARAMS), 0.0) == [OpenSession(key, tokens, PARAMS)]
    return state


def test_open_commit_close() -> None:
    state = opened(7)
    assert state.stream_of(0) == A
    assert state.received(A, commit(7, [1, 2, 3, 4, 5], 2), 0.0) == [CommitTokens(0, (4, 5), resend=False)]
    assert state.received(A, Close((7, 8)), 0.0) == [CloseSession(0)]
    assert state.sessions == 0
    state.check()


def test_a_commit_makes_up_for_lost_ones_by_its_tail() -> None:
    state = opened(7)
    longer = [1, 2, 3, 4, 5, 6, 7]
    assert state.received(A, commit(7, longer, 6), 0.0) == [CommitTokens(0, (4, 5, 6, 7), resend=False)]
    assert state.questions(A) == []


def test_doubled_and_late_commits_change_nothing() -> None:
    state = opened(7)
    early, late = commit(7, [1, 2, 3, 4], 2), commit(7, [1, 2, 3, 4, 5], 2, mirrored=False)
    state.received(A, early, 0.0)
    assert state.received(A, late, 0.0) == [CommitTokens(0, (5,), resend=True)]
    for message in (late, early, Open(7, (1, 2, 3), PARAMS), Open(7, (1, 2), PARAMS)):
        assert state.received(A, message, 0.0) == []
    assert state.questions(A) == []


@pytest.mark.parametrize(
    "message",
    [
        commit(7, [1, 2, 3, 4, 5, 6], 2),  # a gap
        commit(7, [1, 9, 3, 4], 1),  # another sequence
        commit(7, [1, 9], 2),  # another, shorter one
        commit(8, [1, 2, 3, 4], 4),  # an unknown session
        Renew((8,)),
    ],
)
def test_what_does_not_match_is_asked_for_once(message: Down) -> None:
    state = opened(7)
    for _ in range(3):
        assert state.received(A, message, 0.0) == []
    session = 8 if isinstance(message, Renew) else message.session  # type: ignore[union-attr]
    assert state.questions(B) == []
    assert state.questions(A) == [NeedPrefix((session,))]
    assert state.questions(A) == []
    state.check()


def test_the_answer_to_a_question_replaces_the_session() -> None:
    state = opened(7)
    whole = (1, 9, 3, 4)
    assert state.received(A, Open(7, whole, PARAMS), 0.0) == [CloseSession(0), OpenSession(1, whole, PARAMS)]
    assert state.received(A, commit(7, [*whole, 5], 1), 0.0) == [CommitTokens(1, (5,), resend=False)]
    state.check()


def test_session_ids_belong_to_their_stream() -> None:
    state = opened(7)
    assert state.received(B, Open(7, (5, 6), PARAMS), 0.0) == [OpenSession(1, (5, 6), PARAMS)]
    assert state.received(B, Close((7,)), 0.0) == [CloseSession(1)]
    assert state.stream_closed(B) == []
    assert state.stream_closed(A) == [CloseSession(0)]
    state.check()


def test_sessions_that_nobody_speaks_of_end() -> None:
    state = opened(7, 8, 9)
    state.received(A, Renew((8,)), 5.0)
    state.received(A, commit(9, [1, 2, 3, 4], 1), 6.0)
    assert state.expire(LEASE_S) == []
    assert state.expire(LEASE_S + 1) == [CloseSession(0)]
    assert state.expire(LEASE_S + 5.5) == [CloseSession(1)]
    assert state.expire(LEASE_S + 7) == [CloseSession(2)]
    state.check()


def test_sessions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_state, "MAX_SESSIONS", 2)
    state = opened(7, 8)
    assert state.received(A, Open(9, (1,), PARAMS), 0.0) == []
    state.received(A, Renew((10, 11, 12)), 0.0)
    assert state.questions(A) == [NeedPrefix((10, 11))]
    state.received(A, Close((7,)), 0.0)
    assert state.received(A, Open(9, (1,), PARAMS), 0.5 * REFUSED_S) == []
    assert len(state.received(A, Open(9, (1,), PARAMS), REFUSED_S)) == 1


def test_a_refused_session_is_unknown_again_after_a_while() -> None:
    state = opened(7)
    state.refused(0, now=1.0)
    state.check()
    assert state.growth(0, TokenTree(3)) is None
    for now in (1.0, 1.0 + 0.9 * REFUSED_S):  # its prefix is no use so soon
        assert state.received(A, commit(7, [1, 2, 3, 4], 1), now) == []
        assert state.questions(A) == []
        assert state.received(A, Open(7, (1, 2, 3, 4), PARAMS), now) == []
    assert state.received(A, commit(7, [1, 2, 3, 4, 5], 1), 1.0 + REFUSED_S) == []
    assert state.questions(A) == [NeedPrefix((7,))]
    assert len(state.received(A, Open(7, (1, 2, 3, 4, 5), PARAMS), 1.0 + REFUSED_S)) == 1


def test_only_the_best_nodes_are_told_and_the_others_when_they_are_among_them() -> None:
    state, tree = opened(7, most_told=2), TokenTree(3)
    tree.add_many([0, 0, 1], [4, 5, 6], [0.6, 0.3, 0.9])
    first = state.growth(0, tree)
    assert first is not None
    assert (first.parents.tolist(), first.tokens.tolist()) == ([-1, 0], [4, 6])
    assert state.growth(0, tree) is None
    tree.add_many([2], [8], [0.9])  # below the node that was left out, which comes along
    tree.confidence[2], tree.probability[2], tree.probability[4] = 0.9, 0.9, 0.81
    second = state.growth(0, tree)
    assert second is not None
    assert (second.parents.tolist(), second.tokens.tolist()) == ([-1, 0], [5, 8])


def test_growth_is_told_once_until_asked_for_again() -> None:
    state = opened(7)
    tree = TokenTree(3)
    assert state.growth(0, tree) is None
    first = tree.add(0, 4, 0.5)
    tree.add(first, 5, 0.5)
    told = state.growth(0, tree)
    assert told is not None
    assert (told.session, told.base) == (7, HandleChain((1, 2, 3)).handle)
    assert (told.parents.tolist(), told.tokens.tolist(), told.confidences.tolist()) == ([-1, 0], [4, 5], [0.5, 0.5])
    assert state.growth(0, tree) is None
    tree.add(first, 6, 0.25)
    told = state.growth(0, tree)
    assert told is not None
    assert (told.parents.tolist(), told.tokens.tolist()) == ([-1, 0], [4, 6])  # with the path that leads there
    resend(tree)
    told = state.growth(0, tree)
    assert told is not None
    assert told.tokens.tolist() == [4, 5, 6]


tokens = st.lists(st.integers(0, 3), max_size=6)
handles = st.builds(lambda tokens: HandleChain(tokens).handle, tokens)
sessions = st.integers(0, 2)
messages: st.SearchStrategy[Down] = st.one_of(
    st.builds(Open, sessions, tokens.map(tuple), st.just(PARAMS)),
    st.builds(Commit, sessions, handles, tokens.map(tuple), st.booleans()),
    st.builds(Renew, st.lists(sessions, max_size=3).map(tuple)),
    st.builds(Close, st.lists(sessions, max_size=3).map(tuple)),
)


@given(st.lists(st.tuples(st.integers(0, 1), messages, st.randoms(), st.sampled_from("mmmmmgrcx")), max_size=40))
@settings(deadline=None, derandomize=True)
def test_any_messages_leave_a_consistent_state(events: list[tuple[int, Down, Random, str]]) -> None:
    """m: a message, g: a garbled one, r: the drafter refuses a session, c: a stream ends, x: time passes."""
    side, now = DraftSide(), 0.0
    for stream, message, random, kind in events:
        now += LEASE_S / 2 if kind == "x" else 0.1
        if kind == "r" and side.drafter.tokens:
            key = random.choice(list(side.drafter.tokens))
            side.drafter.close(key)
            side.state.refused(key, now)
        elif kind == "c":
            side.apply(side.state.stream_closed(stream))
        elif kind == "x":
            side.apply(side.state.expire(now))
        else:
            heard = nonsense(message, random) if kind == "g" else message
            side.apply(side.state.received(stream, heard, now))
        side.drafter.grow()
        side.check()
        for key, held in side.drafter.tokens.items():
            told = side.state.growth(key, side.drafter.tree(key))
            assert told is None or told.base == HandleChain(held).handle
    for stream in range(2):
        side.state.questions(stream)
        side.apply(side.state.stream_closed(stream))
    assert side.drafter.tokens == {}


ACTIONS = ["open", "close", "step", "step", "step", "step", "grow", "grow", "grow", "send", "send", "send"]
ACTIONS += ["arrive", "arrive", "arrive", "drop", "double", "reorder", "garble", "renew", "lose", "expire"]


def disturb(world: World, action: str, random: Random) -> None:
    """One event of a world in trouble."""
    live = list(world.tokens)
    if action == "open":
        world.open(random.randrange(VOCAB * VOCAB))
    elif action in ("close", "step") and live:
        getattr(world, action)(random.choice(live))
    elif action == "grow":
        random.choice(world.drafts).drafter.grow()
    elif action == "send":
        world.send()
    elif action == "renew":
        world.target.renewal_due()
    elif action == "lose":
        world.link(random.randrange(len(world.drafts)))
    elif action == "expire":
        world.now += LEASE_S / 2
        for side in world.drafts:
            side.apply(side.state.expire(world.now))
    elif world.linked:
        world.deliver(random.choice(list(world.linked)), random, None if action == "arrive" else action)


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.randoms()), max_size=120))
@settings(deadline=None, derandomize=True)
def test_mirrors_heal_after_any_trouble(events: list[tuple[str, Random]]) -> None:
    world = World()
    for index in range(2):
        world.link(index)
    world.open(7)
    for action, random in events:
        disturb(world, action, random)
        world.check()
    world.open(11)
    assert all(world.calm())


def test_lost_growth_comes_again_by_the_next_commit() -> None:
    world = World(drafts=1)
    world.link(0)
    world.open(7)
    (session,) = world.tokens
    world.exchange()
    for _ in range(4):
        world.drafts[0].drafter.grow()
    world.send()
    world.up[0].clear()
    assert not world.step(session)
    for _ in range(2):  # the commit, then the answer to it; nothing grows
        world.exchange()
    assert world.step(session)


@pytest.mark.parametrize("seed", range(10))
def test_mirrors_heal_after_long_trouble(seed: int) -> None:
    random = Random(seed)
    world = World(drafts=3)
    for index in range(3):
        world.link(index)
    for _ in range(600):
        disturb(world, random.choice(ACTIONS), random)
    world.check()
    world.open(11)
    assert all(world.calm())


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_ends_up_with_the_targets_sessions_alone(seed: int) -> None:
    random = Random(seed)
    world = World(drafts=1)
    world.link(0)
    for _ in range(300):
        disturb(world, random.choice(ACTIONS), random)
    world.calm()
    world.now += LEASE_S - 1
    world.target.renewal_due()
    world.calm(1)
    world.exchange()
    world.now += 2
    side = world.drafts[0]
    side.apply(side.state.expire(world.now))
    world.check()
    assert sorted(side.drafter.tokens.values()) == sorted(world.tokens.values())
