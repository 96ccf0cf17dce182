"""Requests with what plain decoding gives for them; no thread outlives a test, and no clock ends a pause."""

import threading
from collections.abc import Iterator

import pytest

from cluster import draft as draft_module
from cluster import target as target_module
from engine.decode import decode
from engine.runner import ModelRunner
from tests import exact
from tests.cluster_fixtures import PATIENCE_S
from tests.replicas.helpers import TOKENS, Case, MakeCase


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("paceline"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that pause go on for what comes in, or never."""
    monkeypatch.setattr(target_module, "RENEW_EVERY_S", 10 * PATIENCE_S)
    monkeypatch.setattr(draft_module, "_EXPIRE_EVERY_S", 10 * PATIENCE_S)


@pytest.fixture(scope="module")
def _plain() -> dict[tuple[float, int], list[list[int]]]:
    return {}


@pytest.fixture
def case(target: ModelRunner, _plain: dict[tuple[float, int], list[list[int]]]) -> MakeCase:
    lengths = [17, 1, 2, 65, 24, 9, 33, 12]
    prompts = [prompt[:length] for prompt, length in zip(exact.load_prompts(len(lengths)), lengths, strict=True)]

    def make(temperature: float = 0.7, tokens: int = TOKENS) -> Case:
        requests = exact.make_requests(prompts, temperature, tokens)
        key = (temperature, tokens)
        if key not in _plain:
            _plain[key] = [generation.tokens for generation in decode(target, requests)]
        return Case(requests, _plain[key])

    return make
