"""The gRPC API: outputs equal plain decoding, every error has its code, and a call that ends leaves no work behind."""

import asyncio
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.intake import Closed, Overloaded
from cluster.pb import generation_pb2 as pb
from cluster.target import TargetReplica
from deployments import grpc_methods, service
from deployments.client import Client, make_request
from deployments.grpc_methods import MAX_REQUEST_BYTES, MAX_UNREAD, SERVICE, add_generation_service
from deployments.grpc_service import GrpcMethods
from deployments.keys import ApiKeys
from deployments.service import Backend, DeadlineExceeded, GenerationFailed, ServedModel, Service
from engine.decode import decode
from engine.noise import derive_seed
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams, TokenChunk, TokenLogprobs
from tests.cluster_fixtures import PATIENCE_S, until
from tests.http_fixtures import PROMPT, Gone, Refusing, refusal, serving_replica
from tests.local_backend import LocalBackend


class Server:
    """A grpc.aio server on a thread of its own."""

    def __init__(self, methods: GrpcMethods, tls: grpc.ServerCredentials | None = None) -> None:
        self._methods, self._tls = methods, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server, self.port = self._do(self._start())

    async def _start(self) -> tuple[Any, int]:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        add_generation_service(self._methods, server)
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, self._tls) if self._tls else server.add_insecure_port(address)
        await server.start()
        return server, port

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self._do(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Hasty:
    """A backend that never waits for its reader; implements Backend."""

    def __init__(self) -> None:
        self.sent = 0
        self.open = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        self.open = True
        likely = TokenLogprobs(-1.0, tuple((token, -2.0) for token in range(20)))
        try:
            while True:
                yield TokenChunk(request.request_id, (1,), ("target",), logprobs=(likely,))
                self.sent += 1
                await asyncio.sleep(0)
        finally:
            self.open = False


@pytest.fixture
def replica(target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Iterator[TargetReplica]:
    with serving_replica(target, tokenizer) as replica:
        yield replica


Serve = Callable[..., Client]


@pytest.fixture
def serve(replica: TargetReplica, tokenizer: PreTrainedTokenizerFast) -> Iterator[Serve]:
    opened: list[Any] = []

    def make(
        backend: Backend | None = None, keys: tuple[str, ...] = (), key: str | None = None, context: int = 1024
    ) -> Client:
        model = ServedModel(
            name="code",
            tokenizer=tokenizer,
            context=context,
            vocab_size=4096,
            fingerprint="fp_test",
            created=7,
            backend=backend or LocalBackend(replica),
        )
        server = Server(GrpcMethods({"code": model}, Service(), ApiKeys(keys)))
        client = Client(f"127.0.0.1:{server.port}", api_key=key)
        opened.extend([server, client])
        return client

    yield make
    for each in reversed(opened):
        each.close()


def test_a_client_asks_over_tls(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *made, *files], check=True, capture_output=True)
    model = ServedModel(
        name="code", tokenizer=tokenizer, context=64, vocab_size=4096, fingerprint="x", created=7, backend=Hasty()
    )
    tls = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    with closing(Server(GrpcMethods({"code": model}, Service(), ApiKeys([])), tls)) as server:
        with Client(f"127.0.0.1:{server.port}", tls=trusted) as client:
            assert [each.name for each in client.list_models(PATIENCE_S)] == ["code"]
        with Client(f"127.0.0.1:{server.port}", tls=grpc.ssl_channel_credentials()) as client:
            assert refusal(lambda: client.list_models(PATIENCE_S))[0] == "UNAVAILABLE"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_outputs_are_those_of_plain_decoding(
    serve: Serve, replica: TargetReplica, target: ModelRunner, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    wanted = {"max_tokens": 24, "temperature": temperature, "seed": 11, "n": 2, "logprobs": 2}
    chunks = list(serve().generate(PROMPT, model="code", **wanted))
    assert replica.wait_idle(PATIENCE_S)
    prompt = tuple(tokenizer(PROMPT)["input_ids"])
    for sample in range(2):
        mine = [chunk for chunk in chunks if chunk.sample == sample]
        seed = derive_seed(11, sample)
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=seed, logprobs=2)
        (oracle,) = decode(target, [GenerationRequest("x", prompt, params)], tokenizer=tokenizer)
        tokens = [token for chunk in mine for token in chunk.token_ids]
        assert tokens == list(oracle.tokens)
        assert "".join(chunk.text for chunk in mine) == tokenizer.decode(tokens, skip_special_tokens=True)
        logprobs = [each for chunk in mine for each in chunk.logprobs]
        assert len(logprobs) == 24
        assert all(len(each.top) == 2 and each.chosen <= each.top[0].logprob <= 0 for each in logprobs)
        assert [chunk.finish_reason for chunk in mine] == [0] * (len(mine) - 1) + [pb.FINISH_REASON_LENGTH]
        summary = mine[-1].summary
        assert (summary.prompt_tokens, summary.completion_tokens, summary.seed) == (len(prompt), 24, seed)
        assert summary.speculation.accepted_tokens + summary.speculation.steps in (24, 25)
        assert summary.system_fingerprint == "fp_test"


def test_token_ids_are_as_good_as_text(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    client = serve()
    texts = [
        "".join(chunk.text for chunk in client.generate(prompt, max_tokens=8, temperature=0))
        for prompt in (PROMPT, tokenizer(PROMPT)["input_ids"])
    ]
    assert texts[0] == texts[1] != ""


def test_models_are_listed(serve: Serve) -> None:
    (model,) = serve().list_models()
    assert (model.name, model.context, model.vocab_size, model.created) == ("code", 1024, 4096, 7)


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", "temperature"),
        ({"top_p": 2}, "INVALID_ARGUMENT", "top_p"),
        ({"top_k": -5}, "INVALID_ARGUMENT", "top_k"),
        ({"seed": 2**63}, "INVALID_ARGUMENT", "seed"),
        ({"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens"),
        ({"max_tokens": 10**9}, "INVALID_ARGUMENT", "max_tokens"),
        ({"n": 9}, "INVALID_ARGUMENT", "n"),
        ({"stop": list("abcde")}, "INVALID_ARGUMENT", "stop"),
        ({"logprobs": 1000}, "INVALID_ARGUMENT", "logprobs"),
        ({"logit_bias": {4096: 1.0}}, "INVALID_ARGUMENT", "logit_bias"),
        ({"response_format": {"kind": "KIND_JSON_SCHEMA", "schema": "{"}}, "INVALID_ARGUMENT", "response_format"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
        ({"prompt": [4096]}, "INVALID_ARGUMENT", "prompt"),
        ({"prompt": [1] * 1024}, "INVALID_ARGUMENT", "prompt"),
        ({"model": "other"}, "NOT_FOUND", "model"),
    ],
)
def test_bad_input_is_refused_by_name(serve: Serve, fields: dict[str, Any], code: str, named: str) -> None:
    client = serve()
    found, details = refusal(lambda: list(client.generate(**{"prompt": PROMPT, **fields})))
    assert found == code
    assert named in details


def test_bytes_that_are_no_request_are_refused(serve: Serve) -> None:
    method: Any = serve()._channel.unary_stream(f"/{SERVICE}/Generate")
    assert refusal(lambda: list(method(b"\xff\xff\xff")))[0] == "INVALID_ARGUMENT"
    assert refusal(lambda: list(method(b"x" * (MAX_REQUEST_BYTES + 1))))[0] == "RESOURCE_EXHAUSTED"


def test_a_key_is_needed_where_keys_are_configured(serve: Serve) -> None:
    assert refusal(serve(keys=("secret",)).list_models)[0] == "UNAUTHENTICATED"
    wrong = serve(keys=("secret",), key="wrong")
    code, details = refusal(lambda: next(wrong.generate(PROMPT)))
    assert code == "UNAUTHENTICATED"
    assert "authorization" in details
    assert len(list(serve(keys=("other", "secret"), key="secret").generate(PROMPT, max_tokens=2))) > 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Overloaded("9 requests are waiting already"), "RESOURCE_EXHAUSTED", "9 requests are waiting already"),
        (OSError("/a/path"), "INTERNAL", "an internal error"),
        (GenerationFailed("scores are not finite"), "INTERNAL", "scores are not finite"),
        (DeadlineExceeded("the request took too long"), "DEADLINE_EXCEEDED", "the request took too long"),
        (Closed("the target has ended"), "UNAVAILABLE", "no replica could take the request"),
    ],
)
def test_errors_have_their_code_and_tell_nothing_else(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, said: str
) -> None:
    monkeypatch.setattr(service, "_PAUSE_S", 0.0)
    client = serve(Refusing(error))
    found, details = refusal(lambda: list(client.generate(PROMPT)))
    assert found == code
    assert details.endswith(f": {said}")  # behind what this server, other than Ray Serve's, says of every exception


