"""A draft step in one compiled call is the step that Python takes around a pass."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from engine import budget, noise, torch_calls
from engine.budget import Calibration, CostModel
from engine.drafters.model import Growing, ModelDrafter
from engine.effort import EffortWindow, draft_steps
from engine.runner import Dtype, ModelRunner
from engine.tree import TokenTree
from engine.types import SamplingParams
from tests import exact
from tests.exact import Tokens

pytestmark = pytest.mark.skipif(
    not torch_calls.available() or "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="needs numba, and a torch with FBGEMM",
)


class Uncompiled(ModelDrafter):
    """Takes each step in Python."""

    def _compiled(self, held: object) -> None:
        return None


def nodes(tree: TokenTree) -> list[list[float]]:
    """All that there is to say of a tree but for slots: whose are the same may differ."""
    fields = (tree.parent, tree.token, tree.confidence, tree.depth, tree.probability, tree.expanded)
    return [field[: tree.size].tolist() for field in fields]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runners(request: pytest.FixtureRequest) -> tuple[ModelRunner, ModelRunner]:
    dtype: Dtype = request.param
    if dtype == "bfloat16" and not torch_calls.narrow_available():
        pytest.skip("bfloat16 is emulated")
    one, other = (ModelRunner(exact.DRAFT, dtype=dtype, kv_tokens=2048) for _ in range(2))
    assert one.choosing is not None
    return one, other


GROWINGS = {
    "chain": Growing(rows=1, children=1, lookup=0),
    "tree": Growing(each=4),
    "wide": Growing(rows=8, children=3, least=0.05, overrule=True),
    "worth its time": Growing(node_cost=0.15),
    "small": Growing(rows=4, max_nodes=24, max_depth=3),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", GROWINGS)
def test_trees_are_the_same(
    runners: tuple[ModelRunner, ModelRunner], prompts: list[Tokens], kind: str, temperature: float
) -> None:
    """From the prompt on, along the likeliest path and off it, and where a tree is full."""
    compiled, plain = ModelDrafter(runners[0], GROWINGS[kind]), Uncompiled(runners[1], GROWINGS[kind])
    drafters = (compiled, plain)
    for drafter in drafters:
        drafter.open(0, prompts[0][:100], SamplingParams(temperature, seed=7))
    rng = np.random.default_rng(0)
    for step in range(24):
        grown = [drafter.grow() for drafter in drafters]
        assert grown[0] == grown[1]
        assert nodes(compiled.tree(0)) == nodes(plain.tree(0))
        if step % 3 == 2:
            tree = compiled.tree(0)
            path = tree.token[tree.chain(1 + step % 4)].tolist()
            tokens = path if rng.random() < 0.7 and path else [int(rng.integers(4096)), int(rng.integers(4096))]
            moved = [drafter.commit(0, tokens) for drafter in drafters]
            assert moved[0].children == moved[1].children
        for drafter in drafters:
            drafter.check()
    for drafter in drafters:
        drafter.close(0)
        assert drafter._runner.pool.used_pages == 0


class OneByOne(ModelDrafter):
    """Is asked before every step whether it pays."""

    def grow_on(self, most: int, effort: EffortWindow) -> None:
        return None


@pytest.mark.parametrize("worth", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_in_one_go_are_those_that_pay_one_by_one(
    runners: tuple[ModelRunner, ModelRunner],
    prompts: list[Tokens],
    worth: float,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With costs that stay the same, and trees that become too deep: both learn the same from their steps."""
    monkeypatch.setattr(budget, "near", lambda value, old: old)
    growing = Growing(each=1, children=3, lookup=4)
    drafters = ModelDrafter(runners[0], growing), OneByOne(runners[1], growing)
    windows = []
    for drafter in drafters:
        cost = CostModel()
        for rows, milliseconds in ((1, 1.0), (8, 2.4), (33, 9.0)):
            cost.start(rows, milliseconds)
        window = EffortWindow(Calibration(), cost, 0.2, 1, clock=lambda: 0.0)
        for steps in range(2, 9):
            window.drafting(1).start(steps, 0.1 + 0.1 * steps)
        window.behind_ms = 0.0  # what has to be read first is only known where steps are taken in one go
        window._tokens, window._ms = worth, 1.0
        windows.append(window)
        drafter.open(0, prompts[0][:100], SamplingParams(temperature, seed=7))
    lengths = []
    for _ in range(16):
        grown = [draft_steps(drafter, [0], 8, window) for drafter, window in zip(drafters, windows, strict=True)]
        assert grown[0] == grown[1]
        assert nodes(drafters[0].tree(0)) == nodes(drafters[1].tree(0))
        one, other = windows
        assert one._draft_steps == other._draft_steps
        assert one.share == pytest.approx(other.share, rel=1e-5)
        lengths.append(one._draft_steps)
        tree = drafters[1].tree(0)
        tokens = tree.token[tree.chain(2)].tolist() or [5]
        for drafter, window in zip(drafters, windows, strict=True):
            window._begin(0.0)  # as a target step ends, whose time would be none
            drafter.commit(0, tokens)
            drafter.check()
    assert (max(lengths) > 1) is (worth < 2)
    for drafter in drafters:
        drafter.close(0)
        assert drafter._runner.pool.used_pages == 0


