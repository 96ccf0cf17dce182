"""A real HTTP server with a real target, and backends that misbehave; parts of it for gRPC too."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import openai
import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

from cluster.target import TargetReplica
from deployments.fields import GenerationFields, make_requests
from deployments.http import HttpSettings, make_app
from deployments.service import Backend, ReplicaLost, ServedModel, Service
from engine.decode import decode
from engine.runner import ModelRunner
from engine.text import OutputText
from engine.types import GenerationRequest, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.local_backend import LocalBackend

PROMPT = "def read(path):\n    with open(path) as file:\n        for line in file:\n"
KEY = "sk-secret"
_BUFFER = 16384  # bytes, of sockets: small, so that a client that does not read is soon noticed

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": SCHEMA}}


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


class Noting:
    """Notes its requests, and says nothing; implements Backend."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        yield TokenChunk(request.request_id, (), (), "stop")


class Held:
    """Says nothing until it may, then a token or an error; implements Backend."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may = threading.Event()
        self._error = error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        await asyncio.to_thread(self.may.wait, PATIENCE_S)
        if self._error is not None:
            raise self._error
        yield TokenChunk(request.request_id, (50,), ("target",), "length")


class Endless:
    """Says tokens without end; implements Backend."""

    def __init__(self) -> None:
        self.said = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        while True:
            self.said += 1
            yield TokenChunk(request.request_id, (50,) * 10, ("target",) * 10)
            await asyncio.sleep(0)


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
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.sock = socket.socket()
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        connection.sock.connect(("127.0.0.1", self.port))
        return connection

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


@contextmanager
def serving_replica(target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[TargetReplica]:
    """One that is audited at the end: nothing may be left of its requests."""
    replica = TargetReplica(target, exact.goodput(), tokenizer, lookup=8)
    yield replica
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    replica.close()


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The code and details of a gRPC call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code().name, error.details()


def running_server(target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    """For a fixture: a server of the model "code"; afterwards nothing may be left of its requests."""
    replica = TargetReplica(target, exact.goodput(), tokenizer, lookup=8)
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
    app = make_app(models, HttpSettings((KEY, "other"), ("https://page.example",)), Service(60.0))
    with serving(app) as port:
        server = Server(port, replica, models, target, tokenizer)
        yield server
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
    replica.close()


def chunks_of(text: str) -> list[str]:
    """The data of a stream's events."""
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


def assert_shape(body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"]
    for secret in ("Traceback", "/deployments", ".py", "127.0.0.1", "0x"):
        assert secret not in json.dumps(body)
