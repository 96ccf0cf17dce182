"""Who is alive, by lease."""

from dataclasses import replace

import pytest

from cluster import registry as registry_module
from cluster.registry import LEASE_S, DraftEntry, Registry

FIRST = DraftEntry("first", "127.0.0.1:1", 3)
SECOND = DraftEntry("second", "127.0.0.1:2", 1)


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


def test_the_least_loaded_comes_first() -> None:
    registry = Registry()
    assert registry.drafts() == []
    registry.announce(FIRST)
    registry.announce(SECOND)
    assert registry.drafts() == [SECOND, FIRST]
    busier = replace(SECOND, sessions=9)
    registry.announce(busier)
    assert registry.drafts() == [FIRST, busier]


def test_a_lease_runs_out_unless_it_is_renewed(clock: Clock) -> None:
    registry = Registry()
    registry.announce(FIRST)
    registry.announce(SECOND)
    clock.now += LEASE_S
    assert registry.drafts() == [SECOND, FIRST]
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
