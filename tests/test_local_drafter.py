"""A target that guesses by itself: its drafter's guesses hang in the same mirrors as growth, and no token is another."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.draft import DraftReplica
from cluster.drafters import LocalConfig, make_local
from cluster.link import memory_link
from cluster.own_guesses import LocalDrafter, OwnGuesses
from cluster.target import TargetReplica
from deployments.config_load import ConfigError, check_config, parse_config
from engine.checkpoint import ModelError
from engine.decode import decode
from engine.drafters.early_exit import EarlyExitDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.retrieval import Documents
from engine.local_choice import HEADS_FILE, check_heads
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.tree import TokenTree
from engine.types import GenerationRequest, InvalidRequest, SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

TOKENS = 16


@contextmanager
def guessing(runner: ModelRunner, local: LocalDrafter | None, max_batch: int = 2) -> Iterator[TargetReplica]:
    """A target without lookup, audited at the end."""
    replica = TargetReplica(runner, FixedTree(7), max_batch=max_batch, local=local)
    try:
        yield replica
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
    finally:
        replica.close()


def local(name: str, runner: ModelRunner) -> LocalDrafter:
    made = make_local(exact.LOCALS[name], runner, load_tokenizer(exact.TARGET))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("name", "temperature", "batch"),
    [
        ("heads", 0.0, 1),
        ("heads", 0.8, 3),
        ("early-exit", 0.0, 3),
        ("early-exit", 0.8, 1),
        ("jacobi", 0.8, 3),
        ("suffix", 0.0, 3),
        ("ngram", 0.0, 1),
        ("retrieval", 0.8, 3),
    ],
)
def test_every_local_drafter_guesses_and_serves_the_plain_tokens(
    target: ModelRunner, name: str, temperature: float, batch: int
) -> None:
    requests = exact.make_requests(exact.load_prompts(3), temperature, TOKENS)
    plain = [generation.tokens for generation in decode(target, requests)]
    with guessing(target, local(name, target), batch) as replica:
        generations = exact.serve(replica, requests)
        assert not list(exact.differences(generations, plain))
        stats = replica.stats()
        assert stats.verified > 0, "nothing was guessed"
        assert stats.accepted == sum(generation.accepted for generation in generations)
        assert stats.accepted or name not in ("heads", "early-exit"), "guesses of the target's layers are all wrong"
        assert stats.drafts == stats.empty == 0


def test_growth_and_own_guesses_hang_in_one_mirror(target: ModelRunner) -> None:
    requests = exact.make_requests(exact.load_prompts(3), 0.0, TOKENS)
    plain = [generation.tokens for generation in decode(target, requests)]
    drafting = DraftReplica(NgramDrafter())
    near, far = memory_link()
    drafting.add_link(far)
    with guessing(target, local("heads", target)) as replica:
        replica.add_link(near)
        until(lambda: replica.stats().drafts == 1, "the draft is linked")
        assert not list(exact.differences(exact.serve(replica, requests), plain))
        assert replica.stats().link["attached"] == 3
        assert replica.stats().accepted > 0
        until(lambda: drafting.stats().sessions == 0, "the draft's sessions end")
    drafting.close()


def test_guesses_give_their_pages_back_when_requests_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine pages the requests begin with four and three, early exit takes the others, and the second request grows."""
    runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=288)
    first, second = exact.load_prompts(2)
    requests = exact.make_requests([first[:8], second[:20]], 0.0, 40)
    plain = [generation.tokens for generation in exact.run(runner, requests, batch=1)]
    gave_way: list[bool] = []
    give_way = OwnGuesses.give_way

    def noted(own: OwnGuesses) -> bool:
        gave_way.append(give_way(own))
        return gave_way[-1]

    monkeypatch.setattr(OwnGuesses, "give_way", noted)
    with guessing(runner, LocalDrafter(EarlyExitDrafter(runner), 3)) as replica:
        assert not list(exact.differences(exact.serve(replica, requests), plain))
    assert any(gave_way), "there were pages for everybody"
    assert runner.pool.used_pages == 0


def test_a_cancelled_request_leaves_no_session_of_the_drafter(target: ModelRunner) -> None:
    (request,) = exact.make_requests(exact.load_prompts(1), 0.8, 128)
    with guessing(target, local("early-exit", target)) as replica:
        replica.submit(request, lambda chunk: replica.cancel("0"))
        assert replica.wait_idle(PATIENCE_S)
    assert target.pool.used_pages == 0


