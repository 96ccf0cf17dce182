"""Requests and chunks of the gRPC API: fields with their presence, and what is refused before any model is asked."""

import pytest

from cluster.pb import generation_pb2 as pb
from deployments.client import make_request
from deployments.fields import GenerationFields
from deployments.grpc_methods import MAX_REQUEST_BYTES, limited
from deployments.grpc_service import fields_of
from engine.types import Grammar, InvalidRequest

EVERY_FIELD = {
    "model": "code",
    "n": 2,
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.75,
    "min_p": 0.125,
    "seed": 2**62,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.25,
    "logit_bias": {7: 1.5, 3: -100.0},
    "stop": ("a", "b"),
    "stop_token_ids": (5, 6),
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ("c",),
    "logprobs": 0,
    "window": "tree:15",
    "documents": ("d", "e"),
}


def test_absent_fields_have_the_defaults_of_all_protocols() -> None:
    assert fields_of(make_request("x", {})) == GenerationFields(prompt="x")


def test_every_field_arrives() -> None:
    sent = make_request((1, 2), {**EVERY_FIELD, "response_format": {"kind": "KIND_JSON_OBJECT"}})
    received = fields_of(pb.GenerateRequest.FromString(sent.SerializeToString()))
    assert received == GenerationFields(prompt=(1, 2), grammar=Grammar("json_object"), **EVERY_FIELD)
    assert set(GenerationFields.model_fields) == {*EVERY_FIELD, "prompt", "grammar"}


def test_a_zero_that_was_set_is_no_default() -> None:
    fields = fields_of(make_request("x", {"temperature": 0, "seed": 0, "max_tokens": 0}))
    assert (fields.temperature, fields.seed, fields.max_tokens) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(), "prompt"),
        (make_request("x", {"n": 0}), "n"),
        (make_request("x", {"n": 9}), "n"),
        (make_request("x", {"response_format": {"kind": 17}}), "response_format"),
        (make_request("x", {"response_format": {"kind": "KIND_TEXT", "schema": "{}"}}), "response_format"),
        (make_request("x", {"response_format": {"kind": "KIND_JSON_OBJECT", "schema": "{}"}}), "response_format"),
        (make_request("x", {"response_format": {"kind": "KIND_JSON_SCHEMA"}}), "response_format"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(request_: pb.GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        fields_of(request_)
    assert raised.value.param == param


def test_a_field_that_does_not_exist_is_the_clients_mistake() -> None:
    with pytest.raises(ValueError, match="temprature"):
        make_request("x", {"temprature": 1})


def test_nothing_beyond_the_limit_is_passed_on() -> None:
    assert limited(b"x" * MAX_REQUEST_BYTES) == b"x" * MAX_REQUEST_BYTES
    assert len(limited(b"x" * (MAX_REQUEST_BYTES + 100))) == MAX_REQUEST_BYTES + 1
