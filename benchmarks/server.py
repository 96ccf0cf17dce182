"""`paceline serve` in a process of its own, for benchmarks that are its clients."""

import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
_START_S, _STOP_S = 480.0, 120.0  # how long it may take


# Below those that a system gives to who asks for any: who gets one here binds it seconds later, when it has loaded.
_DRAFTS = range(26_500, 26_700)  # the ports that drafts have by the manifests, which their tests serve as they are
_PORTS = iter(random.SystemRandom().sample([port for port in range(20_000, 32_000, 10) if port not in _DRAFTS], 1180))


def free_port() -> int:
    """One that nobody has on any address; nor does a later call give it, or one of the nine above it."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("no port is left")


def get(url: str) -> str | None:
    """The body of an answer; None without one."""
    with (
        suppress(urllib.error.URLError, ConnectionError, TimeoutError),
        urllib.request.urlopen(url, timeout=10) as answer,
    ):
        return str(answer.read().decode())
    return None


def is_ready(url: str) -> bool:
    """Whether every model can answer."""
    return get(f"{url}/ready") is not None


@contextmanager
def serving(
    values: dict[str, Any],
    out: Path,
    started: Callable[[str], bool] = is_ready,
    address: str | None = None,
    start_s: float = _START_S,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """`paceline serve` with these settings, on free ports; the URL of its API. It is interrupted at the end.

    out: folder of its configuration and its log. started: when to begin, given the URL, after `start_s` at most.
    address: of a Ray cluster to join. environment: instead of this process's.
    """
    http = free_port()
    path, log = (out / "serve.yaml").absolute(), out / "serve.log"
    ports = {"http": {**values.get("http", {}), "port": http}, "grpc": {"port": free_port()}}
    path.write_text(yaml.safe_dump({**values, **ports}))
    command = [sys.executable, "-c", "from deployments.cli import app; app()", "serve", "--config", str(path)]
    command += ["--address", address] if address is not None else []
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{http}"
            deadline = time.monotonic() + start_s
            while not started(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(_STOP_S)
