"""The HTTP API as clients see it: a real server with a real target, asked by OpenAI's own client and by hand."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from transformers import PreTrainedTokenizerFast

from cluster.intake import Overloaded
from cluster.target import TargetReplica
from deployments.fields import GenerationFields, make_requests
from deployments.http import HttpSettings, make_app
from deployments.local_backend import LocalBackend
from deployments.service import Backend, ReplicaLost, ServedModel, Service
from engine.decode import decode
from engine.runner import ModelRunner
from engine.text import OutputText
from engine.types import GenerationRequest, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

PROMPT = "def read(path):\n    with open(path) as file:\n        for line in file:\n"
KEY = "sk-secret"


class Gone:
    """Loses its replica, for good, after the first token; implements Backend."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        if not request.resume_tokens:
            yield TokenChunk(request.request_id, (5,), ("target",))
        raise ReplicaLost


class Refusing:
    """Implements Backend."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        if self.error is not None:
            raise self.error
        yield TokenChunk(request.request_id, (), (), "stop")


class Hanging:
    """Says one token, or nothing, and waits; implements Backend."""

    def __init__(self, tokens: int = 1) -> None:
        self._tokens = tokens
        self.open = 0
        self.closed = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        self.open += 1
        try:
            for _ in range(self._tokens):
                yield TokenChunk(request.request_id, (50,), ("target",))
            await asyncio.Event().wait()
        finally:
            self.closed += 1


class Scripted:
    """Says a text; implements Backend."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        self._tokens = [int(token) for token in tokenizer(text)["input_ids"]]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        for token in self._tokens:
            yield TokenChunk(request.request_id, (token,), ("draft",))
        yield TokenChunk(request.request_id, (), (), "stop")


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The port of a server that runs in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started, "the server starts")
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@dataclass
class Server:
    """What the tests ask."""

    port: int
    replica: TargetReplica
    models: dict[str, ServedModel]
    runner: ModelRunner
    tokenizer: PreTrainedTokenizerFast

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers; `body` is sent as it is when it is bytes, else as JSON."""
        connection = self.connect()
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **(headers or {})}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {name: value for name, value in sent.items() if value})
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(read) if is_json else read.decode(), dict(answer.headers)

    def with_backend(self, name: str, backend: Backend) -> str:
        """Serves another model with the same tokenizer."""
        self.models[name] = replace(self.models["code"], name=name, backend=backend)
        return name

    def expected(self, **fields: Any) -> str:
        """The text of one process."""
        (request,) = make_requests(GenerationFields(**fields), self.models["code"], "oracle")
        until(lambda: self.replica.stats().running == 0, "the replica is idle")
        assert self.replica.wait_idle(PATIENCE_S)
        (generation,) = decode(self.runner, [request], tokenizer=self.tokenizer)
        text = OutputText(self.tokenizer, request.params.stop, request.params.min_tokens)
        return "".join(text.push(token) for token in generation.tokens) + text.flush()


@pytest.fixture(scope="module")
def server(_target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    replica = TargetReplica(_target, exact.goodput(), tokenizer, lookup=8)
    model = ServedModel(
        name="code",
        tokenizer=tokenizer,
        context=1024,
        vocab_size=4096,
        fingerprint="fp_test",
        created=1_700_000_000,
        backend=LocalBackend(replica),
    )
    models = {"code": model}
    ready = {"now": True}
    app = make_app(models, HttpSettings((KEY, "other"), ("https://page.example",)), Service(60.0), lambda: ready["now"])
    with serving(app) as port:
        server = Server(port, replica, models, _target, tokenizer)
        yield server
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
    replica.close()


def chunks_of(text: str) -> list[str]:
    """The data of a stream's events."""
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


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
        model=model, messages=[{"role": "user", "content": "x = 1"}], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 64


SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}


def test_output_follows_a_schema(server: Server) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = server.client.chat.completions.create(
        model="code", messages=[{"role": "user", "content": "x"}], response_format=schema, max_tokens=200, seed=1
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"count", "kind"}
    assert 0 <= found["count"] <= 99


TOOL: Any = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": SCHEMA}}
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
    assert all(choice["steps"] + choice["accepted"] in (16, 17) for choice in stats["choices"])
    again = server.client.completions.create(model="code", prompt=PROMPT, n=2, seed=stats["seed"], extra_body=extra)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    stream = server.client.completions.create(model="code", prompt=PROMPT, stream=True, seed=1, extra_body=extra)
    last: Any = list(stream)[-1]
    assert last.model_extra["paceline"]["seed"] == 1
    assert last.model_extra["paceline"]["choices"][0]["tokens"] == 16


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
    assert {chunk["id"] for chunk in chunks} == {headers["x-request-id"]}
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


