"""Windows that learn: what each rule does with what it is told, and that nobody can tell from the output."""

from typing import get_args

import numpy as np
import pytest

from deployments.config import TargetOptions
from engine.budget import CostModel, Window
from engine.runner import ModelRunner
from engine.tree import TokenTree
from engine.types import IntArray
from engine.window_choice import WindowName, make_window
from engine.windows import Bandit, ConfidenceThreshold, Heuristic
from tests import exact
from tests.exact import Tokens, differences, make_requests, run
from tests.rows import chain

LONG = chain(*[0.5] * 40)


def costs(per_row_ms: float) -> CostModel:
    """A step takes 10 ms, and so much for each row beside the first."""
    model = CostModel()
    for rows in (1, 65):
        model.start(rows, 10.0 + per_row_ms * (rows - 1))
    return model


def step(window: Window, tree: TokenTree, accepted: int) -> IntArray:
    """What the window chose of a tree whose first tokens are right, up to so many; it is told how that went."""
    (nodes,) = window.choose([tree])
    window.observe(tree, nodes, nodes[:accepted].tolist())
    return nodes


# +2, -1


def test_the_chain_grows_by_two_when_all_was_accepted_and_shrinks_by_one_else() -> None:
    window = Heuristic(most=9, length=5)
    sizes = [len(step(window, LONG, accepted)) for accepted in (5, 7, 9, 8, 0, 0)]
    assert sizes == [5, 7, 9, 9, 8, 7]
    for _ in range(20):
        step(window, LONG, 0)
    assert len(step(window, LONG, 1)) == 1, "never shorter than one token"


def test_a_short_tree_that_was_right_is_no_reason_to_shrink() -> None:
    window = Heuristic(most=9, length=5)
    step(window, chain(0.9, 0.9), 2)
    assert window.length == 7
    step(window, chain(), 0)
    assert window.length == 7, "a step that verified nothing says nothing"


# a threshold of confidence


def test_the_chain_ends_with_the_first_token_below_the_threshold() -> None:
    window = ConfidenceThreshold(16, threshold=0.4)
    assert window.choose([chain(0.9, 0.5, 0.3, 0.9)])[0].tolist() == [1, 2, 3]
    assert window.choose([chain(0.1, 0.9)])[0].tolist() == [1]
    assert len(ConfidenceThreshold(2).choose([chain(0.9, 0.9, 0.9)])[0]) == 2


def test_the_threshold_goes_where_right_and_wrong_part() -> None:
    window = ConfidenceThreshold(16, threshold=0.4)
    for _ in range(20):  # 0.6 is mostly wrong here, 0.8 right
        step(window, chain(0.8, 0.6, 0.9), 1)
    assert window.threshold == pytest.approx(0.8)
    assert len(step(window, chain(0.8, 0.6, 0.9), 1)) == 2


def test_the_threshold_falls_when_less_confidence_turns_out_right() -> None:
    window = ConfidenceThreshold(16, threshold=0.9)
    for _ in range(200):
        step(window, chain(0.95, 0.2, 0.1), 2)
    assert window.threshold == pytest.approx(0.2)
    assert len(step(window, chain(0.95, 0.2, 0.1, 0.9), 2)) == 3


def test_the_share_of_right_tokens_kept_out_weighs_three_times_as_much() -> None:
    for right, threshold in ((4, 0.7), (6, 0.3)):  # of the right ones 4/14 and 6/16; of the wrong ones all
        window = ConfidenceThreshold(1, threshold=0.0)
        for _ in range(10):
            step(window, chain(0.7), 1)
            step(window, chain(0.3), 0)
        for _ in range(right):
            step(window, chain(0.3), 1)
        assert window.threshold == pytest.approx(threshold)


# a bandit over lengths


def lengths(window: Bandit, accepted: list[int], rounds: int) -> list[int]:
    """Of the last quarter of the rounds, with what each step would accept in turn."""
    sizes = [len(step(window, LONG, accepted[at % len(accepted)])) for at in range(rounds)]
    return sizes[-rounds // 4 :]


def test_the_bandit_comes_to_the_length_that_brings_the_most_for_its_cost() -> None:
    """Of accepted 2 or 4: a row costs a tenth of a step, so that 4 tokens bring (1 + 3) / 14 ms, and no others more."""
    found = lengths(Bandit(costs(1.0), 31), [2, 4], 800)
    assert found.count(4) > len(found) / 2
    assert np.mean(found) < 6


def test_where_rows_are_dear_and_nothing_is_accepted_the_bandit_verifies_nothing() -> None:
    found = lengths(Bandit(costs(5.0), 31), [0], 800)
    assert found.count(0) > 0.8 * len(found)


def test_the_bandit_looks_again_and_finds_what_has_changed() -> None:
    window = Bandit(costs(1.0), 31)
    lengths(window, [0], 400)
    found = lengths(window, [40], 2000)
    assert found.count(31) > 0.8 * len(found)


def test_a_step_of_many_sequences_gets_shorter_chains() -> None:
    model = CostModel()
    for rows, milliseconds in ((1, 10.0), (32, 11.0), (64, 60.0), (128, 160.0)):
        model.start(rows, milliseconds)
    window = Bandit(model, 16)
    for _ in range(300):
        step(window, LONG, 12)
    alone = len(window.choose([LONG])[0])
    together = len(window.choose([LONG] * 8)[0])
    assert alone >= 12 > together


def test_a_chain_among_many_sequences_without_one_counts_its_own_tokens_alone() -> None:
    """16 tokens in 10 ms without, 18.4 in 18 ms with four of one sequence, 60 % of which are right."""
    model = CostModel()
    for rows, milliseconds in ((16, 10.0), (32, 42.0)):
        model.start(rows, milliseconds)
    window, none = Bandit(model, 4), TokenTree(0, 1)
    found = []
    for at in range(400):
        nodes = window.choose([LONG, *[none] * 15])[0]
        window.observe(LONG, nodes, nodes[: (2, 3)[at % 2]].tolist())
        found.append(len(nodes))
    assert found[-200:].count(0) > 150


# all of them


def test_every_window_that_a_configuration_may_name_is_made() -> None:
    names = get_args(WindowName)
    assert names == get_args(TargetOptions.model_fields["window"].annotation)
    assert len({type(make_window(name, 4, costs(1.0))) for name in names}) == len(names) == 6
    for name in names:
        assert len(make_window(name, 4, costs(0.0)).choose([LONG])[0]) <= 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["heuristic", "threshold", "bandit"])
def test_nobody_can_tell_from_the_output(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], name: str, temperature: float
) -> None:
    requests = make_requests([prompts[0], prompts[4]], temperature, 24)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    speculation = exact.SPECULATIONS[name](draft)
    for batch in (2, 1):
        generations = run(target, requests, speculation, batch)
        assert not list(differences(generations, plain))
        assert sum(generation.accepted for generation in generations) > 0, "nothing was speculated"
