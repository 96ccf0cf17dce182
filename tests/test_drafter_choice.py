"""A drafter is chosen by name: each is made from a configuration, and none of them changes a token."""

import gc
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.draft import DraftReplica
from cluster.drafters import NODE_COST_ON_CPUS, DraftConfig, make_drafter, same_tokens
from cluster.grpc_link import connect
from cluster.link import memory_link
from cluster.placement import Placement
from cluster.target import TargetReplica
from deployments.cli import app
from deployments.draft import DraftFailed, DraftOptions, check_options, run_draft
from engine.automatic import GROWING
from engine.checkpoint import MODELS, ModelError
from engine.choice import DrafterName, Weights, check_documents
from engine.decode import Speculation, decode
from engine.drafters import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.retrieval import RetrievalDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translate import OtherTokenizerDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

TOKENS = 16


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """Warm-ups take what is loaded out of garbage collection."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for number, line in enumerate(exact.PROMPTS.read_text().splitlines()[:5]):
        (folder / f"{number}.py").write_text(json.loads(line))
    return folder


def config(drafter: DrafterName, model: Path | None = None, documents: Path | None = None) -> DraftConfig:
    return DraftConfig(model, "float32", kv_tokens=4096, drafter=drafter, documents=documents, tokenizer=exact.TARGET)


@contextmanager
def linked(runner: ModelRunner, drafter: Drafter) -> Iterator[tuple[TargetReplica, DraftReplica]]:
    """A target and a draft, both audited at the end."""
    target, drafting = TargetReplica(runner, FixedTree(7), max_batch=2), DraftReplica(drafter)
    near, far = memory_link()
    drafting.add_link(far)
    target.add_link(near)
    try:
        until(lambda: target.stats().drafts == 1, "the draft is linked")
        yield target, drafting
        assert target.wait_idle(PATIENCE_S)
        target.check()
        until(lambda: drafting.stats().sessions == 0, "the draft's sessions end")
        drafting.check()
    finally:
        target.close()
        drafting.close()


@pytest.mark.parametrize(
    ("name", "model", "read", "kind"),
    [
        ("auto", None, False, SuffixDrafter),
        ("auto", "draft", False, ModelDrafter),
        ("auto", "permuted", False, OtherTokenizerDrafter),
        ("model", "draft", False, ModelDrafter),
        ("ngram", None, False, NgramDrafter),
        ("suffix", None, False, SuffixDrafter),
        ("retrieval", None, True, RetrievalDrafter),
        ("merged", None, True, MergedDrafter),
        ("merged", "draft", False, MergedDrafter),
        ("merged", "permuted", True, MergedDrafter),
        ("cascade", "draft", False, CascadeDrafter),
        ("cascade", "permuted", False, OtherTokenizerDrafter),
    ],
)
def test_every_drafter_of_a_configuration_serves_the_plain_tokens(
    target: ModelRunner,
    prompts: list[exact.Tokens],
    permuted: Path,
    documents: Path,
    name: DrafterName,
    model: str | None,
    read: bool,
    kind: type[Drafter],
) -> None:
    folder = {"draft": exact.DRAFT, "permuted": permuted, None: None}[model]
    drafter = make_drafter(config(name, folder, documents if read else None), Placement())
    assert isinstance(drafter, kind)
    drafter.check()
    with linked(target, drafter) as (replica, drafting):
        for temperature in (0.0, 0.8):
            requests = exact.make_requests(prompts[:3], temperature, TOKENS)
            plain = [generation.tokens for generation in decode(target, requests)]
            before = drafting.stats().steps
            exact.serve_until(
                replica,
                requests,
                plain,
                lambda _: drafting.stats().steps > before,  # noqa: B023
                "the drafter grows something",
            )


@pytest.mark.parametrize("chains", [False, True])
def test_drafts_grow_past_what_a_chain_may_end_in(prompts: list[exact.Tokens], chains: bool) -> None:
    drafter = make_drafter(replace(config("model", exact.DRAFT), chains=chains), Placement())
    drafter.open(0, prompts[0], SamplingParams())
    grown = [0]
    while grown:
        grown = drafter.grow()
    tree = drafter.tree(0)
    assert int(tree.depth[: tree.size].max()) > 2 * 12  # a chain of twelve, and the next one
    drafter.close(0)


def test_documents_are_read_in_the_targets_tokens(target: ModelRunner, tmp_path: Path) -> None:
    """The target's own greedy text as the document: nearly every token is guessed."""
    (request,) = exact.make_requests(exact.load_prompts(1), 0.0, 2 * TOKENS)
    (plain,) = decode(target, [request])
    text = load_tokenizer(exact.TARGET).backend_tokenizer.decode([*request.prompt, *plain.tokens])
    (tmp_path / "answer.txt").write_text(text)
    drafter = make_drafter(config("retrieval", None, tmp_path), Placement())
    (generation,) = exact.run(target, [request], Speculation(drafter, FixedTree(7), 1))
    assert generation.accepted > TOKENS


@pytest.mark.parametrize("name", ["auto", "cascade"])
def test_a_model_with_another_tokenizer_is_translated(target: ModelRunner, permuted: Path, name: DrafterName) -> None:
    requests = exact.make_requests(exact.load_prompts(2), 0.0, TOKENS)
    drafter = make_drafter(config(name, permuted), Placement())
    generations = exact.run(target, requests, Speculation(drafter, FixedTree(7), 4))
    assert sum(generation.accepted for generation in generations) > TOKENS


