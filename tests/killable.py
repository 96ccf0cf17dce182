"""A target and a draft as processes that can be killed: what tests.faults disturbs.

A process gets its orders through a pipe. In the end it audits itself, and fails when anything is left.
"""

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from cluster.draft import DraftReplica
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.target import TargetReplica
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.types import GenerationRequest, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until


@dataclass(frozen=True)
class Cancel:
    """Orders a target to end a request."""

    request_id: str


@dataclass(frozen=True)
class Join:
    """Orders a target to link to the draft at this address."""

    address: str


Order = GenerationRequest | Cancel | Join | None  # None: end, with nothing left


class Child:
    """A process at the other end of a pipe. Forked from one that has most imported, it starts in a second or two."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["cluster.draft", "cluster.grpc_server", "cluster.target", "engine.drafters.model"]
        )
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def heard(self) -> bool:
        """Whether it said something, or ended."""
        return self._pipe.poll()

    def say(self, order: Order) -> None:
        self._pipe.send(order)

    def hear(self) -> TokenChunk:
        """The next chunk of any request. Raises EOFError when the process has ended."""
        assert self._pipe.poll(PATIENCE_S), "nothing comes any more"
        chunk: TokenChunk = self._pipe.recv()
        return chunk

    def address(self) -> str:
        """The first thing that a draft says."""
        assert self._pipe.poll(PATIENCE_S), "the draft does not start"
        address: str = self._pipe.recv()
        return address

    def kill(self) -> None:
        """By SIGKILL. What it said before can still be heard."""
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """It ends by itself. Raises AssertionError when its audit failed."""
        self.say(None)
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0, f"something is left: exit code {self._process.exitcode}"


def run_draft(pipe: Connection) -> None:
    """A draft's process: says its address, serves until it is told to end."""
    torch.set_num_threads(1)
    runner = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=16 * 1024)
    replica = DraftReplica(ModelDrafter(runner))
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    pipe.send(server.address)
    pipe.recv()
    until(lambda: (replica.stats().sessions, replica.stats().streams) == (0, 0), "sessions and streams end")
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    assert runner.pool.used_pages == 0, "the draft holds pages"
    server.stop()
    replica.close()
    _check_threads()


def run_target(pipe: Connection) -> None:
    """A target's process: runs what it gets and says the chunks until it is told to end."""
    torch.set_num_threads(1)
    runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=8 * 1024)
    replica = TargetReplica(runner, exact.goodput(), max_batch=16)
    joined = 0
    while (order := pipe.recv()) is not None:
        match order:
            case GenerationRequest():
                replica.submit(order, pipe.send)  # the loop's thread alone writes to the pipe
            case Cancel():
                replica.cancel(order.request_id)
            case Join():
                replica.add_link(connect(order.address, PATIENCE_S))
                joined += 1
    assert replica.wait_idle(PATIENCE_S)
    until(lambda: replica.stats().drafts == min(joined, 1), "the links of dead drafts are dropped")
    replica.check()
    assert replica.stats().running == replica.stats().waiting == 0, "a request is left"
    assert runner.pool.used_pages == 0, "the target holds pages"
    replica.close()
    _check_threads()


def _check_threads() -> None:
    """Raises AssertionError when a replica or a link has left a thread."""

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]

    until(lambda: not left(), f"threads end: {left()}")
