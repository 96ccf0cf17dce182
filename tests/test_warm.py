"""What replicas run before they serve."""

import subprocess
import sys


def test_nothing_is_compiled_once_a_pair_serves() -> None:
    """Compiling takes a good part of a second, for which everybody's stream would stand still."""
    found = subprocess.run([sys.executable, "-m", "tests.warmed"], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