def test_the_command_serves_the_drafter_that_it_is_told(target: ModelRunner, documents: Path) -> None:
    options = ["--drafter", "merged", "--documents", str(documents), "--model", str(exact.DRAFT)]
    command = [sys.executable, "-m", "deployments.cli", "draft", *options, "--listen", "127.0.0.1:0"]
    requests = exact.make_requests(exact.load_prompts(2), 0.8, TOKENS)
    plain = [generation.tokens for generation in decode(target, requests)]
    with subprocess.Popen(command, cwd=MODELS.parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ready = next(line for line in process.stderr if "drafts at" in line)
            replica = TargetReplica(target, FixedTree(7), max_batch=2)
            replica.add_link(connect(ready.split()[-1], PATIENCE_S))
            until(lambda: replica.stats().drafts == 1, "the draft is linked")
            assert not list(exact.differences(exact.serve(replica, requests), plain))
            replica.close()
        finally:
            process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_port_that_is_taken_is_told_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.draft.make_drafter", lambda *_: pytest.fail("work was begun"))
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        result = CliRunner().invoke(app, ["draft", "--drafter", "ngram", "--listen", address])
    assert (result.exit_code, result.stderr) == (2, f"paceline: cannot listen on {address}: Address already in use\n")


def test_the_command_says_how_weights_are_kept() -> None:
    kinds: list[tuple[Weights, bool]] = [
        ("auto", False),
        ("full", False),
        ("int8", False),
        ("auto", True),
        ("int8", True),
        ("int4", True),
    ]
    assert {weights for weights, _ in kinds} == set(get_args(Weights))
    for weights, gpu in kinds:
        options = DraftOptions(exact.DRAFT, "127.0.0.1", 0, weights=weights, gpu=gpu)
        check_options(options)
        assert options.config.weights == weights


def test_lookup_beside_the_model_is_automatic_only() -> None:
    found = {name: make_drafter(config(name, exact.DRAFT), Placement()) for name in ("auto", "model")}
    growing = {name: drafter._growing for name, drafter in found.items() if isinstance(drafter, ModelDrafter)}
    assert (growing["auto"].lookup, growing["model"].lookup) == (Growing().lookup, 0)
    assert growing["auto"] == replace(GROWING, node_cost=NODE_COST_ON_CPUS)


@pytest.mark.parametrize(
    ("name", "model", "documents", "message"),
    [
        ("model", False, False, "the drafter model needs a checkpoint"),
        ("cascade", False, False, "the drafter cascade needs a checkpoint"),
        ("suffix", True, False, "the drafter suffix uses no checkpoint"),
        ("retrieval", False, False, "the drafter retrieval needs documents"),
        ("auto", True, True, "the drafter auto uses no documents"),
        ("merged", False, False, "the drafter merged needs a checkpoint or documents"),
    ],
)
def test_a_drafter_that_lacks_something_is_refused(
    name: DrafterName, model: bool, documents: bool, message: str
) -> None:
    nowhere = Path("no/such/folder")
    with pytest.raises(ModelError, match=message):
        make_drafter(config(name, nowhere if model else None, nowhere if documents else None), Placement())


def test_documents_that_cannot_be_read_are_refused(tmp_path: Path, documents: Path) -> None:
    for path, message in ((tmp_path / "none", "there is nothing at"), (tmp_path, "no documents in")):
        with pytest.raises(ModelError, match=message):
            check_documents(path)
    unread = DraftConfig(None, drafter="retrieval", documents=documents)
    with pytest.raises(ModelError, match="nowhere has no tokenizer"):
        make_drafter(unread, Placement())


def test_tokenizers_of_one_vocabulary_are_the_same(permuted: Path) -> None:
    target, draft, other = (load_tokenizer(folder) for folder in (exact.TARGET, exact.DRAFT, permuted))
    assert same_tokens(target, draft)
    draft.add_special_tokens({"additional_special_tokens": ["<|another|>"]})
    assert same_tokens(target, draft)
    assert not same_tokens(target, other)


def test_the_command_ends_when_its_draft_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't wait for the turn that never ends."""
    replicas: list[DraftReplica] = []

    class Hanging(DraftReplica):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            replicas.append(self)

        @property
        def turn_s(self) -> float:
            return 3600.0

        def close(self) -> None:
            raise AssertionError("closing waits for the turn that hangs")

    monkeypatch.setattr("deployments.draft.DraftReplica", Hanging)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    options = DraftOptions(None, "127.0.0.1", 0, "ngram")
    try:
        with pytest.raises(DraftFailed, match="failed or hangs"):
            run_draft(options, Console(quiet=True))
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
        for replica in replicas:
            DraftReplica.close(replica)
    assert len(replicas) == 1


def test_a_draft_that_hangs_does_not_hold_up_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    class Hanging(DraftReplica):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            signal.raise_signal(signal.SIGTERM)

        def close(self) -> None:
            hangs.wait()
            super().close()

    monkeypatch.setattr("deployments.draft.DraftReplica", Hanging)
    monkeypatch.setattr("deployments.draft._CLOSE_S", 0.05)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        run_draft(DraftOptions(None, "127.0.0.1", 0, "ngram"), Console(quiet=True))
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
        hangs.set()
    until(lambda: not any(thread.name == "paceline-close" for thread in threading.enumerate()), "it is closed")