def test_the_target_is_served_with_the_drafter_of_its_configuration(tmp_path: Path) -> None:
    values = {"checkpoint": str(exact.TARGET), "drafter": "heads", "heads": str(exact.HEADS)}
    config = parse_config({"models": [{"name": "code", "target": values}]})
    check_config(config)
    assert config.models[0].target.heads == exact.HEADS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "heads"}, "the drafter heads needs heads"),
        ({"drafter": "jacobi", "heads": "."}, "the drafter jacobi uses no heads"),
        ({"drafter": "retrieval"}, "the drafter retrieval needs documents"),
        ({"documents": "."}, "a target without a drafter of its own uses no documents"),
        ({"drafter": "heads", "heads": "no/such/folder"}, "models.0.target.heads: no heads at"),
        ({"drafter": "retrieval", "documents": "no/such"}, "models.0.target.documents: there is nothing at"),
    ],
)
def test_a_local_drafter_that_lacks_something_is_refused(values: dict[str, str], message: str) -> None:
    target = {"checkpoint": str(exact.TARGET), **values}
    with pytest.raises(ConfigError, match=message):
        check_config(parse_config({"models": [{"name": "code", "target": target}]}))


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is for a hidden size of 384; that of there is 64"):
        check_heads(exact.HEADS, 64, Path("there"))
    shutil.copy(exact.DRAFT / "model.safetensors", tmp_path / HEADS_FILE)
    with pytest.raises(ModelError, match="holds no heads"):
        check_heads(tmp_path, 64, Path("there"))
    (tmp_path / HEADS_FILE).write_text(json.dumps({}))
    with pytest.raises(ModelError, match="can't be read"):
        check_heads(tmp_path, 64, Path("there"))


def test_without_a_name_nothing_is_guessed(target: ModelRunner) -> None:
    assert make_local(LocalConfig(), target, load_tokenizer(exact.TARGET)) is None


# --- documents that come with a request


def grounded(target: ModelRunner, index: int = 0) -> tuple[GenerationRequest, list[int]]:
    """A request whose document is its own greedy output, and that output."""
    request = exact.make_requests(exact.load_prompts(index + 1), 0.0, 2 * TOKENS)[index]
    (plain,) = decode(target, [request])
    return replace(request, documents=((*request.prompt, *plain.tokens),)), plain.tokens


def test_documents_of_a_request_are_guessed_from_and_are_its_own(target: ModelRunner) -> None:
    request, plain = grounded(target)
    other = replace(request, request_id="other", documents=())
    with guessing(target, None) as replica:
        generations = exact.serve(replica, [request, other])
        assert [generation.tokens for generation in generations] == [plain, plain]
        assert generations[0].accepted > TOKENS
        assert generations[1].accepted == 0


def test_documents_and_a_drafter_of_the_targets_own_go_together(target: ModelRunner) -> None:
    """Other documents than its own mislead a request, and change nothing."""
    pairs = [grounded(target, index) for index in range(2)]
    swapped = [replace(pairs[0][0], documents=pairs[1][0].documents), pairs[1][0]]
    with guessing(target, local("jacobi", target)) as replica:
        generations = exact.serve(replica, swapped)
        assert [generation.tokens for generation in generations] == [plain for _, plain in pairs]
        assert generations[1].accepted > TOKENS


def test_a_preempted_request_keeps_its_documents() -> None:
    runner = ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=256)
    prompts = [prompt[:20] for prompt in exact.load_prompts(2)]
    requests = exact.make_requests(prompts, 0.0, 90)
    plain = [generation.tokens for generation in exact.run(runner, requests, batch=1)]
    brought = [
        replace(request, documents=((*request.prompt, *tokens),))
        for request, tokens in zip(requests, plain, strict=True)
    ]
    with guessing(runner, None) as replica:
        generations = exact.serve(replica, brought)
        assert replica.stats().preempted > 0
    assert not list(exact.differences(generations, plain))
    assert all(generation.accepted > TOKENS for generation in generations)


def test_documents_that_are_no_tokens_are_refused(target: ModelRunner) -> None:
    request, _ = grounded(target)
    with guessing(target, None) as replica, pytest.raises(InvalidRequest, match="token ids must not be negative"):
        replica.submit(replace(request, documents=((1, -1),)), lambda chunk: None)


def test_a_drafter_that_fails_leaves_the_guesses_from_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDrafter()
    own = OwnGuesses(LocalDrafter(drafter, 1))
    text = list(range(20))
    own.ground(7, text[:5], SamplingParams(), Documents([text]))
    drafter.open(7, text[:5], SamplingParams())
    own._open.add(7)

    def broken() -> list[int]:
        raise ValueError("broken")

    monkeypatch.setattr(drafter, "grow", broken)
    mirror = TokenTree(4)
    own.hang(lambda session: mirror)
    assert not own.works
    assert mirror.token[mirror.chain(3)].tolist() == [5, 6, 7]
    own.check({7})
