"""The gRPC API through Ray Serve's own proxy: codes, reflection, and calls that end under its hands."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from fastapi import FastAPI
from grpc_reflection.v1alpha import reflection_pb2 as reflection
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from benchmarks.server import free_port
from cluster.local import SERVE_TRANSPORT
from cluster.pb import generation_pb2 as pb
from cluster.target import TargetReplica
from deployments.client import Client, make_request
from deployments.grpc_methods import MAX_REQUEST_BYTES, SERVICE
from deployments.grpc_service import GrpcMethods
from deployments.keys import ApiKeys
from deployments.service import ServedModel, Service
from engine.decode import decode
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams, TokenChunk, TokenLogprobs
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until
from tests.http_fixtures import refusal
from tests.local_backend import LocalBackend

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
WIDE = TokenLogprobs(-1.0, tuple((token, -2.0) for token in range(20)))
PIECES = 100  # of them, far more than fits between a server and a client that reads nothing


class Wide:
    """A backend with a lot to say, whether anybody reads it or not, that never ends by itself; implements Backend."""

    def __init__(self) -> None:
        self.open = 0
        self.said = 0  # pieces of all requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        self.open += 1
        try:
            for _ in range(PIECES):
                yield TokenChunk(request.request_id, (1,) * 200, ("target",) * 200, logprobs=(WIDE,) * 200)
                self.said += 1
            await asyncio.Event().wait()
        finally:
            self.open -= 1


@serve.ingress(FastAPI())
class Small(GrpcMethods):
    """An ingress with a target replica in its own process."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(exact.TARGET)
        runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=2048)
        self.replica = TargetReplica(runner, exact.goodput(), tokenizer, flush_s=1.0)  # tokens come together
        self.wide = Wide()
        text: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": 4096, "fingerprint": "fp_test", "created": 0}
        code = ServedModel(name="code", context=1024, backend=LocalBackend(self.replica), **text)
        wide = ServedModel(name="wide", context=10**6, backend=self.wide, **text)
        super().__init__({"code": code, "wide": wide}, Service(), ApiKeys(()))

    def open(self) -> int:
        """Requests that have not ended."""
        stats = self.replica.stats()
        return stats.running + stats.waiting + self.wide.open

    def said(self) -> int:
        """Pieces of the backend with a lot to say."""
        return self.wide.said


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Any]]:
    """The port of the gRPC proxy, and a handle of the ingress."""
    os.environ.update(SERVE_TRANSPORT)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    port = free_port()
    methods = ["deployments.grpc_methods:add_generation_service"]
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=methods),
    )
    try:
        deployment = serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 0})(Small)
        yield port, serve.run(deployment.bind(), name="paceline", route_prefix="/")
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


@pytest.fixture
def client(app: tuple[int, Any]) -> Iterator[Client]:
    with Client(f"127.0.0.1:{app[0]}", application="paceline") as client:
        yield client


def test_a_stream_through_the_proxy_is_that_of_plain_decoding(client: Client, target: ModelRunner) -> None:
    tokenizer = load_tokenizer(exact.TARGET)
    prompt = exact.load_prompts(1)[0]
    chunks = list(client.generate(prompt, model="code", max_tokens=48, temperature=1, seed=3))
    (oracle,) = decode(target, [GenerationRequest("x", prompt, SamplingParams(1.0, seed=3, max_tokens=48))])
    assert [token for chunk in chunks for token in chunk.token_ids] == list(oracle.tokens)
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(oracle.tokens, skip_special_tokens=True)
    assert chunks[-1].summary.completion_tokens == len(oracle.tokens) > len(chunks)
    assert [model.name for model in client.list_models()] == ["code", "wide"]


def test_codes_and_details_pass_the_proxy(app: tuple[int, Any], client: Client) -> None:
    code, details = refusal(lambda: list(client.generate("x", model="code", temperature=-1)))
    assert (code, details.partition(":")[0]) == ("INVALID_ARGUMENT", "temperature")
    assert refusal(lambda: list(client.generate("x", model="other"))) == (
        "NOT_FOUND",
        "no model of this name is served",
    )
    method: Any = client._channel.unary_stream(f"/{SERVICE}/Generate")
    assert refusal(lambda: list(method(b"\xff\xff")))[0] == "INVALID_ARGUMENT"
    assert refusal(lambda: list(method(b"x" * (MAX_REQUEST_BYTES + 1))))[0] == "RESOURCE_EXHAUSTED"
    assert refusal(lambda: list(client.generate("x", model="code" * 8192)))[0] == "NOT_FOUND"
    assert refusal(lambda: list(method(b"", metadata=(("padding", "x" * 65536),))))[0] == "RESOURCE_EXHAUSTED"


def test_a_call_that_is_cancelled_or_too_late_leaves_no_work(app: tuple[int, Any], client: Client) -> None:
    _, handle = app

    def idle() -> bool:
        return bool(handle.open.remote().result() == 0)

    endless: dict[str, Any] = {"model": "code", "max_tokens": 900, "ignore_eos": True, "n": 2}
    chunks = client.generate("x", **endless)
    next(chunks)
    assert not idle()
    chunks.close()
    until(idle, "a cancelled call's work ends")
    assert refusal(lambda: list(client.generate("x", timeout_s=0.5, **endless)))[0] == "DEADLINE_EXCEEDED"
    until(idle, "the work of a call beyond its deadline ends")


@pytest.mark.parametrize("timeout_s", [None, 1.0])
def test_so_does_one_whose_client_had_stopped_reading(app: tuple[int, Any], timeout_s: float | None) -> None:
    port, handle = app
    before = handle.said.remote().result()
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # so that sending soon blocks
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=narrow) as channel:
        method: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        request = make_request("x", {"model": "wide", "max_tokens": 900_000, "logprobs": 20})
        call = method(request.SerializeToString(), timeout=timeout_s)
        next(call)
        if timeout_s is None:
            until(lambda: bool(handle.said.remote().result() == before + PIECES), "much is left unread")
            assert handle.open.remote().result() == 1
            call.cancel()
        until(lambda: bool(handle.open.remote().result() == 0), "the work of an unread call ends")


def test_the_service_can_be_discovered(client: Client) -> None:
    call: Any = client._channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection.ServerReflectionResponse.FromString,
    )
    asked = [
        reflection.ServerReflectionRequest(list_services=""),
        reflection.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = call(iter(asked), timeout=PATIENCE_S)
    assert SERVICE in [service.name for service in listed.list_services_response.service]
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
