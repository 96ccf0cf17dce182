"""Rows of tokens, and nothing else, as sessions."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.content import ContentSessions
from cluster.target_state import TargetState
from tests.cluster_fixtures import row

VOCAB = 4096


@pytest.fixture
def sessions() -> Iterator[ContentSessions]:
    """Of a target without drafts, audited."""
    made = ContentSessions(TargetState(VOCAB), lease_s=10.0)
    yield made
    made.state.check()


def test_a_row_is_known_by_its_tokens_wherever_it_stands(sessions: ContentSessions) -> None:
    one, other = sessions.follow([row(1, 2), row(3, 4)], 0.0)
    assert sessions.follow([row(3, 4, 5), row(1, 2, 9)], 0.0) == [other, one]
    assert sessions.follow([row(1, 2, 9, 9)], 0.0) == [one]
    assert sessions.follow([row(3, 4, 5, 6, 7, 8), row(1, 2, 9, 9)], 0.0) == [other, one]  # it was away, and jumped
    assert sessions.state.tokens(other) == [3, 4, 5, 6, 7, 8]


def test_rows_with_the_same_text_have_a_session_each(sessions: ContentSessions) -> None:
    one, other = sessions.follow([row(1, 2), row(1, 2)], 0.0)
    assert one != other
    assert sessions.follow([row(1, 2, 3), row(1, 2, 4)], 0.0) == [one, other]
    assert sessions.follow([row(1, 2, 4, 5), row(1, 2, 3, 5)], 0.0) == [other, one]


def test_a_text_that_changed_is_another_session_and_the_old_one_ends_with_its_lease(sessions: ContentSessions) -> None:
    (one,) = sessions.follow([row(1, 2, 3)], 0.0)
    (other,) = sessions.follow([row(1, 9, 3)], 5.0)
    assert other != one
    assert sessions.state.sessions == 2
    assert sessions.follow([row(1, 9, 3, 4), row()], 11.0) == [other, -1]
    assert sessions.state.sessions == 1
    (back,) = sessions.follow([row(1, 2, 3)], 12.0)
    assert back not in (one, other)


def test_where_there_is_no_room_the_longest_unseen_gives_way_and_no_row_of_the_batch(sessions: ContentSessions) -> None:
    sessions.most = 2
    first, second = sessions.follow([row(1), row(2)], 0.0)
    assert sessions.follow([row(2)], 1.0) == [second]
    found = sessions.follow([row(3), row(2), row(4)], 2.0)
    assert found[0] not in (-1, first)
    assert found[1:] == [second, -1]
    assert sessions.state.sessions == 2


def test_however_long_a_step_was_the_rows_that_it_shows_keep_their_sessions(sessions: ContentSessions) -> None:
    one, other, _ = sessions.follow([row(1, 2), row(3, 4), row(5, 6)], 0.0)
    assert sessions.follow([row(3, 4, 5), row(1, 2, 9)], 100.0) == [other, one]
    assert sessions.state.sessions == 2


def test_what_no_row_shows_any_more_is_soon_given_up() -> None:
    sessions = ContentSessions(TargetState(VOCAB))
    ended, goes_on = sessions.follow([row(1), row(2)], 0.0)
    sessions.follow([row(2, 3)], 0.4)
    assert sessions.holds(ended)
    sessions.follow([row(2, 3, 4)], 0.6)
    assert not sessions.holds(ended)
    assert sessions.holds(goes_on)
    assert sessions.state.sessions == 1


class Looked(dict[int, Any]):
    """Counts how often all of it is looked at."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_where_many_rows_find_no_room_one_of_them_looks_for_it(sessions: ContentSessions) -> None:
    sessions.most, sessions._held = 2, Looked()
    rows = [row(token) for token in range(50)]
    sessions.follow(rows, 0.0)
    before = sessions._held.looks
    assert sessions.follow(rows, 1.0)[2:] == [-1] * 48
    assert sessions._held.looks - before < 5
