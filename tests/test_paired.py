"""The benchmark that takes every prompt through all variants: what its figures mean, and that it runs."""

import json
from pathlib import Path

import pytest

from benchmarks import paired
from benchmarks.paired import Row, Variant

ROOT = Path(__file__).parent.parent


def row(rates: list[list[float]]) -> Row:
    """So many tokens per second for each prompt, in each round."""
    return Row("any", 0.0, rates=rates)


def test_a_ratio_is_of_the_same_prompts_and_has_an_error() -> None:
    first = row([[100.0], [50.0], [200.0]])
    ratio, error = row([[110.0], [55.0], [220.0]]).over(first)
    assert ratio == pytest.approx(1.1)
    assert error == pytest.approx(0.0, abs=1e-6)  # every prompt says the same, however different they are
    ratio, error = row([[110.0], [45.0], [220.0]]).over(first)
    assert ratio == pytest.approx((1.1 * 0.9 * 1.1) ** (1 / 3))
    assert 0.05 < error < 0.1
    again = row([2 * rates for rates in ([110.0], [45.0], [220.0])])
    assert again.over(row([2 * rates for rates in first.rates])) == pytest.approx((ratio, error))
    assert first.tokens_per_s == pytest.approx(3 / (1 / 100 + 1 / 50 + 1 / 200))


def test_variants_have_names_of_their_own() -> None:
    with pytest.raises(SystemExit, match="the same name"):
        paired.main([f"now={ROOT}", f"now={ROOT}@3"])


@pytest.mark.parametrize("text", ["now", "now=no/such/folder", f"={ROOT}", f"now={ROOT}@fast"])
def test_a_variant_that_is_none_is_told(text: str) -> None:
    with pytest.raises(SystemExit, match=r"wanted NAME=CHECKOUT@MODE|the mode is"):
        Variant.parse(text)


def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "paired.json"
    paired.main([f"now={ROOT}", f"turns={ROOT}@2"], count=2, rounds=1, tokens=12, temperatures="0", file=file)
    now, turns = json.loads(file.read_text())
    assert (now["variant"], now["ratio"], turns["variant"]) == ("now", 1.0, "turns")
    assert now["tokens"] == turns["tokens"] == 2 * 11  # the first token comes with the prompt
    assert 0 < turns["steps"] < turns["tokens"]
