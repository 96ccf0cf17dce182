"""The program behind `make exact`: a sample of its cases, and going on where it was stopped."""

import sys
from pathlib import Path

import pytest

from tests import exact, matrix

ONE_CASE = "T=0.0 batch=4 ngram-3"
SHORT = ["matrix", "--part", "engine", "--prompts", "2", "--tokens", "6"]
ARGUMENTS = [*SHORT, "--jobs", "1", "--only", ONE_CASE]


def test_a_divergence_outside_invariant_mode_is_a_tie_in_bfloat16(prompts: list[exact.Tokens]) -> None:
    short = [prompt[:20] for prompt in prompts[:2]]
    cases = matrix.ties_matrix(short, 6, ["bfloat16"], [1.0], ["plain", "ngram-3"])
    assert [case.run()[1] for case in cases] == [[], []]


def test_what_was_equal_is_left_out_the_next_time_unless_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS, "--results", str(tmp_path / "there")])
    assert matrix.main() == 0
    assert ONE_CASE in capsys.readouterr().out
    assert matrix.main() == 0
    again = capsys.readouterr().out
    assert "left out: 1 (" in again
    assert "ngram-3" not in again
    monkeypatch.setattr(matrix, "digest", lambda conditions: "other")
    assert matrix.main() == 0
    assert "ngram-3" in capsys.readouterr().out


def test_cases_run_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--jobs", "2", "--only", "batch=4 ngram-3", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*SHORT, *asked])
    assert matrix.main() == 0
    printed = capsys.readouterr().out
    assert printed.count(": equal") == 3, printed


def test_a_wrong_output_is_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS, "--results", str(tmp_path / "there")])
    right = matrix.in_process

    def wrong(plain: matrix.Plain, make: object, batch: int) -> exact.Result:
        plain.outputs[1][3] += 1
        return right(plain, lambda: None, batch)

    monkeypatch.setattr(matrix, "in_process", wrong)
    assert matrix.main() == 1
    assert "position=3" in capsys.readouterr().out
    assert not (tmp_path / "there").exists()