def test_a_prompt_is_read_at_once_and_what_came_in_a_rest_when_it_pays(
    runners: tuple[ModelRunner, ModelRunner], prompts: list[Tokens]
) -> None:
    """A prompt is read once for all steps that follow: charged to the first one alone, a draft would never begin."""
    cost = CostModel()
    for rows, milliseconds in ((1, 1.0), (8, 1.4), (33, 9.0)):
        cost.start(rows, milliseconds)
    window = EffortWindow(Calibration(), cost, 0.01, 1, clock=lambda: 0.0)
    window._tokens, window._ms = 1.0, 1.0
    window.behind_ms = 10.0
    drafter = ModelDrafter(runners[0], Growing(each=1, lookup=0))
    drafter.open(0, prompts[0][:40], SamplingParams())
    assert draft_steps(drafter, [0], 8, window) == {0}
    window._begin(0.0)
    for _ in range(10):
        drafter.commit(0, [5])
    assert draft_steps(drafter, [0], 8, window) == set()
    window.behind_ms = 0.0
    assert draft_steps(drafter, [0], 8, window) == {0}
    drafter.close(0)


def test_several_sessions_a_filter_or_a_grammar_are_left_to_python(
    runners: tuple[ModelRunner, ModelRunner], prompts: list[Tokens]
) -> None:
    drafter = ModelDrafter(runners[0])
    for params in (SamplingParams(1.0, top_p=0.9, seed=1), SamplingParams(repetition_penalty=1.2)):
        drafter.open(0, prompts[0][:40], params)
        assert drafter._compiled(drafter._sessions[0]) is None
        assert drafter.grow() == [0]
        drafter.close(0)
    drafter.open(0, prompts[0][:40], SamplingParams())
    drafter.open(1, prompts[1][:40], SamplingParams())
    assert drafter.grow() == [0, 1]
    for session in (0, 1):
        drafter.close(session)


def test_keys_of_noise_are_those_of_compiled_loops() -> None:
    for seed in (0, 1, 2**62 + 12345, 2**63 - 1):
        for position in (0, 1, 1000, 2**31):
            expected = noise.keys(seed, [position]).item()
            assert int(noise.key_of(np.uint64(seed), position)) == expected


def test_many_new_sessions_hold_up_no_other(draft: ModelRunner) -> None:
    """All together read so many tokens in a step, and who has least to read goes first."""
    drafter, params = ModelDrafter(draft, Growing(prefill_tokens=100, prefill_chunk=40)), SamplingParams(temperature=0)
    texts = np.random.default_rng(0).integers(0, draft.vocab_size, (6, 70)).tolist()  # of which nothing is cached
    new = range(1, 6)
    with closed(drafter, range(6)):
        drafter.open(0, texts[0][:20], params)
        drafter.grow()
        assert drafter.tree(0).expanded[0]
        for session in new:
            drafter.open(session, texts[session][: 60 + session], params)
        drafter.commit(0, [5])
        assert {0, 1, 2, 3} <= set(drafter.grow())
        assert drafter.tree(0).expanded[0], "its one token came first"
        assert sum(len(drafter._sessions[session].pending) for session in new) == sum(60 + each for each in new) - 99
        for _ in range(4):
            drafter.grow()
        assert all(drafter.tree(session).expanded[0] for session in new)
        drafter.check()


@contextmanager
def closed(drafter: ModelDrafter, sessions: Iterable[int]) -> Iterator[None]:
    """Leaves no pages to the tests that follow, also where one fails."""
    try:
        yield
    finally:
        for session in sessions:
            drafter.close(session)
