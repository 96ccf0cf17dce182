"""Who is alive, by lease."""

import pytest

from cluster import registry as registry_module
from cluster.measures import Sample
from cluster.registry import LEASE_S, DraftEntry, Registry

FIRST = DraftEntry("first", "127.0.0.1:1")
SECOND = DraftEntry("second", "127.0.0.1:2")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(registry_module, "time", clock)
    return clock


def test_nobody_has_to_ask_for_reports_of_before_to_go(clock: Clock) -> None:
    registry = Registry()
    for start in range(5):
        registry.report(f"draft-{start}", [Sample("paceline_drafts", 1)])
        clock.now += LEASE_S + 1
    assert len(registry._reports) == 1


def test_a_lease_runs_out_unless_it_is_renewed(clock: Clock) -> None:
    registry = Registry()
    registry.announce(FIRST)
    registry.announce(SECOND)
    clock.now += LEASE_S
    assert registry.drafts() == [FIRST, SECOND]
    registry.announce(FIRST)
    clock.now += 0.1
    assert registry.drafts() == [FIRST]
    clock.now += LEASE_S
    assert registry.drafts() == []
    registry.announce(SECOND)
    assert registry.drafts() == [SECOND]


def test_who_withdraws_is_gone_at_once() -> None:
    registry = Registry()
    registry.announce(FIRST)
    registry.withdraw("first")
    registry.withdraw("first")
    assert registry.drafts() == []
