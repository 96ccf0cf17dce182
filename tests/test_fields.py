"""The one validator: every row of bad input names its field, and good input becomes the requests it says."""

import json
from typing import Any

import pytest
import xgrammar
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerFast
from xgrammar.testing import _is_grammar_accept_string

from deployments.fields import (
    ContextExceeded,
    GenerationFields,
    TextModel,
    UnknownModel,
    draw_seed,
    find_model,
    make_requests,
    validated,
)
from deployments.keys import ApiKeys, Unauthorized, bearer
from deployments.openai import ChatRequest, DetokenizeRequest
from engine.grammar import Vocabulary
from engine.noise import derive_seed
from engine.types import GenerationRequest, Grammar, InvalidRequest

NAN, INF = float("nan"), float("inf")
TEXT = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> TextModel:
    return TextModel(tokenizer=tokenizer, context=128, vocab_size=4096)


def made(model: TextModel, /, trusted: bool = False, **fields: Any) -> list[GenerationRequest]:
    values = {"prompt": "import os", **fields}
    return make_requests(validated(GenerationFields, values), model, "r", trusted=trusted)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


BAD_VALUES: list[tuple[str, list[Any]]] = [
    ("temperature", [NAN, INF, -INF, -1, 1e9, "1", True, [], {}]),
    ("top_p", [0, 2, -1, NAN, "x"]),
    ("min_p", [NAN, -0.1, 1.5]),
    ("top_k", [-5, -1, 1.5, "3"]),
    ("max_tokens", [0, -1, 1e30, 10**30, 2**31, "16", 1.5, True]),
    ("min_tokens", [-1, 127, 10**30]),
    ("n", [0, 9, -1, 10**9, 1.5]),
    ("prompt", ["", [], [-1], [4096], [2**70], [1.5], ["x"], 7, {}, [True]]),
    ("stop", [["a"] * 5, "", [""], [1], 7, "x" * 1001, {}]),
    ("stop_token_ids", [[-1], ["1"], 3, [2**31], [2**33], [2**64], list(range(4097))]),
    ("logit_bias", [{"x": 1}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"²": 1}, {"4096": 1}, {"9" * 30: 1}]),
    ("logit_bias", [{"1": 101}, {"1": NAN}, {"1": "x"}, {"1": 1, "01": 2}, [1], "x"]),
    ("logit_bias", [{str(token): 1 for token in range(1025)}]),
    ("seed", [2**63, -1, 1.5, "1", 10**40]),
    ("logprobs", [1000, -1, 21, "1", True]),
    ("repetition_penalty", [0, NAN, INF, -1, 11]),
    ("presence_penalty", [NAN, 2.1, INF, -3]),
    ("frequency_penalty", [NAN, 2.1, "x"]),
    ("bad_words", [[""], ["x"] * 2000, ["x" * 1001], [chr(0x1F600 + i) * 1000 for i in range(60)], [1]]),
    ("ignore_eos", ["yes", 1]),
    ("documents", ["x", [1], ["x"] * 33, ["x" * 2**18, "x"], ["\u00a9\u2603" * 2**15]]),
    ("window", ["tree", "chain:0", "tree:64", "chain:-1", "chain:+1", "chain:\u0663", "off:1", "goodput:5", "x", 5]),
    ("model", [7]),
    ("colour", ["red"]),
]
BAD = [(field, value) for field, values in BAD_VALUES for value in values]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_input_names_its_field(model: TextModel, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(model, **{field: value})
    assert caught.value.param == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "value",
    [
        {"type": "nonsense"},
        {"type": "integer", "minimum": 10, "maximum": 5},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "maxLength": 10**6},
        {"properties": {f"p{at}": {"type": "string", "maxLength": 1000} for at in range(6)}},
        {"type": "string", "pattern": "(a{500}){500}"},
        {"type": "object", "patternProperties": {"a+": {}}},
        {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string", "pattern": "a"}}}},
        {"type": "object", "properties": {}, "required": ["x"], "additionalProperties": False},
        {"type": "object", "properties": {f"p{at}": {} for at in range(501)}},
        {"properties": 3},
        {"properties": {"x": 3}, "required": "x"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": 3},
        {"anyOf": []},
        {"oneOf": []},
        {"enum": []},
        {"not": {}},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"$ref": "http://example.com/schema"},
        {"$ref": 3},
        {"$ref": "#/default", "default": {"type": "string", "pattern": "^[0-9]{3}$"}},
        {"$ref": "#/properties/a/enum/0", "properties": {"a": {"enum": [{"pattern": "x"}]}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"anyOf": [{"type": "string", "maxLength": 10**6, "minLength": -(10**9)}]},
        {"type": "array", "minItems": "x"},
        False,
        [],
        3,
    ],
)
def test_an_impossible_schema_is_refused(model: TextModel, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(model, grammar=schema(value))
    assert caught.value.param == "grammar"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "forbidden"),
    [
        ({"minLength": 5, "type": "string"}, "a"),
        ({"type": "number", "minimum": 5}, 4.9),
        ({"type": "integer", "exclusiveMinimum": 5}, 5),
        ({"type": ["string", "integer"], "minimum": 5}, 3),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"b": 1}),
        ({"type": "object", "additionalProperties": True, "minProperties": 1}, {}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, {"a": 1, "b": 1}),
        ({"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}}, {"b": 1}),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ["a", 1]),
        ({"type": "string", "format": "date"}, "today"),
    ],
)
def test_a_schema_that_is_taken_is_followed(model: TextModel, value: Any, forbidden: Any) -> None:
    made(model, grammar=schema(value))
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(value))
    assert not _is_grammar_accept_string(grammar, json.dumps(forbidden))


