"""The HTTP API as clients see it: a real server with a real target, asked by OpenAI's own client and by hand."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from deployments.logprobs import TokenTexts
from engine.runner import ModelRunner
from engine.types import TokenLogprobs
from tests.http_fixtures import KEY, PROMPT, SCHEMA, TOOL, Noting, Scripted, Server, chunks_of, running_server


@pytest.fixture(scope="module")
def server(_target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    yield from running_server(_target, tokenizer)


# --- OpenAI's client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_are_what_one_process_decodes(server: Server, temperature: float) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": temperature, "seed": 3}
    expected = server.expected(**fields)
    whole = server.client.completions.create(model="code", **fields)
    assert whole.choices[0].text == expected
    assert whole.system_fingerprint == "fp_test"
    assert whole.usage is not None
    read = len(server.tokenizer(PROMPT)["input_ids"])
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens - whole.usage.completion_tokens) == (read, read)
    assert 0 < whole.usage.completion_tokens <= 24
    streamed = server.client.completions.create(model="code", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_a_stream_ends_with_the_usage_when_asked(server: Server) -> None:
    options: Any = {"include_usage": True}
    stream = server.client.completions.create(
        model="code", prompt=PROMPT, stream=True, stream_options=options, extra_body={"ignore_eos": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_tells_what_was_known_of_a_prompt(server: Server, stream: bool) -> None:
    prompt = [100 + stream, *range(200, 299)]

    def known(key: str, **fields: Any) -> int:
        body = {"model": "code", "prompt": prompt, "max_tokens": 2, "stream": stream, **fields}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        status, answer, _ = server.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
        assert status == 200
        usage = json.loads(chunks_of(answer)[-2])["usage"] if stream else answer["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert known(KEY) == 0
    assert 64 <= known(KEY) < 100
    assert known("other") == 0
    assert known("other", n=3) == known(KEY)
    assert known(KEY, cache_salt="x") == 0
    assert known(KEY, prompt=[prompt, prompt[:50]]) > known(KEY)


def test_several_prompts_and_samples_have_choices_in_order(server: Server) -> None:
    prompts = [PROMPT, "import os\n"]
    answer = server.client.completions.create(
        model="code", prompt=prompts, n=2, seed=7, max_tokens=6, echo=True, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        assert choice.text.startswith(prompt)
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    read = [len(server.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(read)
    alone = server.client.completions.create(
        model="code", prompt=prompts[1], seed=7, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert answer.choices[2].text == prompts[1] + alone.choices[0].text


def test_token_ids_are_a_prompt_too(server: Server) -> None:
    ids = server.tokenizer(PROMPT)["input_ids"]
    answers = [
        server.client.completions.create(model="code", prompt=prompt, temperature=0)
        for prompt in (PROMPT, list(ids), [list(ids)])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_log_probabilities_have_one_entry_for_each_token(server: Server) -> None:
    answer = server.client.completions.create(
        model="code", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
    assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(8)]
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())


def test_chat_streams_what_it_answers_whole(server: Server) -> None:
    options: dict[str, Any] = {
        "model": "code",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}],
        "max_completion_tokens": 20,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = server.client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    stream = list(server.client.chat.completions.create(stream=True, **options))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == message.content
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert whole.usage is not None
    assert len(entries) == whole.usage.completion_tokens
    written = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert written.removesuffix("<|endoftext|>") == message.content
    parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "(x):"}]
    options["messages"][1]["content"] = parts
    assert server.client.chat.completions.create(**options).choices[0].message.content == message.content


def test_chat_without_a_limit_goes_to_the_end_of_the_context(server: Server) -> None:
    model = server.with_backend("short", server.models["code"].backend)
    server.models[model] = replace(server.models[model], context=64)
    answer = server.client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "x = 1"}],
        modalities=["text"],
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 64


def test_output_follows_a_schema(server: Server) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = server.client.chat.completions.create(
        model="code", messages=[{"role": "user", "content": "x"}], response_format=schema, max_tokens=200, seed=1
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"count", "kind"}
    assert 0 <= found["count"] <= 99


OTHER: Any = {
    "type": "function",
    "function": {"name": "other", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}},
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}])
def test_a_call_that_is_insisted_on_comes(server: Server, choice: Any) -> None:
    options: dict[str, Any] = {
        "model": "code",
        "messages": [{"role": "user", "content": "How many?"}],
        "tools": [TOOL, OTHER],
        "tool_choice": choice,
        "max_tokens": 300,
        "seed": 2,
    }
    answer = server.client.chat.completions.create(**options)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert call.type == "function"
    assert call.function.name in (["other"] if isinstance(choice, dict) else ["count", "other"])
    assert set(json.loads(call.function.arguments)) == {"count", "kind"}
    chunks = list(server.client.chat.completions.create(stream=True, **options))
    (part,) = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert part.index == 0
    assert part.function is not None
    assert (part.function.name, part.function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


CALL = '<tool_call>{"name": "count", "arguments": {"count": 3, "kind": "a"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, 1),
        (f"I look. {CALL}\n{CALL}\n", "I look. ", 2),
        ("a <tool_call> that is none", "a <tool_call> that is none", 0),
        ("<tool_call>{no}</tool_call> x", "<tool_call>{no}</tool_call> x", 0),
        ("a < b <tool", "a < b <tool", 0),
        (CALL.removesuffix("</tool_call>"), None, 1),
        ("So: " + CALL.removesuffix("l_call>"), "So: " + CALL.removesuffix("l_call>"), 0),
    ],
)
def test_calls_are_read_out_of_the_text(server: Server, text: str, content: str | None, calls: int) -> None:
    model = server.with_backend("scripted", Scripted(server.tokenizer, text))
    options: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
    choice = server.client.chat.completions.create(**options).choices[0]
    assert choice.message.content == content
    assert len(choice.message.tool_calls or []) == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    chunks = list(server.client.chat.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [part.index for part in parts] == list(range(calls))
    untouched = server.client.chat.completions.create(**options, tool_choice="none")
    assert untouched.choices[0].message.content == text


def test_one_call_alone_is_answered_where_the_client_takes_one_at_a_time(server: Server) -> None:
    model = server.with_backend("scripted", Scripted(server.tokenizer, f"{CALL}{CALL}{CALL}"))
    messages: Any = [{"role": "user", "content": "?"}]
    answer = server.client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


class _Template:
    """A model whose chat template is the one given."""

    def __init__(self, server: Server, template: str) -> None:
        self._server = server
        tokenizer = copy.deepcopy(server.tokenizer)
        tokenizer.chat_template = template
        self.name = server.with_backend("templated", server.models["code"].backend)
        server.models[self.name] = replace(server.models[self.name], tokenizer=tokenizer)

    def prompt(self, messages: Any, **fields: Any) -> str:
        body = {"model": self.name, "messages": messages, **fields}
        status, found, _ = self._server.ask("POST", "/tokenize", body)
        assert status == 200, found
        read = self._server.ask("POST", "/detokenize", {"model": "code", "tokens": found["tokens"]})
        return str(read[1]["prompt"])


def test_templates_get_what_they_know(server: Server) -> None:
    """Messages of developers where they know of them, tools as the client wrote them, and values of their own."""
    known = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    assert _Template(server, known).prompt(messages) == "[Be brief.]"
    assert _Template(server, known.replace("system", "developer")).prompt(messages) == "[Be brief.]"
    tools = _Template(server, "{% for t in tools %}{{ t | tojson }}{% endfor %}")
    assert json.loads(tools.prompt(messages, tools=[TOOL])) == TOOL
    thinks = _Template(server, "{{ 'think' if enable_thinking else 'answer' }}")
    assert thinks.prompt(messages, chat_template_kwargs={"enable_thinking": True}) == "think"
    assert thinks.prompt(messages, chat_template_kwargs={"enable_thinking": False}) == "answer"
    assert _Template(server, "{{ reasoning_effort }}").prompt(messages, reasoning_effort="low") == "low"
    status, body, _ = server.ask(
        "POST",
        "/v1/chat/completions",
        {"model": "code", "messages": messages, "chat_template_kwargs": {"messages": []}},
    )
    assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "field",
    [
        {"continue_final_message": True},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"add_generation_prompt": False},
        {"allowed_token_ids": [1]},
        {"truncate_prompt_tokens": 5},
        {"ebnf": "root ::= 'a'"},
        {"json_schema": "{}"},
        {"echo": True},
        {"documents": [{"text": "x"}]},
        {"verbosity": "low"},
        {"length_penalty": 2.0},
        {"return_tokens_as_token_ids": True},
        {"return_token_ids": True},
        {"web_search_options": {"search_context_size": "low"}},
    ],
)
def test_what_would_change_the_output_is_refused_by_name(server: Server, field: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    status, body, _ = server.ask("POST", "/v1/chat/completions", {"model": "code", "messages": messages, **field})
    assert (status, [body["error"]["param"]]) == (400, list(field))


@pytest.mark.parametrize(
    "field", [{"add_generation_prompt": False}, {"chat_template": "x"}, {"continue_final_message": True}]
)
def test_what_would_change_the_tokens_is_refused_by_name(server: Server, field: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    status, body, _ = server.ask("POST", "/tokenize", {"model": "code", "messages": messages, **field})
    assert (status, [body["error"]["param"]]) == (400, list(field))


def test_log_probabilities_name_parts_of_characters_by_their_bytes(server: Server) -> None:
    texts = TokenTexts(server.tokenizer)
    tokens = server.tokenizer("\u00e9\U0001f469x")["input_ids"]
    assert len(tokens) > 4
    entries = [TokenLogprobs(-1.0, ((token, -1.0), (0, -2.0))) for token in tokens[:-1]]
    found, end = texts.completion(tokens, [*entries, TokenLogprobs(-9.0, ((0, -0.1),))], 7)
    assert end == 7 + 3
    assert found.text_offset[0] == 7
    assert found.text_offset == sorted(found.text_offset)
    assert any(name.startswith("bytes:\\x") for name in found.tokens)
    for name, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[name] == value, "the chosen token is always there"


@pytest.mark.parametrize(
    ("path", "prompt", "usual"),
    [
        ("completions", {"prompt": "x"}, True),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, False),
    ],
)
def test_special_tokens_are_added_where_they_are_asked_for(
    server: Server, path: str, prompt: dict[str, Any], usual: bool
) -> None:
    tokenizer = copy.deepcopy(server.tokenizer)
    special = ("<|endoftext|>", tokenizer("<|endoftext|>")["input_ids"][0])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[special])
    name = server.with_backend("beginning", server.models["code"].backend)
    server.models[name] = replace(server.models[name], tokenizer=tokenizer)
    counts: dict[bool | None, int] = {}
    for added in (None, True, False):
        body = {"model": name, **prompt, "add_special_tokens": added}
        counts[added] = server.ask("POST", f"/v1/{path}", {**body, "max_tokens": 1})[1]["usage"]["prompt_tokens"]
        assert server.ask("POST", "/tokenize", body)[1]["count"] == counts[added]
    assert counts[True] == counts[False] + 1
    assert counts[None] == counts[usual]


def test_a_salt_of_its_own_keeps_a_requests_pages_apart(server: Server) -> None:
    name, salts = server.with_backend("salted", Noting()), []
    backend = server.models[name].backend
    assert isinstance(backend, Noting)
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"cache_salt": None}):
        status, _, _ = server.ask("POST", "/v1/completions", {"model": name, "prompt": "x", **fields})
        assert status == 200
    salts = [request.salt for request in backend.requests]
    assert salts[0] == salts[4]
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3
    status, body, _ = server.ask("POST", "/v1/completions", {"model": name, "prompt": "x", "cache_salt": 5})
    assert (status, body["error"]["param"]) == (400, "cache_salt")


def test_special_tokens_take_no_place_in_the_text(server: Server) -> None:
    texts = TokenTexts(server.tokenizer)
    tokens = server.tokenizer("a<|endoftext|>(")["input_ids"]
    assert len(tokens) == 3
    found, end = texts.completion(tokens, [TokenLogprobs(-1.0, ())] * 3, 0)
    assert (found.text_offset, end) == ([0, 1, 1], 2)
    assert found.tokens == ["a", "<|endoftext|>", "("]


def test_a_conversation_with_calls_and_results_goes_on(server: Server) -> None:
    arguments = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"count": 3}'}}
    messages: Any = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": None, "tool_calls": [arguments]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    status, body, _ = server.ask("POST", "/tokenize", {"model": "code", "messages": messages})
    assert status == 200
    text = server.ask("POST", "/detokenize", {"model": "code", "tokens": body["tokens"]})[1]["prompt"]
    assert text.endswith("# tool:\n3\n\n# assistant:\n")
    assert '<tool_call>{"name": "count", "arguments": {"count": 3}}</tool_call>' in text
    assert server.client.chat.completions.create(model="code", messages=messages, max_tokens=4).choices


def test_the_seed_and_statistics_come_when_asked_for(server: Server) -> None:
    extra = {"paceline": {"stats": True}, "ignore_eos": True}
    answer = server.client.completions.create(model="code", prompt=PROMPT, n=2, extra_body=extra)
    stats: Any = answer.model_extra["paceline"] if answer.model_extra else None
    assert [choice["tokens"] for choice in stats["choices"]] == [16, 16]
    for choice in stats["choices"]:
        assert choice["steps"] + choice["accepted"] in (16, 17)
        assert choice["tokens_per_step"] == round(16 / choice["steps"], 3)
        assert choice["accepted_share"] == round(choice["accepted"] / 16, 3)
        assert choice["resumed"] == 0
    again = server.client.completions.create(model="code", prompt=PROMPT, n=2, seed=stats["seed"], extra_body=extra)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    stream = server.client.completions.create(model="code", prompt=PROMPT, stream=True, seed=1, extra_body=extra)
    last: Any = list(stream)[-1]
    assert last.model_extra["paceline"]["seed"] == 1
    assert last.model_extra["paceline"]["choices"][0]["tokens"] == 16


def test_a_window_of_its_own_changes_no_text(server: Server) -> None:
    options: dict[str, Any] = {"model": "code", "prompt": PROMPT, "seed": 3}
    texts = [
        server.client.completions.create(**options, extra_body={"paceline": {"window": name}}).choices[0].text
        for name in ("off", "tree:7")
    ]
    assert texts == [server.client.completions.create(**options).choices[0].text] * 2


def test_documents_make_quotes_come_faster_and_change_no_text(server: Server) -> None:
    options: dict[str, Any] = {"model": "code", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    plain = server.client.completions.create(**options, extra_body={"paceline": {"stats": True}})
    ours = {"stats": True, "window": "tree:15", "documents": ["nothing of it", PROMPT + plain.choices[0].text]}
    quoting = server.client.completions.create(**options, extra_body={"paceline": ours})
    assert quoting.choices[0].text == plain.choices[0].text
    steps: list[int] = [
        answer.model_extra["paceline"]["choices"][0]["steps"] for answer in (plain, quoting) if answer.model_extra
    ]
    assert steps[1] < min(steps[0], 20)


def test_models_are_listed(server: Server) -> None:
    assert "code" in [model.id for model in server.client.models.list()]
    assert server.client.models.retrieve("code").id == "code"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("nobody/knows")
    assert caught.value.code == "model_not_found"


# --- by hand


def test_a_stream_is_events_and_done(server: Server) -> None:
    body = {"model": "code", "prompt": PROMPT, "stream": True, "max_tokens": 4, "ignore_eos": True}
    status, text, headers = server.ask("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = chunks_of(text)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{headers['x-request-id']}"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_tokens_and_back(server: Server) -> None:
    status, body, _ = server.ask("POST", "/tokenize", {"model": "code", "prompt": PROMPT, "return_token_strs": True})
    assert status == 200
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 1024
    assert server.ask("POST", "/detokenize", {"model": "code", "tokens": body["tokens"]})[1] == {"prompt": PROMPT}


def test_open_routes_need_no_key(server: Server) -> None:
    for path in ("/health", "/ready", "/version", "/docs", "/openapi.json"):
        assert server.ask("GET", path, headers={"Authorization": ""})[0] == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_without_a_key_nothing_is_answered(server: Server, path: str, value: str) -> None:
    status, body, headers = server.ask("POST", path, {}, {"Authorization": value})
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"


def test_any_key_that_is_configured_will_do(server: Server) -> None:
    assert server.ask("GET", "/v1/models", headers={"Authorization": "bearer other"})[0] == 200


def test_pages_of_allowed_origins_may_ask(server: Server) -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    _, _, headers = server.ask("OPTIONS", "/v1/completions", headers=asked)
    assert headers["access-control-allow-origin"] == "https://page.example"
    _, _, headers = server.ask("GET", "/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in headers
