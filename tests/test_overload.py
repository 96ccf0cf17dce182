"""The load test sends a key that a server knows by its digest too."""

from pathlib import Path

import pytest

from benchmarks.overload import read_key


def test_the_first_key_that_is_no_digest_is_sent(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sha256:00ff\nsecret\nother\n")
    assert read_key(keys) == {"Authorization": "Bearer secret"}
    assert read_key(None) == {}


def test_a_file_of_digests_alone_says_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sha256:00ff\n")
    with pytest.raises(SystemExit, match="only digests"):
        read_key(keys)