@pytest.mark.parametrize(
    "value",
    [
        {"minLength": 5},
        {"maxItems": 1},
        {"minimum": 5},
        {"required": ["a"]},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}, "c": {}}, "required": ["a", "b"], "additionalProperties": True},
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        {"type": "array", "items": {"type": "integer"}, "minContains": 2},
        {"type": "array", "items": {"type": "integer"}, "maxContains": 2},
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": True, "minProperties": 2},
        {"type": "string", "format": "date", "maxLength": 3},
        {"type": "integer", "enum": ["a"]},
        {"type": "integer", "enum": [True]},
        {"type": "integer", "enum": [1, 2], "minimum": 2},
        {"type": "string", "const": "", "minLength": 1},
        {"anyOf": [{"type": "string"}, {"type": "integer"}], "type": "integer"},
        {"anyOf": [{"type": "string"}, {"type": "integer"}], "maxLength": 1},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"allOf": [{"type": "string"}], "maxLength": 1},
        {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}},
        {"$dynamicRef": "#a"},
    ],
)
def test_a_schema_that_would_not_be_followed_is_refused(model: TextModel, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(model, grammar=schema(value))
    assert caught.value.param == "grammar"


def many(count: int, letters: int = 0) -> dict[str, Any]:
    """So many properties, with names of about so many letters."""
    return {f"p{at}".ljust(letters, "x"): {"type": "integer"} for at in range(count)}


@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "properties": many(120), "minProperties": 60, "maxProperties": 119},
        {"type": "object", "properties": many(100), "minProperties": 1},
        {"type": "object", "properties": many(400), "maxProperties": 10},
        {"type": "object", "properties": many(70, 300), "maxProperties": 69},
        {"type": "object", "properties": many(350, 60), "additionalProperties": True},
        {"type": "object", "properties": many(400, 400)},
        {"enum": [f"{at}".ljust(100, "x") for at in range(1000)]},
        {"anyOf": [{"const": f"{at}".ljust(100, "x")} for at in range(1000)]},
        {"anyOf": [{"type": "number", "minimum": at, "maximum": at + 1e18} for at in range(1000)]},
    ],
)
def test_a_schema_that_takes_long_to_compile_is_refused_unread(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(Vocabulary, "compile", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(InvalidRequest) as caught:
        made(model, grammar=schema(value))
    assert caught.value.param == "grammar"


def test_a_schema_nested_without_end_is_refused(model: TextModel) -> None:
    for deep in ('{"items":' * 200 + "{}" + "}" * 200, '{"items":' * 9000 + "{}" + "}" * 9000, "{"):
        with pytest.raises(InvalidRequest):
            made(model, grammar=Grammar("json_schema", deep))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "properties": {"pattern": {"type": "string"}, "not": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"const": {"pattern": "x"}}}, "required": ["a"]},
        {"$defs": {"a": {"type": "string", "maxLength": 5}}, "type": "array", "items": {"$ref": "#/$defs/a"}},
        {"anyOf": [{"type": "null"}, {"type": "integer"}], "default": None, "title": "A"},
        {"type": ["string", "null"], "enum": ["a", None], "description": "one or none"},
        {"type": "number", "const": 1},
        {"$ref": "#/$defs/a", "description": "a", "$defs": {"a": {"type": "string"}}},
        {"type": "object", "properties": many(20), "minProperties": 5, "maxProperties": 10},
        {"type": "object", "properties": many(300), "required": list(many(300))},
        {"enum": [f"value {at}" for at in range(1000)]},
        True,
    ],
)
def test_other_schemas_are_taken(model: TextModel, value: Any) -> None:
    (request,) = made(model, grammar=schema(value))
    assert request.params.grammar == schema(value)


