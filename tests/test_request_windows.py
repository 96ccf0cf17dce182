"""Requests that name their window: side by side in one batch, and the same tokens whatever they name."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.target import TargetReplica
from cluster.windows import Windows
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.decode import decode
from engine.runner import ModelRunner
from engine.tree import TokenTree
from engine.types import InvalidRequest
from engine.window_choice import NamedWindows, check_window
from engine.windows import FixedChain, FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S

NAMES = ["", "off", "goodput", "chain:3", "tree:7", "heuristic", "threshold", "bandit"]


def chain_of(length: int, confidence: float = 0.9) -> TokenTree:
    tree = TokenTree(0)
    for depth in range(length):
        tree.add(depth, depth + 1, confidence)
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_window_in_one_batch_serves_the_plain_tokens(
    target: ModelRunner, draft: ModelRunner, temperature: float
) -> None:
    prompts = [prompt[:20] for prompt in exact.load_prompts(len(NAMES))]
    requests = exact.make_requests(prompts, temperature, 12)
    plain = [generation.tokens for generation in decode(target, requests)]
    requests = [replace(request, window=name) for request, name in zip(requests, NAMES, strict=True)]
    replica = TargetReplica(target, FixedTree(5), max_batch=len(NAMES), lookup=4)
    with exact.linked(replica, draft):
        generations = exact.serve(replica, requests)
        assert not list(exact.differences(generations, plain))
        assert generations[NAMES.index("off")].accepted == 0
        assert replica.stats().link["attached"] == len(NAMES) - 1, "the target alone decodes what is off"
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
    replica.close()


def test_each_window_chooses_for_the_requests_that_named_it() -> None:
    windows = Windows(FixedChain(2), NamedWindows())
    trees = [chain_of(9) for _ in range(4)]
    chosen, expected = windows.choose(["chain:4", "", "tree:6", ""], trees)
    assert [len(nodes) for nodes in chosen] == [4, 2, 6, 2]
    assert expected == 0.0
    assert windows.choose([], []) == ([], 0.0)


def test_who_names_the_window_that_was_everybodys_still_gets_it() -> None:
    windows, trees = Windows(FixedChain(2), NamedWindows(own="chain:2")), [chain_of(9), chain_of(9)]
    windows.replace(FixedChain(5))
    chosen, _ = windows.choose(["chain:2", ""], trees)
    assert [len(nodes) for nodes in chosen] == [2, 5]


def test_a_window_that_learns_is_shared_by_those_that_named_it() -> None:
    windows, tree = Windows(FixedChain(2), NamedWindows()), chain_of(12)
    ((before,), _) = windows.choose(["heuristic"], [tree])
    windows.observe("heuristic", tree, before, before.tolist())
    (after, own), _ = windows.choose(["heuristic", ""], [tree, tree])
    assert (len(before), len(after), len(own)) == (5, 7, 2)


def test_where_rows_are_dear_what_is_looked_up_has_to_be_right_more_often(target: ModelRunner) -> None:
    """A text that repeats itself: guesses hang in its mirror where a row is nearly free, none where it costs a step."""
    prompt = tuple(exact.load_prompts(1)[0][:12]) * 3
    (request,) = exact.make_requests([prompt], 0.0, 24)
    hits = {}
    for dear in (False, True):
        cost = CostModel()
        for rows in (1, 100):
            cost.start(rows, float(rows) if dear else 1.0)
        replica = TargetReplica(target, GoodputWindow(Calibration(), cost), lookup=8)
        (generation,) = exact.serve(replica, [request])
        hits[dear] = replica.stats().hits
        assert list(exact.differences([generation], [decode(target, [request])[0].tokens])) == []
        replica.close()
    assert hits[False] > 0
    assert hits[True] == 0


def test_the_goodput_window_counts_the_rows_of_other_requests() -> None:
    """Rows cost the same up to four of them, then a lot: what fits beside three others is one node."""
    cost = CostModel()
    for rows, milliseconds in ((1, 10.0), (4, 10.0), (5, 100.0)):
        cost.start(rows, milliseconds)
    named = NamedWindows(cost, own="goodput")
    windows = Windows(named.make("goodput"), named)
    trees = [chain_of(9) for _ in range(3)]
    alone, _ = windows.choose([""], trees[:1])
    beside, expected = windows.choose(["goodput", "chain:1", "chain:1"], trees)
    without, _ = windows.choose([""], trees[:1], alone=2)
    assert [len(nodes) for nodes in alone] == [3]
    assert [len(nodes) for nodes in without] == [1]
    assert [len(nodes) for nodes in beside] == [1, 1, 1]
    assert np.isclose(expected, 0.9, atol=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_windows_are_known(name: str) -> None:
    check_window(name)


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"goodput, heuristic, threshold, bandit, off, chain:N or tree:N"):
        check_window("wide")
