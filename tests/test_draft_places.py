"""A draft in the target's own process, or in replicas of its own, or none: no token is another, wherever it runs."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import best_place, place_speed
from cluster.actors import TargetConfig, own_target
from cluster.best_place import PLACES, Place
from cluster.drafters import DraftConfig
from cluster.placement import Placement
from cluster.target import TargetReplica
from deployments.app import build, target_config
from deployments.config import ServeConfig
from deployments.config_load import ConfigError, parse_config
from engine.automatic import SHARED
from engine.checkpoint import ModelError
from engine.decode import decode
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.types import GenerationRequest, TokenChunk
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

TOKENS = 32


@pytest.fixture(scope="module")
def second_draft() -> ModelRunner:
    """For the target's process, while a replica has the other one."""
    return ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=8 * 1024)


@contextmanager
def serving(
    runner: ModelRunner, draft: ModelRunner, places: Sequence[Place], max_batch: int = 2
) -> Iterator[TargetReplica]:
    """A target with a draft in its process, audited at the end."""
    replica = TargetReplica(
        runner, exact.goodput(), max_batch=max_batch, lookup=8, shared=exact.sharing(draft), places=places
    )
    try:
        yield replica
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
        assert draft.pool.used_pages == 0, "the draft in the target's process holds pages"
    finally:
        replica.close()