def test_a_replica_lost_for_good_behind_the_first_token_is_told(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PAUSE_S", 0.0)
    chunks = serve(Gone()).generate(PROMPT)
    assert list(next(chunks).token_ids) == [5]
    code, details = refusal(lambda: list(chunks))
    assert code == "UNAVAILABLE"
    assert details.endswith(": no replica could take the request")


def test_work_ends_with_its_call(serve: Serve, replica: TargetReplica) -> None:
    client = serve()
    endless = {"max_tokens": 900, "ignore_eos": True, "n": 8}
    all_of_it = 8 * 900
    with closing(client.generate(PROMPT, **endless)) as chunks:
        next(chunks)
        assert replica.stats().running + replica.stats().waiting > 0
    until(lambda: replica.stats().running == 0, "a cancelled call's work ends")
    before = replica.stats().tokens
    assert 0 < before < all_of_it
    assert refusal(lambda: list(client.generate(PROMPT, timeout_s=0.2, **endless)))[0] == "DEADLINE_EXCEEDED"
    until(lambda: replica.stats().running == 0, "the work of a call beyond its deadline ends")
    assert replica.stats().tokens - before < all_of_it


def test_a_reader_that_goes_away_while_it_reads_nothing_is_noticed(
    serve: Serve, replica: TargetReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_methods, "MAX_UNREAD", 10**6)  # which would end the call too
    chunks = serve().generate(PROMPT, max_tokens=900, ignore_eos=True, n=8, logprobs=20)
    next(chunks)
    until(lambda: replica.stats().tokens > 1000, "much is left unread")
    chunks.close()
    until(lambda: replica.stats().running == 0, "a cancelled call's work ends")
    assert replica.stats().tokens < 8 * 900


def test_a_reader_that_falls_behind_is_given_up(serve: Serve) -> None:
    backend = Hasty()
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    with grpc.insecure_channel(serve(backend, context=10**6).address, options=narrow) as channel:
        method: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        call = method(make_request("x", {"max_tokens": 900_000, "logprobs": 20}).SerializeToString())
        next(call)
        until(lambda: not backend.open, "the work of a reader that fell behind ends")
        assert backend.sent < 3 * MAX_UNREAD
        assert refusal(lambda: list(call)) == ("RESOURCE_EXHAUSTED", "the reader fell behind")
