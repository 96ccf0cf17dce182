"""Our server with vLLM as the engine of its target."""

import importlib.util
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deployments.serve import base_url
from engine.runner import ModelRunner
from tests import exact, served
from tests.cluster_fixtures import until
from tests.vllm_exact import accepted_by_metrics

STREAMS, TOKENS = 4, 200  # so long that streams still run when their replica is killed
START_S = 900.0  # vLLM takes minutes on a machine that is busy
ENGINE_ARGS = {"max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this environment: make test-vllm"),
    pytest.mark.timeout(2400),
]


def test_a_server_with_vllm_as_engine_writes_the_same_also_when_a_replica_is_killed(target: ModelRunner) -> None:
    engine = {"engine": "vllm", "engine_args": ENGINE_ARGS, "max_batch": STREAMS, "dtype": "float32"}
    config = served.make_config(**engine, **served.OWN_DEFAULTS, scaling={})
    made = served.make_requests(exact.load_prompts(STREAMS), 0.0, TOKENS)
    api = served.OverGrpc(config, START_S)
    expected = [api.expected(generation) for generation in exact.run(target, made, batch=STREAMS)]
    with served.deployed(config) as targets:
        until(lambda: all(each.drafts for each in asked(targets, "stats")), "vLLM finds its draft")
        said = served.read_all(api, made)
        assert list(served.parted(said, expected)) == []
        assert sum(each.accepted for each in said) > 0
        until(lambda: accepted_by_metrics(base_url(config.http)) > 0, "the metrics show it")
        with ThreadPoolExecutor(1) as reader:
            (pid,) = asked(targets, "pid")
            engines = children(pid)
            assert engines
            reading = reader.submit(served.read_all, api, made)
            until(lambda: asked(targets, "stats")[0].running > 0, "streams run")
            os.kill(pid, signal.SIGKILL)
            assert list(served.parted(reading.result(), expected)) == []
        until(lambda: not any(map(lives, engines)), "vLLM ends with its replica")
        asked(targets, "check", START_S)


def asked(targets: served.Targets, question: str, *arguments: Any) -> list[Any]:
    """The answers of all replicas."""
    answers: list[Any] = targets.broadcast(question, *arguments).results()
    return answers


def children(pid: int) -> list[int]:
    """Processes that a process started, and those that they started."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    direct = [int(child) for text in lists for child in text.split()]
    return [*direct, *(each for child in direct for each in children(child))]


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