def plain_of(
    target: ModelRunner, temperature: float, count: int = 3
) -> tuple[list[GenerationRequest], list[list[int]]]:
    requests = exact.make_requests(exact.load_prompts(count), temperature, TOKENS)
    return requests, [generation.tokens for generation in decode(target, requests)]


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.0, 3), (0.8, 3)])
def test_a_draft_in_the_targets_process_guesses_and_the_tokens_are_the_plain_ones(
    target: ModelRunner, draft: ModelRunner, temperature: float, batch: int
) -> None:
    requests, plain = plain_of(target, temperature)
    with serving(target, draft, ("shared",), batch) as replica:
        generations = exact.serve(replica, requests)
        assert not list(exact.differences(generations, plain))
        stats = replica.stats()
        assert stats.places == {"separate": 0, "shared": stats.steps, "none": 0, "off": 0}
        assert stats.accepted == sum(generation.accepted for generation in generations)
        assert stats.decoded / stats.sequence_steps > 1.5, "the draft did not guess"
        assert stats.drafts == stats.empty == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_places_in_the_middle_of_streams_and_the_tokens_stay(
    target: ModelRunner,
    draft: ModelRunner,
    second_draft: ModelRunner,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often = {
        "_ENOUGH": 3,
        "_FEWEST": 2,
        "_STAY": 1,
        "_AFFORDED": 1e6,
        "_SETTLING": 0,
        "_READING": 0,
        "_LASTING": 1,
        "_LEAVING": 1,
        "_FEW": 0,
    }
    for name, value in often.items():
        monkeypatch.setattr(best_place, name, value)
    monkeypatch.setattr(place_speed, "_DOUBT", 100.0)
    requests, plain = plain_of(target, temperature, 6)
    with serving(target, second_draft, PLACES, 3) as replica, exact.linked(replica, draft) as drafting:

        def everywhere() -> bool:
            """After the requests once more: drafts that guess well end them in few steps."""
            assert not list(exact.differences(exact.serve(replica, requests), plain))
            return all(steps > 3 for steps in replica.stats().places.values())

        until(everywhere, "steps in every place")
        until(lambda: drafting.stats().sessions == 0, "the draft's sessions end")


@pytest.mark.parametrize(("place", "guesses"), [("none", True), ("off", False)])
def test_without_drafts_lookups_go_on_unless_nothing_is_guessed(
    target: ModelRunner, draft: ModelRunner, place: Place, guesses: bool
) -> None:
    request = exact.make_requests([tuple(range(40, 60)) * 4], 0.0, TOKENS)
    plain = [generation.tokens for generation in decode(target, request)]
    with serving(target, draft, (place,)) as replica:
        assert not list(exact.differences(exact.serve(replica, request), plain))
        stats = replica.stats()
        assert stats.places[place] == stats.steps > 0
        assert (stats.verified > 0) == guesses


def test_a_target_that_looks_nothing_up_is_never_off(target: ModelRunner) -> None:
    requests, _ = plain_of(target, 0.0, 1)
    replica = TargetReplica(target, exact.goodput(), places=("off",))
    try:
        exact.serve(replica, requests)
        stats = replica.stats()
        assert stats.places["none"] == stats.steps > 0
        assert replica.wait_idle(PATIENCE_S)
    finally:
        replica.close()


def test_a_target_whose_drafts_die_drafts_for_itself(
    target: ModelRunner, draft: ModelRunner, second_draft: ModelRunner
) -> None:
    requests, plain = plain_of(target, 0.0, 2)
    died, ended = threading.Event(), threading.Semaphore(0)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    with serving(target, second_draft, ("separate", "shared")) as replica, exact.linked(replica, draft) as drafting:

        def sink(chunk: TokenChunk) -> None:
            tokens[chunk.request_id] += chunk.tokens
            if not died.is_set():
                died.set()
                threading.Thread(target=drafting.close).start()
            if chunk.finish_reason is not None:
                ended.release()

        for request in requests:
            replica.submit(request, sink)
        for _ in requests:
            assert ended.acquire(timeout=PATIENCE_S)
        until(lambda: replica.stats().drafts == 0, "the draft is gone")
        assert list(tokens.values()) == plain
        assert not list(exact.differences(exact.serve(replica, requests), plain))
        assert replica.stats().places["shared"] > 0


def test_a_cancelled_request_leaves_no_session_of_the_draft(target: ModelRunner, draft: ModelRunner) -> None:
    (request,) = exact.make_requests(exact.load_prompts(1), 0.8, 512)
    reasons: list[str | None] = []

    def sink(chunk: TokenChunk) -> None:
        reasons.append(chunk.finish_reason)
        replica.cancel("0")

    with serving(target, draft, ("shared",)) as replica:
        replica.submit(request, sink)
        assert replica.wait_idle(PATIENCE_S)
    assert reasons[-1] == "cancelled"
    assert target.pool.used_pages == 0


def test_a_request_that_is_preempted_leaves_the_draft_and_comes_back(draft: ModelRunner) -> None:
    runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=256)
    requests = exact.make_requests([prompt[:20] for prompt in exact.load_prompts(2)], 0.0, 90)
    plain = [generation.tokens for generation in exact.run(runner, requests, batch=1)]
    with serving(runner, draft, ("shared",)) as replica:
        generations = exact.serve(replica, requests)
        assert replica.stats().preempted > 0
    assert not list(exact.differences(generations, plain))


def test_a_draft_without_room_for_a_session_does_without(target: ModelRunner) -> None:
    requests, plain = plain_of(target, 0.0)
    small = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=512)
    with serving(target, small, ("shared",), 3) as replica:
        assert not list(exact.differences(exact.serve(replica, requests), plain))


