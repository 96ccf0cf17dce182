"""Tool calls out of a text, however it comes in pieces; and the grammar of those that are insisted on."""

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from deployments.chat import CLOSE, OPEN, TaggedCalls, forced_call
from deployments.openai import ChatRequest, FunctionCall
from engine.grammar import Vocabulary
from engine.text import load_tokenizer
from tests import exact

CALL = f'{OPEN}{{"name": "count", "arguments": {{"to": 3}}}}{CLOSE}'
PARTS = (CALL, OPEN, CLOSE, f"{OPEN}{{no}}{CLOSE}", " ", "\n\n", "Done.", "<", "<tool", '"')


def read(pieces: list[str]) -> list[str | FunctionCall]:
    """What is told, texts that follow each other in one."""
    calls, told = TaggedCalls(), list[str | FunctionCall]()
    for found in [*(calls.push(piece) for piece in pieces), calls.flush()]:
        for item in found:
            if isinstance(item, str) and told and isinstance(told[-1], str):
                told[-1] += item
            else:
                told.append(item)
    return told


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.data())
def test_what_is_told_does_not_depend_on_pieces(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


def test_space_within_a_text_behind_a_call_stays() -> None:
    calls = TaggedCalls()
    told = [item for piece in (CALL, "\n", "Done.", "\n\n", "Next", "\n") for item in calls.push(piece)]
    assert told[1:] + calls.flush() == ["\nDone.", "\n\nNext"]


@pytest.mark.parametrize("end", [CLOSE, ""])
def test_a_call_behind_text_about_tags_is_one(end: str) -> None:
    text = f"I use {OPEN} tags: "
    assert read([f"{text}{CALL.removesuffix(CLOSE)}{end}"]) == [text, FunctionCall(name="count", arguments='{"to": 3}')]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\udc00", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": [-Infinity]}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": 5, "arguments": {}}',
    ],
)
def test_what_is_no_call_for_every_client_stays_text(call: str) -> None:
    text = f"{OPEN}{call}{CLOSE}"
    assert read([text]) == [text]


def test_arguments_that_are_insisted_on_are_objects() -> None:
    """Also where a tool says nothing of them: nothing else would be a call."""
    vocabulary = Vocabulary(load_tokenizer(exact.TARGET), 4096)
    for parameters in ({}, {"description": "none"}, {"properties": {"a": {"type": "integer"}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        request = ChatRequest.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
        )
        grammar = forced_call(request)
        assert grammar is not None
        for arguments, fits in (("{}", True), ("5", False), ("[]", False)):
            matcher = xgrammar.GrammarMatcher(vocabulary.compile(grammar))
            text = f'{{"name": "f", "arguments": {arguments}}}'
            assert matcher.accept_string(text) == fits, (parameters, arguments)