DEEP = b"[" * 100_000
BROKEN: list[tuple[bytes, int]] = [
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "x"', 400),
    (b"[]", 400),
    (b"null", 400),
    (b"", 400),
    (b'"text"', 400),
    (DEEP, 400),
    (b'{"prompt": ' + DEEP, 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
    (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", 400),
]


def assert_shape(body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"]
    for secret in ("Traceback", "/deployments", ".py", "127.0.0.1", "0x"):
        assert secret not in json.dumps(body)


@pytest.mark.parametrize(("data", "expected"), BROKEN)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_broken_body_is_refused(server: Server, path: str, data: bytes, expected: int) -> None:
    status, body, _ = server.ask("POST", path, data)
    assert status == expected
    assert_shape(body)


def test_a_body_in_pieces_is_measured_too(server: Server) -> None:
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", (b"x" * 100_000 for _ in range(50)), headers, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert_shape(json.loads(answer.read()))
    connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": ""},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Encoding": "gzip"},
    ],
)
def test_another_content_type_is_refused(server: Server, headers: dict[str, str]) -> None:
    status, body, _ = server.ask("POST", "/v1/completions", b'{"prompt": "x"}', headers)
    assert status == 415
    assert_shape(body)


@pytest.mark.parametrize(("method", "path", "expected"), [("GET", "/v1/completions", 405), ("GET", "/nowhere", 404)])
def test_wrong_addresses_are_errors_of_the_same_shape(server: Server, method: str, path: str, expected: int) -> None:
    status, body, _ = server.ask(method, path)
    assert status == expected
    assert_shape(body)


CHAT = {"messages": [{"role": "user", "content": "x"}]}
REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("completions", {"model": "unknown", "prompt": "x"}, 404, "model"),
    ("chat/completions", {**CHAT, "model": "unknown"}, 404, "model"),
    ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "x", "temperature": float("nan")}, 400, "temperature"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": ["x", ""]}, 400, "prompt"),
    ("completions", {"prompt": ["x", 1]}, 400, "prompt"),
    ("completions", {"prompt": ["x"] * 33}, 400, "prompt"),
    ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("completions", {"prompt": [[1], [-1]]}, 400, "prompt"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("completions", {"prompt": "x", "best_of": 4}, 400, "best_of"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo"),
    ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("completions", {"prompt": "x", "guided_regex": "a*"}, 400, "guided_regex"),
    ("completions", {"prompt": "x", "response_format": {"type": "regex", "regex": "a*"}}, 400, "response_format"),
    ("completions", {"prompt": "x", "max_tokens": "10"}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ("completions", {"prompt": "x", "paceline": {"timeout_s": 0}}, 400, "paceline"),
    ("chat/completions", {}, 400, "messages"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": "x"}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("chat/completions", {**CHAT, "top_logprobs": 1000, "logprobs": True}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {**CHAT, "tool_choice": "maybe", "tools": [TOOL]}, 400, "tool_choice"),
    ("chat/completions", {**CHAT, "tools": [TOOL, TOOL]}, 400, "tools"),
    (
        "chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        400,
        "tool_choice",
    ),
    (
        "chat/completions",
        {
            **CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "a"}}},
        },
        400,
        "response_format",
    ),
]


@pytest.mark.parametrize(("path", "body", "expected", "param"), REFUSED)
def test_bad_fields_are_named(server: Server, path: str, body: dict[str, Any], expected: int, param: str) -> None:
    steps = server.replica.stats().requests
    status, answer, _ = server.ask("POST", f"/v1/{path}", {"model": "code", **body})
    assert status == expected
    assert_shape(answer)
    assert answer["error"]["param"] == param
    assert "\n" not in answer["error"]["message"]
    assert server.replica.stats().requests == steps


def test_what_is_too_long_for_the_context_has_a_code(server: Server) -> None:
    for body in ({"prompt": "x " * 3000}, {"prompt": "x", "max_tokens": 1024}):
        status, answer, _ = server.ask("POST", "/v1/completions", {"model": "code", **body})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    messages = [{"role": "user", "content": "x " * 3000}]
    status, answer, _ = server.ask("POST", "/v1/chat/completions", {"model": "code", "messages": messages})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"


