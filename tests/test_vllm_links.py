"""How vLLM is told of its drafts; it is pretended here."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import vllm_target
from cluster.placement import Placement
from cluster.vllm_options import VllmOptions
from cluster.vllm_target import VllmTarget
from tests.cluster_fixtures import until


class Pretended:
    """What VllmTarget needs of vLLM's AsyncLLM to tell it something; a call waits for the present step."""

    vllm_config = SimpleNamespace()
    errored = False
    output_handler = None

    def __init__(self) -> None:
        self.stepping = False
        self.limits: list[float | None] = []

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[dict[str, int]]:
        self.limits.append(timeout)
        while self.stepping:
            await asyncio.sleep(0.001)
        return [{}, {"drafts": len(args[0])}]

    def shutdown(self) -> None:
        self.stepping = False


@pytest.fixture
def engine() -> Pretended:
    return Pretended()


@pytest.fixture
def target(engine: Pretended, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmTarget]:
    async def start(*arguments: object) -> Pretended:
        return engine

    monkeypatch.setattr(vllm_target, "check_options", lambda options: None)
    monkeypatch.setattr(vllm_target, "_start", start)
    made = VllmTarget(Path("model"), "float32", 4, 0.0, VllmOptions(drafted=True), Placement())
    yield made
    made.close()


def test_a_step_longer_than_the_patience_costs_one_telling_and_no_answer_of_vllms(
    target: VllmTarget, engine: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_target, "_TELL_TIMEOUT_S", 0.05)
    addresses = ["127.0.0.1:1"]
    engine.stepping = True
    target.follow(addresses)
    assert target.stats().drafts == 0
    engine.stepping = False

    def told() -> bool:
        target.follow(addresses)
        return target.stats().drafts == 1

    until(told, "vLLM is told again")
    assert set(engine.limits) == {None}  # with one of its own, a rank's late answer would be read as that of a step
