"""The drafting benchmark measures what it says, on one prompt."""

from pathlib import Path

import pytest

from benchmarks.drafting import Settings, load, measure, select
from benchmarks.drafting_report import END, START, Row, automatic, draw, pooled, update
from benchmarks.drafting_texts import repeated
from engine.types import InvalidRequest
from tests import exact

_NAMES = (("model", "chain-3"), ("ngram", "goodput"), ("auto", "effort"))
_KEYS = {
    *("drafter", "window", "workload", "temperature", "tokens_per_step", "acceptance", "tokens_per_s", "equal"),
    *("tokens_per_s_quartiles", "over_plain", "over_plain_quartiles", "over_transformers"),
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    models = load(exact.TARGET, exact.DRAFT, exact.PROMPTS, "float32", invariant=True)
    parts = measure(models, Settings(1, 0, 24, (0.0, 1.0), _NAMES, workloads=("code",)))
    return [row for part in parts for row in part]


def test_every_contender_has_a_row_with_the_output_of_plain_decoding(rows: list[Row]) -> None:
    found = [(row["drafter"], row["window"], row["temperature"]) for row in rows]
    names = [("plain", "none"), ("transformers-assisted", "dynamic"), *_NAMES]
    assert found == [(*name, temperature) for temperature in (0.0, 1.0) for name in names]
    for row in rows:
        assert row.keys() >= _KEYS
        sampled_elsewhere = row["drafter"] == "transformers-assisted" and row["temperature"] > 0
        assert row["equal"] is (None if sampled_elsewhere else True), row


def test_rows_say_what_drafting_did(rows: list[Row]) -> None:
    plain, peer, model, *_ = rows
    assert (plain["tokens_per_step"], plain["over_plain"], plain["acceptance"]) == (1, 1, None)
    assert model["tokens_per_step"] > 1
    assert 0 < model["acceptance"] <= 1
    assert peer["tokens_per_step"] > 1
    assert peer["over_transformers"] == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="drafters: 'oracle' is none of model"):
        list(select("model,oracle", "all"))


def test_the_automatic_choice_is_held_against_the_best_row_and_plain(rows: list[Row]) -> None:
    made = [row | {"over_plain": speed} for row, speed in zip(rows[:5], (1.0, 3.0, 1.5, 1.2, 1.4), strict=True)]
    assert automatic(made) == ["SHORT: code, T = 0: auto is 1.40 of plain, 0.93 of the best (model, chain-3)"]
    made[4]["over_plain"] = 1.45
    assert automatic(made)[0].startswith("ok:")


def test_runs_of_different_prompts_are_judged_together(rows: list[Row]) -> None:
    def run(**speeds: list[float]) -> list[Row]:
        return [rows[2] | {"drafter": name, "window": "w", "over_plain_each": each} for name, each in speeds.items()]

    runs = run(auto=[2.0, 2.0], model=[2.0, 4.0], here=[9.0, 9.0]), run(auto=[2.0], model=[0.5])
    expected = "code, T = 0, 3 prompts: auto is 2.00 of plain, 1.26 of the best (model, w), standard error 0.61"
    assert pooled(runs) == [f"ok: {expected}"]
    runs = run(auto=[0.9], model=[1.0]), run(auto=[0.9], model=[1.0])
    assert pooled([*runs, []]) == ["left out: code, T = 0, which not all files have"]
    assert pooled(runs)[0].startswith("SHORT: code, T = 0, 2 prompts: auto is 0.90 of plain, 0.90 of the best")


def test_the_best_row_is_picked_on_other_prompts_than_it_is_measured_on(rows: list[Row]) -> None:
    each = {"auto": [1.4, 1.4, 1.4, 1.4], "lucky": [1.0, 3.0, 1.0, 1.0], "steady": [1.4, 1.4, 1.4, 1.4]}
    made = [
        rows[2] | {"drafter": name, "prompts": 4, "over_plain": 1.4, "over_plain_each": each[name]} for name in each
    ]
    made[1]["over_plain"] = 1.5
    (line,) = automatic(made)
    assert line.startswith("SHORT: code, T = 0: auto is 1.40 of plain, 0.93 of the best (lucky, chain-3); ")
    assert line.endswith("held against it on the others: 1.00 (1.00-1.40)")


def test_a_window_of_one_drafter_is_nobody_elses() -> None:
    assert ("model", "effort") not in select("all", "all")
    assert list(select("auto", "all")) == [("auto", "effort")]


def test_a_page_and_a_picture_are_made_of_rows(rows: list[Row], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    update(page, rows)
    text = page.read_text()
    assert "old" not in text
    assert "| `model` |" in text
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    update(page, rows)
    assert page.read_text() == text
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_repetition_is_what_the_prompt_holds_too() -> None:
    assert repeated([1, 2, 3, 4, 5], [2, 3, 4, 5, 9]) == pytest.approx(0.2)  # "2 3 4 5"