def test_null_fields_are_absent_ones_and_unknown_ones_are_ignored(server: Server) -> None:
    body = {
        "model": "code",
        "prompt": "x",
        "stop": None,
        "seed": None,
        "user": "me",
        "extra": 1,
        "suffix": None,
        "top_k": -1,
    }
    assert server.ask("POST", "/v1/completions", body)[0] == 200


# --- failures


def test_refusals_say_when_to_come_back(server: Server) -> None:
    cases = {
        "full": (Overloaded("full"), 429),
        "lost": (ReplicaLost(), 503),
        "bug": (KeyError("/deployments/x.py"), 500),
    }
    for name, (error, expected) in cases.items():
        model = server.with_backend(name, Refusing(error))
        for stream in (False, True):
            body = {"model": model, "prompt": "x", "stream": stream}
            status, answer, headers = server.ask("POST", "/v1/completions", body)
            assert status == expected
            assert_shape(answer)
            assert ("retry-after" in headers) == (expected != 500)


def test_a_failure_in_a_stream_is_an_event_and_nothing_is_done(server: Server) -> None:
    model = server.with_backend("gone", Gone())
    status, text, _ = server.ask("POST", "/v1/completions", {"model": model, "prompt": "x", "stream": True})
    assert status == 200
    *_, last = chunks_of(text)
    assert_shape(json.loads(last))
    assert json.loads(last)["error"]["code"] == "unavailable"
    with pytest.raises(openai.APIError):
        list(server.client.completions.create(model=model, prompt="x", stream=True))


def test_a_deadline_is_a_status_before_the_first_token_and_an_event_after(server: Server) -> None:
    mute, hanging = Hanging(0), Hanging(1)
    soon = {"prompt": "x", "stream": True, "paceline": {"timeout_s": 0.05}}
    status, answer, _ = server.ask("POST", "/v1/completions", {"model": server.with_backend("mute", mute), **soon})
    assert status == 408
    assert_shape(answer)
    status, text, _ = server.ask("POST", "/v1/completions", {"model": server.with_backend("hang", hanging), **soon})
    assert status == 200
    assert json.loads(chunks_of(text)[-1])["error"]["code"] == "deadline_exceeded"
    until(lambda: mute.closed == hanging.closed == 1, "the work stops")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1])
def test_when_the_client_goes_the_work_goes(server: Server, stream: bool, tokens: int) -> None:
    hanging = Hanging(tokens)
    body = {"model": server.with_backend("left", hanging), "prompt": "x", "stream": stream, "n": 2}
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    until(lambda: hanging.open == 2, "both samples run")
    connection.close()
    until(lambda: hanging.closed == 2, "both samples end")


def test_a_client_that_leaves_a_real_stream_frees_the_target(server: Server) -> None:
    before = server.replica.stats().tokens
    body = {"model": "code", "prompt": PROMPT, "stream": True, "max_tokens": 900, "ignore_eos": True}
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.read(20).startswith(b"data: ")
    answer.close()
    connection.close()
    until(lambda: server.replica.stats().running == 0, "the request ends")
    assert server.replica.stats().tokens - before < 800


def test_ready_asks(server: Server) -> None:
    async def no() -> bool:
        return False

    for ready in (no, lambda: False):
        with serving(make_app(server.models, ready=ready)) as port:
            status, body, _ = replace(server, port=port).ask("GET", "/ready")
        assert status == 503
        assert_shape(body)


class AnyName(dict[str, ServedModel]):
    """Every name is this model's: what a generator of requests thinks up would hardly ever be one."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__({model.name: model})
        self._model = model

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> ServedModel:
        return self._model


def test_no_request_that_follows_the_document_or_just_misses_it_breaks_the_server(server: Server) -> None:
    short = replace(server.models["code"], context=24)
    with serving(make_app(AnyName(short))) as port:
        document = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
        operations: list[Any] = [result.ok() for result in document.get_all_operations() if isinstance(result, Ok)]
        assert len(operations) == 9
        for operation in operations:
            try_many(operation.as_strategy(), 12)
            if operation.method == "post":
                try_many(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE), 12)


def try_many(cases: Any, count: int) -> None:
    """Sends so many requests of a kind; every answer must be one that is meant."""

    @given(case=cases)
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
    def send(case: Any) -> None:
        answer = case.call(timeout=PATIENCE_S)
        assert answer.status_code < 500, answer.text
        assert answer.status_code != 422
        if answer.status_code >= 400:
            assert_shape(answer.json())

    send()
