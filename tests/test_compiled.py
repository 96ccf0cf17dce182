"""Where machine code is kept."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import compiled


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The engine's, as if they were installed elsewhere; where a user's caches are, too."""
    shutil.copytree(Path(compiled.__file__).parent, tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "engine" / "compiled.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path


def test_machine_code_is_kept_for_the_sources_as_they_are(sources: Path) -> None:
    """A function has others in it, of other files."""
    here = compiled._kept_in(str(sources / "kept"))
    assert here is not None
    assert here.parent == sources / "kept"
    assert compiled._kept_in(str(sources / "kept")) == here
    changed = sources / "engine" / "drafters" / "past.py"
    changed.write_text(changed.read_text() + "\n")
    assert compiled._kept_in(str(sources / "kept")) != here


def test_machine_code_is_kept_for_them_wherever_there_is_room(sources: Path) -> None:
    """numba would turn to places of its own, where code of other sources is found."""
    kept = compiled._kept_in("")
    assert kept is not None
    assert kept.parent == sources / "engine" / "__pycache__"
    shutil.rmtree(kept.parent)
    kept.parent.touch()  # no folder
    elsewhere = compiled._kept_in(str(kept.parent))
    assert elsewhere == sources / "caches" / "paceline" / kept.name
    shutil.rmtree(sources / "caches")
    (sources / "caches").touch()
    assert compiled._kept_in("") is None


def test_what_can_be_kept_nowhere_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_KEPT", None)

    def twice(x: int) -> int:
        return 2 * x

    made: Any = compiled.compiled(twice)
    assert made(4) == 8
    assert made.stats.cache_path is None, "numba has found a place of its own"


def test_who_has_no_home_needs_none(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", str)  # what it is where nothing says where home is
    (sources / "engine" / "__pycache__").touch()
    assert compiled._kept_in("") is None
