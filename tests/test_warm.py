"""What replicas, and the class that vLLM loads, run before they serve.

Compiling takes a good part of a second, for which everybody's stream would stand still.
"""

import subprocess
import sys

import pytest

from cluster.draft import DraftReplica
from cluster.grpc_server import DraftServer
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner


@pytest.mark.parametrize("arguments", [[], ["alone"], ["turns"]])
def test_nothing_is_compiled_once_a_target_serves_with_a_draft_or_without(arguments: list[str]) -> None:
    assert compiled_late(*arguments) == []


def test_nothing_is_compiled_once_vllm_asks_for_drafts(draft: ModelRunner) -> None:
    replica = DraftReplica(ModelDrafter(draft))
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    try:
        assert compiled_late("proposer", server.address) == []
    finally:
        server.stop()
        replica.close()


def compiled_late(*arguments: str) -> list[str]:
    """What tests.warmed says."""
    command = [sys.executable, "-m", "tests.warmed", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()
