"""The first promise through the whole server: what clients get over HTTP and gRPC is what plain decoding gives.

A part of tests.matrix: two targets and a draft under Ray Serve, as `paceline serve` runs them; 16 streams at a time, greedy
and seeded, also while targets are killed under them.
"""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from benchmarks.server import free_port
from cluster.local import start_ray
from cluster.pb import generation_pb2 as pb
from deployments.client import Client
from deployments.config import ServeConfig
from deployments.config_load import parse_config
from deployments.serve import APPLICATION, base_url, deploy, prepare, withdraw
from engine.decode import Generation
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

MODEL = "code"
TARGETS, MAX_BATCH, QUEUE = 2, 8, 16
STREAMS = 16  # at a time
TEMPERATURES = (0.0, 0.8)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos")
_LOOK_EVERY_S = 0.1
OWN_DEFAULTS = {"invariant": False, "kv_tokens": 32768}  # the settings of our own engine, where another one runs

Targets = DeploymentHandle[Any]
Plain = Callable[[], list[Generation]]  # what plain decoding gives, when it is first needed


def make_config(**target: Any) -> ServeConfig:
    """The bundled pair in invariant mode, two targets and a draft. target: options beside these."""
    http, grpc, first = free_port(), free_port(), free_port()
    replicas = {"min_replicas": TARGETS, "max_replicas": TARGETS}
    own = {"checkpoint": str(exact.TARGET), "dtype": "float32", "invariant": True, "max_batch": MAX_BATCH}
    draft = {"checkpoint": str(exact.DRAFT), "dtype": "float32", "kv_tokens": 16384, "host": "127.0.0.1"}
    model = {
        "name": MODEL,
        "target": {**own, "kv_tokens": 8192, "scaling": replicas, **target},
        "draft": {**draft, "ports": [first, first + 9], "scaling": {"ratio": 1 / TARGETS}},
    }
    limits = {"queue": QUEUE, "drain_s": 20}
    return parse_config({"models": [model], "http": {"port": http}, "grpc": {"port": grpc}, "limits": limits})


@contextmanager
def deployed(config: ServeConfig) -> Iterator[Targets]:
    """The application as `paceline serve` deploys it, in a Ray of its own; its targets."""
    start_ray()
    try:
        deploy(prepare(config, lambda text: None), lambda text: None)
        yield serve.get_deployment_handle(f"{MODEL}-target", APPLICATION)
        withdraw(config)
    finally:
        ray.shutdown()


@dataclass
class Said:
    """What a client got for one request, or should get."""

    tokens: list[Any]  # ids over gRPC; over HTTP, which has no ids, each token's text and log probability
    text: str = ""
    finish: str | None = None
    accepted: int = 0  # of the tokens, by the draft: not a part of the promise, and neither is the next
    resumed: int = 0  # times that it went on at another target; only over HTTP

    @property
    def promised(self) -> list[Any]:
        return [*self.tokens, (self.text, self.finish)]


class Api(Protocol):
    """What clients can ask by."""

    def read(self, request: GenerationRequest) -> Said:
        """The whole stream."""

    def expected(self, generation: Generation) -> Said:
        """What `read` should give for it."""


class OverHttp:
    """Implements Api."""

    def __init__(self, config: ServeConfig) -> None:
        self._url = f"{base_url(config.http)}/v1/completions"
        self._tokenizer = load_tokenizer(exact.TARGET)

    def read(self, request: GenerationRequest, heard: Callable[[Said], None] = lambda said: None) -> Said:
        """See Api. heard: called with what there is, whenever something came."""
        fields = sampling(request) | {"prompt": list(request.prompt), "logprobs": 0}
        body = {**fields, "model": MODEL, "stream": True, "paceline": {"stats": True}}
        asked = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        said, last = Said([]), b""
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            for line in filter(bytes.strip, answer):
                last = line.removeprefix(b"data: ").strip()
                if last != b"[DONE]":
                    self._add(said, json.loads(last))
                    heard(said)
        assert last == b"[DONE]", f"the stream ended with {last!r}"
        return said

    def _add(self, said: Said, event: dict[str, Any]) -> None:
        assert "error" not in event, event["error"]
        (choice,) = event["choices"]
        said.text += choice["text"]
        said.finish = choice["finish_reason"] or said.finish
        if logprobs := choice.get("logprobs"):
            said.tokens += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        for stats in event.get("paceline", {}).get("choices", ()):
            said.accepted, said.resumed = stats["accepted"], stats["resumed"]

    def expected(self, generation: Generation) -> Said:
        """See Api."""
        texts = [self._tokenizer.decode([token]) for token in generation.tokens]
        logprobs = [entry.chosen for entry in generation.logprobs]
        text = self._tokenizer.decode(generation.tokens, skip_special_tokens=True)
        return Said(list(zip(texts, logprobs, strict=True)), str(text), generation.finish_reason)


