"""Requests: what is out of range is refused, and the refusal names the field."""

import pickle
from typing import Any

import pytest

from engine.types import InvalidRequest, SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, NAN, INFINITY, -INFINITY)),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN, INFINITY)),
        *(("min_p", value) for value in (-0.01, 1.01, NAN, INFINITY)),
        *(("repetition_penalty", value) for value in (0.0, 1e-46, 1e-38, 0.0099, 10.1, NAN, INFINITY)),
        *(("seed", value) for value in (-1, 2**63)),
        *(("max_tokens", value) for value in (0, -5, 2**31)),
        *(("bad_words", value) for value in (((),), ((1,) * 33,), ((1,) * 32,) * 2049)),
        *(("stop", value) for value in (("a", ""), ("a", "b", "c", "d", "e"))),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (0.0, 1e-6, 100.0)),
        *(("top_k", value) for value in (0, 1, 10**9)),
        *(("top_p", value) for value in (1e-9, 1.0)),
        *(("min_p", value) for value in (0.0, 1.0)),
        *(("repetition_penalty", value) for value in (0.01, 10.0)),
        *(("seed", value) for value in (0, 2**63 - 1)),
        *(("max_tokens", value) for value in (1, 2**31 - 1)),
        ("stop", ("a", "b", "c", "d")),
    ],
)
def test_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_a_refusal_survives_pickling() -> None:
    back = pickle.loads(pickle.dumps(InvalidRequest("top_p", "must be above 0")))
    assert (back.param, back.message, str(back)) == ("top_p", "must be above 0", "top_p: must be above 0")
