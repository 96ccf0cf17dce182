"""`paceline serve` and `vllm serve`, each in a process of its own, as contenders behind HTTP."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.checkpoints import Pair
from benchmarks.bench.http_client import Server
from benchmarks.server import free_port, get, serving

_START_S, _STOP_S = 900.0, 60.0  # vLLM compiles; machines are slow now and then
CONTEXT = 1024
KV_TOKENS = 4096  # of each of our targets, for one stream: at 150M, what is meant for many would fill 24 GB
PLAIN, DRAFTED = "plain", "drafted"  # the two models of our server


def our_config(pair: Pair, cores: Sequence[int], threads: int, kv_tokens: int | None = None) -> dict[str, Any]:
    """The target by itself, and with a draft beside it: two models of one server, of which one computes at a time.

    threads: of the target by itself. With a draft, both have one core each. kv_tokens: of each target, if not the default.
    """
    both: dict[str, Any] = {"checkpoint": str(pair.target), "dtype": pair.dtype}
    both |= {} if kv_tokens is None else {"kv_tokens": kv_tokens}
    alone, paired = {**both, "lookup": 0}, {**both, "replicas": {"cores": [cores[0]]}}
    drafting: dict[str, Any] = {"checkpoint": str(pair.draft), "dtype": pair.dtype, "host": "127.0.0.1"}
    drafting["replicas"] = {"cores": [cores[-1]]}
    place = {"cores": list(cores[:threads]), "threads": threads}
    return {
        "models": [
            {"name": PLAIN, "target": {**alone, "replicas": place}},
            {"name": DRAFTED, "target": paired, "draft": drafting},
        ]
    }


@contextmanager
def paceline(
    pair: Pair, cores: Sequence[int], threads: int, out: Path, kv_tokens: int | None = None
) -> Iterator[dict[str, Server]]:
    """`paceline serve`; where both of its models are."""
    with serving(our_config(pair, cores, threads, kv_tokens), out, start_s=_START_S) as url:
        yield {name: Server(url, name) for name in (PLAIN, DRAFTED)}


@dataclass(frozen=True)
class VllmOptions:
    """What `vllm serve` serves, and how. arguments: further ones."""

    python: Path
    pair: Pair
    arguments: Sequence[str]
    streams: int
    eager: bool


@contextmanager
def vllm(
    name: str, options: VllmOptions, environment: dict[str, str], out: Path
) -> Iterator[tuple[Server, "subprocess.Popen[bytes]"]]:
    """`vllm serve`, while it starts and then while it runs: see `wait_ready`."""
    port = free_port()
    command = [
        *(str(options.python.with_name("vllm")), "serve", str(options.pair.target)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", name),
        *("--dtype", options.pair.dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(options.streams)),
        *("--generation-config", "vllm"),
        *(("--enforce-eager",) if options.eager else ()),
        *options.arguments,
    ]
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            yield Server(f"http://127.0.0.1:{port}", name), process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    """Raises TimeoutError, also when it ended."""
    deadline = time.monotonic() + _START_S
    while get(f"{server.url}/health") is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{server.model} did not start; see its log")
        time.sleep(0.5)
