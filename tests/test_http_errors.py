"""The HTTP API when something is wrong: bad input, failures, clients that leave or do not read, and generated requests."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from transformers import PreTrainedTokenizerFast

from cluster.intake import Overloaded
from deployments import asgi, http
from deployments.http import make_app
from deployments.service import ReplicaLost, ServedModel, Service
from engine.runner import ModelRunner
from tests.cluster_fixtures import PATIENCE_S, until
from tests.http_fixtures import (
    KEY,
    PROMPT,
    TOOL,
    Endless,
    Gone,
    Hanging,
    Held,
    Refusing,
    Server,
    assert_shape,
    chunks_of,
    running_server,
    serving,
)


@pytest.fixture(scope="module")
def server(_target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    yield from running_server(_target, tokenizer)


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


def test_a_body_that_is_announced_as_too_large_need_not_be_sent(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        head = (
            f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(f"{head}Content-Length: 5000000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


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
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "tool_calls": 2048 * [_CALL]}
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
    ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("completions", {"prompt": [1.5]}, 400, "prompt"),
    ("completions", {"prompt": [["a"]]}, 400, "prompt"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("completions", {"prompt": "x", "best_of": 4}, 400, "best_of"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo"),
    ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("completions", {"prompt": "x", "guided_regex": "a*"}, 400, "guided_regex"),
    ("completions", {"prompt": "x", "response_format": {"type": "regex", "regex": "a*"}}, 400, "response_format"),
    (
        "completions",
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        400,
        "response_format",
    ),
    ("completions", {"prompt": "x", "max_tokens": "10"}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ("completions", {"prompt": "x", "paceline": {"timeout_s": 0}}, 400, "paceline"),
    ("completions", {"prompt": "x", "paceline": {"window": "tree:64"}}, 400, "paceline.window"),
    ("completions", {"prompt": "x", "paceline": {"documents": ["x" * (2**18 + 1)]}}, 400, "paceline.documents"),
    ("completions", {"prompt": ["x", "y"], "paceline": {"documents": ["x"]}}, 400, "paceline.documents"),
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
    (
        "chat/completions",
        {**CHAT, "tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]},
        400,
        "tool_choice",
    ),
    ("chat/completions", {**CHAT, "tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, 400, "tool_choice"),
    ("chat/completions", {**CHAT, "tools": [TOOL, TOOL]}, 400, "tools"),
    ("chat/completions", {**CHAT, "tools": [TOOL], "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, 400, "modalities"),
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
    ("chat/completions", {**CHAT, "messages": 4097 * CHAT["messages"]}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": [*CHAT["messages"], *3 * [CALLS]]}, 400, "messages"),
]


@pytest.mark.parametrize(("path", "body", "expected", "param"), REFUSED)
def test_bad_fields_are_named(server: Server, path: str, body: dict[str, Any], expected: int, param: str) -> None:
    steps = server.replica.stats().requests
    status, answer, _ = server.ask("POST", f"/v1/{path}", {"model": "code", **body})
    assert status == expected
    assert_shape(answer)
    assert answer["error"]["param"] == param
    message = answer["error"]["message"]
    assert not any(word in message for word in ("\n", ".str", "uple", "literal", "dictionary", "instance", "NamedTool"))
    assert server.replica.stats().requests == steps


def test_what_is_too_long_for_the_context_has_a_code(server: Server) -> None:
    for body in ({"prompt": "x " * 3000}, {"prompt": "x", "max_tokens": 1024}):
        status, answer, _ = server.ask("POST", "/v1/completions", {"model": "code", **body})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    messages = [{"role": "user", "content": "x " * 3000}]
    status, answer, _ = server.ask("POST", "/v1/chat/completions", {"model": "code", "messages": messages})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_is_far_too_long_is_not_tokenized(server: Server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda *_, **__: pytest.fail("it was tokenized"))
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    status, answer, _ = server.ask("POST", path, {"model": "code", "messages": messages})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"
    status, answer, _ = server.ask("POST", "/tokenize", {"model": "code", "prompt": "x" * 3_000_000})
    assert (status, answer["error"]["param"]) == (400, "prompt")


def test_null_fields_are_absent_ones_and_unknown_ones_are_ignored(server: Server) -> None:
    body = {
        "model": "code",
        "prompt": "x",
        "max_tokens": 4,
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


def test_a_lone_model_that_is_full_refuses_requests_unread(server: Server) -> None:
    model = replace(next(iter(server.models.values())), name="full", backend=Refusing(Overloaded("full")))
    with serving(make_app({"full": model}, service=Service(full_s=PATIENCE_S))) as port:
        alone = replace(server, port=port)
        assert alone.ask("POST", "/v1/completions", {"prompt": "x"})[0] == 429
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer, headers = alone.ask("POST", path, b"no json")
            assert (status, headers["retry-after"]) == (429, "1")
            assert_shape(answer)


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


def test_a_deadline_and_a_client_that_left_end_what_comes_before_the_run(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, asked, ended = threading.Event(), threading.Event(), threading.Event()
    run = Hanging(0)

    def held(*_: Any) -> tuple[int, ...]:
        asked.set()
        may.wait(PATIENCE_S)
        return (5,)

    async def noted(request: Any, work: Any) -> Any:
        try:
            return await asgi.unless_gone(request, work)
        finally:
            ended.set()

    monkeypatch.setattr(http, "chat_prompt", held)
    monkeypatch.setattr(http, "unless_gone", noted)
    body = {"model": server.with_backend("never", run), **CHAT}
    try:
        status, answer, _ = server.ask("POST", "/v1/chat/completions", {**body, "paceline": {"timeout_s": 0.05}})
        assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
        asked.clear()
        ended.clear()
        connection = server.connect()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        assert asked.wait(PATIENCE_S)
        connection.close()
        assert ended.wait(PATIENCE_S)
    finally:
        may.set()
    assert server.ask("POST", "/v1/completions", {"model": "code", "prompt": "x", "max_tokens": 2})[0] == 200
    assert run.open == 0


def test_a_body_that_takes_too_long_to_come_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_READ_S", 0.05)
    connection = server.connect()
    connection.putrequest("POST", "/v1/completions")
    for name, value in (("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")):
        connection.putheader(name, value)
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"prompt": ')  # and no more
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == 408
    assert_shape(body)
    assert body["error"]["code"] is None


@pytest.mark.parametrize("error", [None, Overloaded("full")])
def test_a_stream_that_has_nothing_to_say_yet_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(asgi, "SILENT_S", 0.01)
    held = Held(error)
    body = {"model": server.with_backend("held", held), "prompt": "x", "stream": True}
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert [answer.readline() for _ in range(4)] == [b": waiting\n", b"\n"] * 2
    held.may.set()
    last = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")][-1]
    connection.close()
    if error is None:
        assert last == "data: [DONE]"
    else:
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"


def test_clients_skip_what_a_waiting_stream_says(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "SILENT_S", 0.01)
    held = Held()
    model = server.with_backend("waiting", held)
    stream = server.client.completions.create(model=model, prompt="x", stream=True)  # it began: comments come
    held.may.set()
    assert [chunk.choices[0].finish_reason for chunk in stream] == ["length"]


def test_every_answer_has_an_id_which_the_log_knows(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    model = server.with_backend("broken", Refusing(RuntimeError("no bytes left")))
    asked = {"model": model, "prompt": "x"}
    status, _, headers = server.ask("POST", "/v1/completions", asked)
    assert status == 500
    assert f"request {headers['x-request-id']} failed" in caplog.text
    _, _, headers = server.ask("POST", "/v1/completions", asked, {"X-Request-Id": "of-mine.1"})
    assert "x-request-id" not in headers, "the proxy that gave it answers with it"
    assert "request of-mine.1 failed" in caplog.text
    server.ask("POST", "/v1/completions", asked, {"X-Request-Id": "no id"})
    assert "no id" not in caplog.text


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


def test_a_client_that_does_not_read_holds_up_its_own_stream_only(server: Server) -> None:
    endless = Endless()
    model = server.with_backend("endless", endless)
    server.models[model] = replace(server.models[model], context=10**9)
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    body = {"model": model, "prompt": "x", "max_tokens": 10**8, "stream": True, "n": 2}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    said: list[int] = []

    def held_up() -> bool:
        said.append(endless.said)
        return len(said) > 100 and said[-1] == said[-60] > 0

    until(held_up, "nothing more is produced")
    assert server.ask("POST", "/v1/completions", {"model": "code", "prompt": "x", "max_tokens": 2})[0] == 200
    connection.close()


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
