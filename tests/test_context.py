"""Where a model's context ends: guesses may lie beyond it, and change nothing."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.target import TargetReplica
from engine.decode import decode
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams
from tests import exact
from tests.cluster_fixtures import PATIENCE_S

SHORT = 96  # tokens of context


def cut(model: Path, to: Path, invariant: bool = False) -> ModelRunner:
    """The model, with a context of a few tokens."""
    shutil.copytree(model, to)
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": SHORT}))
    return ModelRunner(to, dtype="float32", invariant=invariant, kv_tokens=2048)


@pytest.fixture(scope="module")
def short_target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return cut(exact.TARGET, tmp_path_factory.mktemp("models") / "target", invariant=True)


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return cut(exact.DRAFT, tmp_path_factory.mktemp("models") / "draft")


def request_to(end: int, temperature: float = 0.0) -> GenerationRequest:
    """Its last token is at this place."""
    tokens = sum(exact.load_prompts(8), ())[: end - 24]
    return GenerationRequest("0", tokens, SamplingParams(temperature, max_tokens=24, ignore_eos=True))


@pytest.mark.parametrize("name", ["chain-15", "tree-31", "auto", "ngram-12", "early-exit-chain"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_that_fills_the_context_is_drafted_for(
    short_target: ModelRunner, short_draft: ModelRunner, name: str, temperature: float
) -> None:
    request = request_to(SHORT, temperature)
    makers = {**exact.SPECULATIONS, **exact.SELF_SPECULATIONS}
    speculation = makers[name](short_target if name in exact.SELF_SPECULATIONS else short_draft)
    (plain,), (drafted,) = decode(short_target, [request]), decode(short_target, [request], speculation)
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 24


def test_a_draft_with_a_shorter_context_than_its_target_lives_on(target: ModelRunner, short_draft: ModelRunner) -> None:
    requests = [request_to(2 * SHORT), request_to(SHORT // 2)]
    plain = [decode(target, [request])[0].tokens for request in requests]
    replica = TargetReplica(target, exact.goodput())
    with exact.linked(replica, short_draft) as drafting:
        [beyond] = exact.serve(replica, requests[:1])
        assert beyond.tokens == plain[0]
        exact.serve_until_accepted(replica, requests[1:], plain[1:])  # it guesses within its context
        assert drafting.alive
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    replica.close()