class OverGrpc:
    """Implements Api."""

    def __init__(self, config: ServeConfig, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._client = Client(f"127.0.0.1:{config.grpc.port}", application=APPLICATION)
        self._tokenizer = load_tokenizer(exact.TARGET)

    def read(self, request: GenerationRequest) -> Said:
        """See Api."""
        said = Said([])
        for chunk in self._client.generate(request.prompt, self._patience_s, model=MODEL, **sampling(request)):
            said.tokens += chunk.token_ids
            said.text += chunk.text
            if chunk.finish_reason:
                said.finish = pb.FinishReason.Name(chunk.finish_reason).removeprefix("FINISH_REASON_").lower()
                said.accepted = chunk.summary.speculation.accepted_tokens
        return said

    def expected(self, generation: Generation) -> Said:
        """See Api."""
        text = self._tokenizer.decode(generation.tokens, skip_special_tokens=True)
        return Said(list(generation.tokens), str(text), generation.finish_reason)


def sampling(request: GenerationRequest) -> dict[str, Any]:
    """The fields that both protocols have by the same names."""
    values = asdict(request.params)
    return {name: values[name] for name in _SAMPLING}


class Killer:
    """Kills a target whenever all of them run and one has streams; a context manager."""

    def __init__(self, targets: Targets) -> None:
        self.streams: list[int] = []  # that each one killed had
        self._targets = targets
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            running = running_by_pid(self._targets)
            pid = max(running, key=lambda pid: running[pid], default=0)
            if len(running) == TARGETS and running[pid]:
                os.kill(pid, signal.SIGKILL)
                self.streams.append(running[pid])
                until(lambda: pid not in running_by_pid(self._targets), "a killed target is gone")  # noqa: B023

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        until(lambda: len(running_by_pid(self._targets)) == TARGETS, "Serve starts another target")


def running_by_pid(targets: Targets) -> dict[int, int]:
    """How many streams each target has; none when one of them doesn't answer."""
    with suppress(RayActorError, DeploymentUnavailableError):
        pids, stats = targets.broadcast("pid").results(), targets.broadcast("stats").results()
        return {pid: each.running for pid, each in zip(pids, stats, strict=False)}
    return {}


def parted(said: Sequence[Said], expected: Sequence[Said]) -> Iterator[exact.Difference]:
    """The first difference of each stream that is not as expected; behind the last token: of the text or its end."""
    for index, (one, other) in enumerate(zip(said, expected, strict=True)):
        if one.promised != other.promised:
            pairs = enumerate(zip(one.promised, other.promised, strict=False))
            yield exact.Difference(str(index), next(at for at, (a, b) in pairs if a != b), None)


def compare(
    config: ServeConfig, targets: Targets, runner: ModelRunner, requests: Sequence[GenerationRequest]
) -> Iterator[exact.Comparison]:
    """Both protocols, with all targets and with targets that are killed, against plain decoding in this process."""
    asked = [replace(request, params=replace(request.params, logprobs=0)) for request in requests]
    plain = cache(lambda: exact.run(runner, asked, batch=4))
    temperature = f"T={requests[0].params.temperature}"
    until(lambda: all(each.drafts for each in targets.broadcast("stats").results()), "every target finds its draft")
    apis: dict[str, Api] = {"HTTP": OverHttp(config), "gRPC": OverGrpc(config)}
    for name, api in apis.items():
        case = f"{temperature} {name}"
        yield exact.Comparison(case, partial(streamed, api, requests, plain))
        yield exact.Comparison(f"{case}, targets killed", partial(killed, targets, api, requests, plain))


def streamed(api: Api, requests: Sequence[GenerationRequest], plain: Plain) -> exact.Result:
    """With all targets."""
    said = read_all(api, requests)
    return shares(said), list(parted(said, [api.expected(generation) for generation in plain()]))


def killed(targets: Targets, api: Api, requests: Sequence[GenerationRequest], plain: Plain) -> exact.Result:
    """With targets that are killed; all again where the streams ended before one was."""
    rounds: list[list[Said]] = []

    def read_until_killed() -> bool:
        rounds.append(read_all(api, requests))
        return bool(killer.streams)

    with Killer(targets) as killer:
        until(read_until_killed, "a target is killed under its streams")
    said = [each for part in rounds for each in part]
    told = f"{len(killer.streams)} targets killed under {sum(killer.streams)} streams, {shares(said)}"
    return told, list(parted(said, [api.expected(generation) for generation in plain()] * len(rounds)))


def read_all(api: Api, requests: Sequence[GenerationRequest]) -> list[Said]:
    """So many at a time."""
    with ThreadPoolExecutor(STREAMS) as readers:
        return list(readers.map(api.read, requests))


def shares(said: Sequence[Said]) -> str:
    """What came, and how much of it the draft had guessed."""
    tokens, accepted = sum(len(each.tokens) for each in said), sum(each.accepted for each in said)
    return f"{len(said)} streams of {tokens} tokens, {accepted / tokens:.0%} from the draft"


def served_matrix(runner: ModelRunner, prompts: Sequence[exact.Tokens], tokens: int) -> Iterator[exact.Comparison]:
    """Through a server that is started for it; audited at the end."""
    config = make_config()
    with deployed(config) as targets:
        for temperature in TEMPERATURES:
            yield from compare(config, targets, runner, make_requests(prompts, temperature, tokens))
        targets.broadcast("check", PATIENCE_S).results()


def make_requests(prompts: Sequence[exact.Tokens], temperature: float, tokens: int) -> list[GenerationRequest]:
    """Those of the whole matrix, but end tokens end the output."""
    requests = exact.make_requests(prompts, temperature, tokens)
    return [replace(request, params=replace(request.params, ignore_eos=False)) for request in requests]
