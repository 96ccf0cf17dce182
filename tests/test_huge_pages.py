"""Huge pages: memory is moved as it is, and only where there was some."""

import mmap
import re
from pathlib import Path

import pytest

from engine import huge_pages
from engine.huge_pages import use_huge_pages

MIB = 1024 * 1024
ROLLUP = Path("/proc/self/smaps_rollup")


def kilobytes(name: str) -> int:
    """A line of what the kernel says of this process' memory."""
    found = re.search(rf"^{name}: +(\d+) kB", ROLLUP.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def reserved(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@pytest.mark.skipif(not ROLLUP.exists(), reason="only Linux says what a process' memory is")
def test_what_was_written_is_kept_and_what_was_not_takes_no_memory() -> None:
    use_huge_pages()  # what other tests have left
    with reserved(16 * MIB) as written, reserved(256 * MIB) as untouched:
        content = bytes(range(256)) * (len(written) // 256)
        written[:] = content
        huge, resident = kilobytes("AnonHugePages"), kilobytes("Rss")
        use_huge_pages()
        assert written[:] == content
        assert kilobytes("Rss") - resident < 64 * 1024
        if kilobytes("AnonHugePages") == huge:
            pytest.skip("no huge pages here, or a Linux before 6.1")
        assert kilobytes("AnonHugePages") - huge >= 14 * 1024  # but for the two ends
        assert not any(untouched[:: 2 * MIB])


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "maps")
    use_huge_pages()
