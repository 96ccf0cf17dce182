"""What replicas run before they serve."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [[], ["alone"]])
def test_nothing_is_compiled_once_a_target_serves_with_a_draft_or_without(arguments: list[str]) -> None:
    """Compiling takes a good part of a second, for which everybody's stream would stand still."""
    command = [sys.executable, "-m", "tests.warmed", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
