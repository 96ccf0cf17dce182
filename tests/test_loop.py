"""The loop that replicas run: what is asked of it is done, and it never sleeps on."""

import fcntl
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from cluster.loop import Loop
from cluster.placement import Placement
from tests.cluster_fixtures import PATIENCE_S, until


class Worker:
    """Counts down its work, one piece a turn."""

    def __init__(self) -> None:
        self.work = 0
        self.ended: list[Exception | None] = []
        self.loop = Loop("paceline-test", Placement(), 10 * PATIENCE_S, self._turn, self.ended.append)
        self.loop.start()

    def add(self, work: int) -> None:
        self.work += work

    def _turn(self) -> bool:
        if self.work == 13:
            raise ValueError("thirteen")
        busy = self.work > 0
        self.work -= busy
        return busy


def test_what_is_asked_is_answered_between_turns_and_stopping_is_never_slept_through() -> None:
    for round in range(300):
        worker = Worker()
        worker.loop.do(lambda worker=worker: worker.add(3))  # type: ignore[misc]
        if round % 3:
            assert worker.loop.ask(lambda worker=worker: worker.work) <= 3  # type: ignore[misc]
        if round % 2:
            assert worker.loop.wait_idle(PATIENCE_S)
            assert worker.work == 0
            assert worker.loop.alive
        worker.loop.stop()
        assert not worker.loop.alive
        assert worker.ended == [None]


def test_idle_means_that_everything_asked_is_done() -> None:
    worker = Worker()
    for _ in range(300):
        worker.loop.do(lambda: worker.add(2))
        assert worker.loop.wait_idle(PATIENCE_S)
        assert worker.work == 0
    worker.loop.stop()


def test_a_question_that_raises_harms_only_the_one_who_asked() -> None:
    worker = Worker()
    with pytest.raises(ZeroDivisionError):
        worker.loop.ask(lambda: 1 // 0)
    assert worker.loop.alive
    worker.loop.stop()
    with pytest.raises(ZeroDivisionError):  # asked of a loop that ended: answered by the one who asks
        worker.loop.ask(lambda: 1 // 0)


def test_a_loop_that_may_not_run_on_its_cores_ends_and_says_so() -> None:
    ended: list[Exception | None] = []
    loop = Loop("nowhere", Placement(cores=(100_000,)), 1.0, lambda: False, ended.append)
    loop.start()
    loop.stop()
    (failure,) = ended
    assert isinstance(failure, OSError)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this for single threads")
def test_a_loop_lets_others_go_first_alone_among_its_process_threads() -> None:
    def turn() -> bool:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return False

    found: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    loop = Loop("paceline-test", Placement(), PATIENCE_S, turn, lambda failure: None, nice=3)
    loop.start()
    until(lambda: len(found) > 0, "a turn")
    loop.stop()
    assert set(found) == {min(before + 3, 19)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_turn_that_raises_ends_the_loop() -> None:
    worker = Worker()
    worker.loop.do(lambda: worker.add(13))
    until(lambda: not worker.loop.alive, "the loop ends")
    worker.loop.stop()
    (failure,) = worker.ended
    assert isinstance(failure, ValueError)
    assert worker.loop.ask(lambda: 7) == 7


def test_work_goes_on_while_nobody_asks() -> None:
    worker = Worker()
    asked = threading.Event()
    worker.loop.do(lambda: worker.add(12))
    worker.loop.do(asked.set)
    assert asked.wait(PATIENCE_S)
    assert worker.loop.wait_idle(PATIENCE_S)
    assert worker.work == 0
    worker.loop.stop()


def test_a_turn_that_hangs_shows_by_its_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def turn() -> bool:
        begun.set()
        go_on.wait(PATIENCE_S)
        return False

    loop = Loop("paceline-test", Placement(), 10 * PATIENCE_S, turn, lambda failure: None)
    assert loop.turn_s == 0
    loop.start()
    assert begun.wait(PATIENCE_S)
    until(lambda: loop.turn_s > 0.02, "the turn goes on")
    assert loop.alive
    go_on.set()
    until(lambda: loop.turn_s == 0, "the turn ended")
    loop.stop()


@pytest.mark.parametrize("first", [0, 1024], ids=["a file that select can wait for", "one that it can't"])
def test_what_comes_on_a_link_ends_a_rest(first: int) -> None:
    """Without another thread's help: the end that is heard has none that reads while it is read often."""
    here, there = socket.socketpair()
    heard: list[bytes] = []

    class Heard:
        """As much of a link as a loop needs."""

        def __init__(self) -> None:
            self.file = fcntl.fcntl(here, fcntl.F_DUPFD, first)

        def set_notify(self, notify: Any) -> None:
            pass

        def attend(self) -> int:
            return self.file

    def turn() -> bool:
        with suppress(BlockingIOError):
            heard.append(here.recv(1))
            return True
        return False

    here.setblocking(False)
    link: Any = Heard()
    loop = Loop("paceline-test", Placement(), 10 * PATIENCE_S, turn, lambda failure: None)
    loop.do(lambda: loop.hear(link))
    loop.start()
    for number in range(20):
        assert loop.wait_idle(PATIENCE_S)
        there.send(bytes([number]))
        until(lambda number=number: len(heard) > number, "it is heard")  # type: ignore[misc]
    loop.ask(lambda: loop.forget(link))
    there.send(b"x")
    assert loop.wait_idle(PATIENCE_S)
    loop.stop()
    os.close(link.file)
    for each in (here, there):
        each.close()
