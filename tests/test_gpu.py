"""The engine on a GPU, from passes to a target and a draft that never wait for each other."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from cluster.draft import DraftReplica
from cluster.link import memory_link
from cluster.target import TargetReplica
from cluster.warm import warm_up_drafter
from engine.attention import chain_rows
from engine.choice import Weights
from engine.decode import Generation
from engine.drafters.model import ModelDrafter
from engine.runner import Dtype, ModelRunner
from tests import exact
from tests.cluster_fixtures import PATIENCE_S
from tests.rows import leased

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
TOKENS = 48


def loaded(path: Path, dtype: Dtype = "bfloat16", invariant: bool = False, weights: Weights = "auto") -> ModelRunner:
    return ModelRunner(path, device=DEVICE, dtype=dtype, invariant=invariant, weights=weights, kv_tokens=8192)


@pytest.fixture(scope="module")
def small() -> ModelRunner:
    return loaded(exact.DRAFT)


@pytest.fixture(scope="module", params=[("bfloat16", False), ("float32", False), ("bfloat16", True)], ids=str)
def big(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    dtype, invariant = request.param
    runner = loaded(exact.TARGET, dtype, invariant)
    yield runner
    runner.pool.check()
    assert runner.pool.used_pages == 0


def same(generations: Sequence[Generation], plain: list[list[int]], runner: ModelRunner) -> None:
    """Outputs are the same: all of them in invariant mode, else up to ties."""
    tie = 0.0 if runner.invariant else exact.TIES["float32" if runner.dtype == torch.float32 else "bfloat16"]
    for part in exact.differences(generations, plain):
        assert part.margin is not None, part
        assert part.margin < tie, part


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_a_recorded_pass_has_the_bits_of_one_that_is_not(rows: int) -> None:
    runner = loaded(exact.TARGET)
    graphs = runner._graphs
    assert graphs is not None
    with leased(runner, 128, 32) as (lease, other):
        batch = [chain_rows(lease, 0, list(range(rows)), wanted=0), chain_rows(other, 0, [5], wanted=0)]
        for _ in range(2):  # the second with the numbers of another pass around
            recorded = runner.forward(batch)
            graphs.records, recordings = False, graphs._recordings
            graphs._recordings = {}
            assert torch.equal(runner.forward(batch), recorded)
            graphs.records, graphs._recordings = True, recordings
            assert graphs._recordings


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_do_not_depend_on_speculation(
    big: ModelRunner, small: ModelRunner, prompts: list[exact.Tokens], temperature: float
) -> None:
    requests = exact.make_requests(prompts, temperature, TOKENS)
    plain = [generation.tokens for generation in exact.run(big, requests, batch=1)]
    for make in (exact.chain(5), exact.tree(15), exact.automatic):
        same(exact.run(big, requests, make(small), margins=True), plain, big)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_outputs_do_not_depend_on_a_draft_beside(
    prompts: list[exact.Tokens], temperature: float, weights: Weights
) -> None:
    target = loaded(exact.TARGET, invariant=True)
    requests = exact.make_requests(prompts, temperature, TOKENS)
    plain = [generation.tokens for generation in exact.run(target, requests, batch=1)]
    replica = TargetReplica(target, exact.goodput())
    drafter = ModelDrafter(loaded(exact.DRAFT, weights=weights))
    warm_up_drafter(drafter)
    drafting = DraftReplica(drafter)
    ours, theirs = memory_link()
    drafting.add_link(theirs)
    replica.add_link(ours)
    helped = exact.serve_until_accepted(replica, requests, plain)
    assert [generation.tokens for generation in helped] == plain
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    replica.close()
    drafting.close()
