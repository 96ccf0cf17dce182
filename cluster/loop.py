"""A replica's loop: a thread that takes turns, and does between them what others ask for."""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from cluster.link import Link
from cluster.placement import Placement

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Loop:
    """Takes turns while there is something to do, else pauses until it is woken. Its methods may be called anywhere."""

    def __init__(
        self,
        name: str,
        placement: Placement,
        pause_s: float,
        turn: Callable[[], bool],
        end: Callable[[Exception | None], None],
        nice: int = 0,
    ) -> None:
        """turn: does something and returns True, or returns False; also called after every pause of `pause_s` seconds.

        end: called last, on the thread too, with what a turn raised; the loop ends by that or by `stop`.
        nice: by how much others who want its cores go first, see nice(2).
        """
        self._placement, self._nice = placement, nice
        self._pause_s = pause_s
        self._turn, self._end = turn, end
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._paused = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)  # ends a pause
        self._files: dict[Link[Any, Any], int] = {}  # readable when something came for the link
        self._idle = threading.Event()
        self._stopping = False
        self._began: float | None = None  # the present turn
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins taking turns."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the turn that runs and what was asked for, and waits for that."""
        self._stopping = True
        self.wake()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """False once it was stopped, or a turn failed."""
        return not self._stopping and self._thread.is_alive()

    @property
    def turn_s(self) -> float:
        """How many seconds the present turn has taken; 0 between turns."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def do(self, action: Callable[[], None]) -> None:
        """Has `action` done before the next turn; never if the loop has ended."""
        self._inbox.append(action)
        self.wake()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, found between two turns; raises what the question raises."""
        answer: Future[T] = Future()
        self.do(lambda: _answer(question, answer))
        while self._thread.is_alive() and not answer.done():
            wait([answer], timeout=0.1)
        return answer.result() if answer.done() else question()

    def wake(self) -> None:
        """There is something to do."""
        with self._lock:
            self._woken.set()
            self._idle.clear()
            if self._paused:
                os.eventfd_write(self._wakes, 1)

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until a turn found nothing to do and nothing came since: True; False after `timeout_s`."""
        return self._idle.wait(timeout_s)

    # from within a turn

    @property
    def asked(self) -> bool:
        """Whether somebody waits for this turn to end."""
        return bool(self._inbox) or self._stopping

    def listen(self) -> None:
        """From now on, `pause` ends for what comes in."""
        self._woken.clear()

    def hear(self, link: Link[Any, Any]) -> None:
        """A pause, and the rest after a turn that did nothing, end from now on when something came on the link."""
        link.set_notify(self.wake)
        file = link.attend()
        if file is not None and file >= 0:
            self._files[link] = file

    def forget(self, link: Link[Any, Any]) -> None:
        """Takes `hear` back; of a link that is closed, too."""
        link.set_notify(None)
        self._files.pop(link, None)

    def pause(self, seconds: float) -> bool:
        """Waits to be woken, or for something to read: True; False after `seconds`."""
        with self._lock:
            if self._woken.is_set():
                return True
            self._paused = True
        ready = True
        try:
            ready = _readable([self._wakes, *self._files.values()], seconds)
        finally:
            with self._lock:
                self._paused = False
                if self._woken.is_set():
                    os.eventfd_read(self._wakes)
                elif ready:
                    self._idle.clear()
        return ready

    def _run(self) -> None:
        failure = None
        try:
            self._placement.apply_to_thread()
            os.nice(self._nice)  # on Linux, of this thread alone
            self.listen()
            while not self._stopping:  # asked after listening: who stops it sets this, then wakes it
                self._began = time.monotonic()
                self._do_asked()
                more = self._turn()
                self._began = None
                if more:
                    self._idle.clear()  # what a turn reads itself wakes nobody
                else:
                    self._rest()
                self.listen()
            self._do_asked()
        except Exception as error:  # the edge of the thread: those who wait for it must be told
            logger.exception("%s failed", self._thread.name)
            failure = error
        try:
            self._end(failure)
        finally:
            os.close(self._wakes)  # nobody writes to it but during a pause

    def _do_asked(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _rest(self) -> None:
        with self._lock:
            if not self._woken.is_set():
                self._idle.set()
        self.pause(self._pause_s)


def _readable(files: Sequence[int], seconds: float) -> bool:
    """Waits for something to read in one of the files, or the end of one."""
    try:
        return bool(select.select(files, (), (), seconds)[0])
    except OSError:
        return True  # one was closed
    except ValueError:  # a file's number is too large for select, which alone waits for less than a millisecond
        poll = select.poll()
        for file in files:
            poll.register(file, select.POLLIN)
        return bool(poll.poll(1000 * seconds))


def _answer(question: Callable[[], T], answer: "Future[T]") -> None:
    try:
        answer.set_result(question())
    except Exception as error:  # noqa: BLE001 - it belongs to the one who asked
        answer.set_exception(error)
