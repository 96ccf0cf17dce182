"""The load test sends a key that a server knows by its digest too, and complains of what did not hold."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.overload import KEPT, complaints, read_key


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


GOOD = {"statuses": {200: 90, 429: 10}, "refused_without_retry_after": 0, "kept": KEPT, "ready_after": True}


def test_of_a_load_that_was_held_up_to_there_is_no_complaint() -> None:
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ({"statuses": {200: 100}}, "statuses: {200: 100}"),
        ({"statuses": {200: 90, 429: 9, 500: 1}}, "statuses: {200: 90, 429: 9, 500: 1}"),
        ({"refused_without_retry_after": 1}, "some were refused without Retry-After"),
        ({"kept": 0.5}, "50% of the peak were kept"),
        ({"ready_after": False}, "the server is not ready any more"),
    ],
)
def test_what_did_not_hold_under_load_is_a_complaint(found: dict[str, Any], complaint: str) -> None:
    assert complaints({**GOOD, **found}) == [complaint]