@pytest.mark.parametrize("grammar", [Grammar("regex", "a+"), Grammar("ebnf", 'root ::= "a"')])
def test_expressions_are_taken_from_the_command_line_only(model: TextModel, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(model, grammar=grammar)
    assert caught.value.param == "grammar"
    assert made(model, trusted=True, grammar=grammar)[0].params.grammar == grammar


def test_a_grammar_says_where_the_output_ends(model: TextModel) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(model, grammar=Grammar("json_object"), ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_what_does_not_fit_in_the_context_has_a_name_of_its_own(model: TextModel) -> None:
    for fields, param in (
        ({"prompt": [5] * 128}, "prompt"),
        ({"prompt": "x " * 1000}, "prompt"),
        ({"prompt": "x" * 4_000_000}, "prompt"),
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
    ):
        with pytest.raises(ContextExceeded) as caught:
            made(model, **fields)
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    (request,) = made(model, prompt=[5] * 127)
    assert request.params.max_tokens == 1
    assert made(model, prompt=[5] * 100, max_tokens=28)


def test_samples_have_seeds_and_ids_of_their_own(model: TextModel) -> None:
    requests = made(model, n=3, seed=9)
    assert [request.params.seed for request in requests] == [derive_seed(9, sample) for sample in range(3)]
    assert requests[0].params.seed == 9
    assert len({request.request_id for request in requests}) == 3


def test_a_seed_is_drawn_once_where_none_is_given(model: TextModel) -> None:
    first, second = made(model, n=2)
    assert second.params.seed == derive_seed(first.params.seed, 1)
    assert made(model)[0].params.seed != first.params.seed
    assert all(draw_seed() < 2**53 for _ in range(100))


def test_every_field_arrives(model: TextModel, tokenizer: PreTrainedTokenizerFast) -> None:
    (request,) = made(
        model,
        max_tokens=20,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**63 - 1,
        stop="x",
        stop_token_ids=[7],
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"5": -1, 6: 2.5},
        bad_words=["def"],
        logprobs=3,
    )
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (20, 2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seed, params.stop) == (40, 0.1, 2**63 - 1, ("x",))
    assert (params.stop_token_ids, params.ignore_eos, params.repetition_penalty) == ((7,), True, 1.1)
    assert (params.presence_penalty, params.frequency_penalty, params.logprobs) == (0.2, -0.3, 3)
    assert params.logit_bias == ((5, -1.0), (6, 2.5))
    words = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("def", " def")}
    assert set(params.bad_words) == words
    assert request.prompt == tuple(tokenizer("import os")["input_ids"])


def test_null_is_the_default(model: TextModel) -> None:
    fields = validated(GenerationFields, {"prompt": "x", "stop": None, "temperature": None, "logit_bias": None})
    assert (fields.stop, fields.temperature, fields.logit_bias) == ((), 1.0, {})


def test_of_a_list_that_is_wrong_throughout_one_item_is_told() -> None:
    """Pydantic makes an error for each of them, which takes seconds."""
    lists: list[tuple[type[BaseModel], str]] = [
        *((GenerationFields, field) for field in ("stop", "stop_token_ids", "bad_words", "documents", "logit_bias")),
        (DetokenizeRequest, "tokens"),
    ]
    for kind, field in lists:
        wrong = {str(at): "x" for at in range(1000)} if field == "logit_bias" else [1.5] * 1000
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({"prompt": "x", field: wrong})
        assert len(caught.value.errors()) == 1
    message = {"role": "assistant", "tool_calls": [1] * 1000}
    for body in ({"messages": [1] * 1000}, {"messages": [message]}, {"messages": [TEXT], "tools": [1] * 1000}):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate(body)
        assert len(caught.value.errors()) <= 2  # and perhaps that the list is too long, or nothing is left of it


def test_models_are_found_by_name() -> None:
    assert find_model({"a": 1, "b": 2}, "b") == 2
    assert find_model({"a": 1}, None) == 1
    with pytest.raises(UnknownModel):
        find_model({"a": 1}, "b")
    with pytest.raises(InvalidRequest):
        find_model({"a": 1, "b": 2}, None)


def test_keys_tell_tenants_apart() -> None:
    keys = ApiKeys(["one", "two"])
    assert len({keys.salt("one"), keys.salt("two"), ApiKeys([]).salt(None)}) == 3
    assert ApiKeys([]).salt("anything") == b""
    for wrong in (None, "", "three", "one ", "\udcff"):
        with pytest.raises(Unauthorized):
            keys.salt(wrong)
    assert [bearer(value) for value in (None, "", "Basic x", "Bearer", "bearer  x ")] == [None, None, None, "", "x"]