@pytest.mark.parametrize("what", ["grow", "commit"])
def test_a_draft_in_the_targets_process_that_fails_costs_speed_only(
    target: ModelRunner,
    draft: ModelRunner,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests, plain = plain_of(target, 0.0)
    calls = 0
    works = getattr(ModelDrafter, what)

    def fails(drafter: ModelDrafter, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("out of memory")
        return works(drafter, *arguments)

    monkeypatch.setattr(ModelDrafter, what, fails)
    with serving(target, draft, ("shared", "none")) as replica:
        assert not list(exact.differences(exact.serve(replica, requests), plain))
        places = replica.stats().places
    assert places["shared"] > 0
    assert places["none"] > 0
    assert "is left alone from now on" in caplog.text
    assert "out of memory" in caplog.text


def test_requests_that_name_a_window_share_the_draft(target: ModelRunner, draft: ModelRunner) -> None:
    requests, plain = plain_of(target, 0.0, 4)
    windows = ["chain:3", "off", "", "tree:7"]
    named = [
        GenerationRequest(request.request_id, request.prompt, request.params, window=window)
        for request, window in zip(requests, windows, strict=True)
    ]
    with serving(target, draft, ("shared",), 4) as replica:
        generations = exact.serve(replica, named)
        assert not list(exact.differences(generations, plain))
        assert [generation.accepted > 0 for generation in generations] == [True, False, True, True]


def test_another_window_of_the_replicas_own_is_kept(target: ModelRunner, draft: ModelRunner) -> None:
    requests, plain = plain_of(target, 0.0)
    replica = TargetReplica(target, FixedTree(5), lookup=8, shared=exact.sharing(draft), places=("shared",))
    assert not list(exact.differences(exact.serve(replica, requests), plain))
    stats = replica.stats()
    replica.close()
    assert 0 < stats.verified <= 5 * stats.sequence_steps


# --- configurations


def config_of(engine: str = "paceline", **draft: str) -> ServeConfig:
    target = {"checkpoint": str(exact.TARGET), "engine": engine}
    values = {"name": "code", "target": target, "draft": {"checkpoint": str(exact.DRAFT), **draft}}
    return parse_config({"models": [values]})


def test_a_draft_is_in_both_places_unless_one_is_named() -> None:
    for placement, separate, shared in (("auto", True, True), ("separate", True, False), ("shared", False, True)):
        (model,) = config_of(placement=placement).models
        assert (model.separate is not None, model.shared is not None) == (separate, shared)
        assert model.draft_replicas(3) == model.most_drafts * 3 == (3 if separate else 0)
    (model,) = config_of("vllm").models
    assert (model.separate is not None, model.shared is not None) == (True, False)


def test_outputs_are_kept_for_others_only_where_clients_share_them() -> None:
    for keys, kept in (([], SHARED), (["secret"], 0)):
        pair = {"name": "code", "target": {"checkpoint": str(exact.TARGET)}, "draft": {"checkpoint": str(exact.DRAFT)}}
        application: Any = build(parse_config({"models": [pair], "http": {"api_keys": keys}}))
        _, targets, _, _ = application._bound_deployment.init_args
        config, _, _ = targets["code"]._bound_deployment.init_args
        assert isinstance(config, TargetConfig)
        assert config.draft is not None
        assert (config.earlier, config.draft.shared, config.local.shared) == (kept, kept, kept)


def test_only_drafts_with_replicas_of_their_own_are_deployed() -> None:
    for placement, deployed in (("auto", ["code"]), ("separate", ["code"]), ("shared", [])):
        application: Any = build(config_of(placement=placement))
        _, _, drafts, _ = application._bound_deployment.init_args
        assert list(drafts) == deployed


@pytest.mark.parametrize(
    ("engine", "draft", "message"),
    [
        ("vllm", {"placement": "shared"}, "draft.placement: a draft shares no process with the engine vllm"),
        ("paceline", {"placement": "shared", "drafter": "cascade", "inner": "there:9101"}, "no inner draft service"),
        ("paceline", {"placement": "shared", "host": "0.0.0.0"}, "host is no setting of a draft that shares"),
        ("paceline", {"placement": "shared", "weights": "int4"}, "weights int4: only on GPUs"),
        ("paceline", {"placement": "beside"}, "'auto', 'separate' or 'shared'"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(engine: str, draft: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(engine, **draft)


def test_a_draft_that_a_target_cannot_load_may_still_be_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """On another machine the same folder may be there."""
    (model,) = config_of().models
    gone = DraftConfig(Path("/no/such/folder"), "float32")
    config = target_config("code", model.target, draft=gone)
    assert isinstance(config, TargetConfig)
    with caplog.at_level(logging.WARNING):
        replica, _ = own_target(config, Placement(), 0)
    replica.close()
    assert "in replicas of its own only" in caplog.text
    with pytest.raises(ModelError):
        own_target(target_config("code", model.target, draft=gone, places=("shared", "none")), Placement(), 0)
