"""Drafters that make drafters faster: the same output, the outer model's own choices, in fewer of its passes."""

import numpy as np
import pytest

from engine.drafters import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.types import SamplingParams
from tests import exact
from tests.exact import Tokens, differences, make_requests, run

REPEATED = [11, 12, 13, 14, 15, 16, 17] * 4
OUTER = Growing(lookup=0, overrule=True, children=3)


@pytest.fixture(scope="module")
def middle() -> ModelRunner:
    """A second model, for cascades of three."""
    return ModelRunner(exact.TARGET, dtype="float32", kv_tokens=2048)


def chosen(tree: TokenTree) -> list[int]:
    """The likeliest path, as far as the model has expanded it: tokens."""
    node, path = ROOT, []
    while tree.expanded[node]:
        children = np.flatnonzero(tree.parent[: tree.size] == node)
        node = int(children[np.argmax(tree.confidence[children])])
        path.append(int(tree.token[node]))
    return path


def passes_to(drafter: Drafter, tokens: Tokens, depth: int, params: SamplingParams) -> tuple[int, list[int]]:
    """How many steps, each one pass of the outer model at most, until it chose `depth` tokens; and these."""
    drafter.open(1, tokens, params)
    steps = 0
    while len(chosen(drafter.tree(1))) < depth:
        assert drafter.grow(), "nothing is left to grow"
        drafter.check()
        steps += 1
    path = chosen(drafter.tree(1))[:depth]
    drafter.close(1)
    return steps, path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_outer_model_chooses_the_same_in_fewer_passes(
    middle: ModelRunner, draft: ModelRunner, prompts: list[Tokens], temperature: float
) -> None:
    params = SamplingParams(temperature, seed=3)
    plain, cascaded = 0, 0
    for prompt in (prompts[0][:60], prompts[2][:60]):
        alone, path = passes_to(ModelDrafter(middle, OUTER), prompt, 6, params)
        drafter = CascadeDrafter(ModelDrafter(middle, OUTER), ModelDrafter(draft), inner_steps=4)
        together, same = passes_to(drafter, prompt, 6, params)
        assert same == path
        plain, cascaded = plain + alone, cascaded + together
    assert cascaded < 0.8 * plain, (cascaded, plain)


def test_cascades_nest_and_n_grams_begin(middle: ModelRunner, draft: ModelRunner, prompts: list[Tokens]) -> None:
    """n-grams -> small -> middle: lookups go on below what the models chose."""
    prompt = prompts[0][:60]
    alone, path = passes_to(ModelDrafter(middle, OUTER), prompt, 6, SamplingParams())
    inner = CascadeDrafter(ModelDrafter(draft, OUTER), NgramDrafter())
    together, same = passes_to(CascadeDrafter(ModelDrafter(middle, OUTER), inner), prompt, 6, SamplingParams())
    assert same == path
    assert together < alone


def test_the_outer_models_confidence_replaces_the_inners(draft: ModelRunner) -> None:
    drafter = CascadeDrafter(ModelDrafter(draft, OUTER), NgramDrafter())
    drafter.open(1, REPEATED, SamplingParams())
    drafter.grow()
    assert drafter.commit(1, [11]).children
    tree = drafter.tree(1)
    assert float(tree.confidence[tree.path([12])]) == pytest.approx(1 - 0.5**4)  # as sure as a lookup is
    drafter.grow()
    assert tree.expanded[ROOT]
    children = np.flatnonzero(tree.parent[: tree.size] == ROOT)
    assert len(children) >= 3
    assert float(tree.confidence[children].sum()) <= 1.001
    assert float(tree.confidence[tree.path([12])]) < 0.9
    drafter.close(1)


def test_lookups_go_on_below_what_others_hung() -> None:
    drafter = NgramDrafter(length=3)
    drafter.open(1, [1, 2, 3, 4, 5, 6], SamplingParams())
    assert drafter.grow() == [1]
    tree = drafter.tree(1)
    assert tree.size == 1
    assert drafter.grow() == []
    tree.add(ROOT, 2, 0.5)
    assert drafter.grow() == [1]
    assert tree.path([2, 3, 4, 5]) > 0
    assert drafter.grow() == []


def test_the_audit_finds_trees_that_parted(draft: ModelRunner) -> None:
    inner = NgramDrafter()
    drafter = CascadeDrafter(ModelDrafter(draft, OUTER), inner)
    drafter.open(1, REPEATED, SamplingParams())
    drafter.check()
    inner.commit(1, [5])
    with pytest.raises(AssertionError, match="different roots"):
        drafter.check()
    drafter.close(1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["cascade-15", "cascade-goodput"])
def test_cascades_are_invisible(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], name: str, temperature: float
) -> None:
    requests = make_requests(prompts[:2], temperature, 16)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    generations = run(target, requests, exact.SPECULATIONS[name](draft))
    assert not list(differences(generations, plain))
    assert sum(generation.accepted for generation in generations) > 0
