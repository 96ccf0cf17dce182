"""Where machine code is kept."""

import shutil
from pathlib import Path

import pytest

from engine import compiled


def test_machine_code_is_kept_for_the_sources_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function has others in it, of other files."""
    own = Path(compiled.__file__).parent
    shutil.copytree(own, tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    here = compiled._kept_in("/tmp/kept")
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "engine" / "compiled.py"))
    assert compiled._kept_in("/tmp/kept") == here
    changed = tmp_path / "engine" / "drafters" / "past.py"
    changed.write_text(changed.read_text() + "\n")
    assert compiled._kept_in("/tmp/kept") != here
