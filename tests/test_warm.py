"""What replicas, and the class that vLLM loads, run before they serve.

Compiling takes a good part of a second, for which everybody's stream would stand still.
"""

import subprocess
import sys
from collections.abc import Iterator
from subprocess import PIPE, Popen

import pytest

from cluster.draft import DraftReplica
from cluster.grpc_server import DraftServer
from cluster.warm import warm_up
from engine.budget import CostModel
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from tests import exact

pytestmark = pytest.mark.timeout(900)  # where nothing is compiled yet
TARGETS = [(), ("alone",), ("turns",)]
LOCAL = ["heads", "early-exit", "jacobi", "suffix", "ngram"]


@pytest.fixture(scope="module")
def started() -> Iterator[dict[tuple[str, ...], Popen[str]]]:
    """All of them at once: each compiles for a while on one core."""
    processes = {arguments: start(*arguments) for arguments in TARGETS}
    yield processes
    for process in processes.values():
        with process:
            process.kill()


@pytest.mark.parametrize("arguments", TARGETS)
def test_nothing_is_compiled_once_a_target_serves_with_a_draft_or_without(
    arguments: tuple[str, ...], started: dict[tuple[str, ...], Popen[str]]
) -> None:
    assert compiled_late(started[arguments]) == []


@pytest.mark.parametrize("name", LOCAL)
def test_nothing_is_compiled_once_a_target_guesses_by_itself(name: str) -> None:
    assert compiled_late(start("local", name)) == []


def test_nothing_is_compiled_once_text_is_generated() -> None:
    assert compiled_late(start("generate")) == []


def test_nothing_is_compiled_once_vllm_asks_for_drafts(draft: ModelRunner) -> None:
    replica = DraftReplica(ModelDrafter(draft))
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    try:
        assert compiled_late(start("proposer", server.address)) == []
    finally:
        server.stop()
        replica.close()


def start(*arguments: str) -> Popen[str]:
    command = [sys.executable, "-m", "tests.warmed", *arguments]
    return subprocess.Popen(command, text=True, stdout=PIPE, stderr=PIPE)


def compiled_late(process: Popen[str]) -> list[str]:
    """What tests.warmed says."""
    found, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    return found.split()


@pytest.mark.parametrize("kv_tokens", [256, 4096])
def test_what_further_sequences_take_is_measured_where_there_is_room_for_some(kv_tokens: int) -> None:
    runner, cost = ModelRunner(exact.DRAFT, kv_tokens=kv_tokens), CostModel()
    warm_up(runner, cost)
    assert cost.table(128)[128] > cost.table(1)[1]
    assert (cost.milliseconds(16, 16) > cost.table(16)[16]) == (kv_tokens > 256)
    assert runner.pool.used_pages == 0
    runner.pool.check()
