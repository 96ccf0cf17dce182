"""One target step: what is run, what is chosen, what is committed, and how it is counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from engine.runner import ModelRunner
from engine.step import MAX_WINDOW, Outcome, Plan, Stepper, tried, useful
from engine.step import Sequence as Running
from engine.tree import ROOT, TokenTree
from engine.types import GenerationRequest, IntArray, InvalidRequest, SamplingParams
from tests.exact import Tokens, run

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def truth(_target: ModelRunner, prompts: list[Tokens]) -> list[int]:
    """What follows the first prompt."""
    return run(_target, [GenerationRequest("", prompts[0], PARAMS)])[0].tokens


@contextmanager
def running(runner: ModelRunner, prompt: Sequence[int], params: SamplingParams = PARAMS) -> Iterator[Running]:
    sequence = Running(GenerationRequest("request", tuple(prompt), params), runner, None)
    try:
        yield sequence
    finally:
        runner.pool.release(sequence.lease)


def prefilled(stepper: Stepper, sequence: Running) -> None:
    while sequence.prefilling:
        stepper.step([Plan(sequence)])


def guesses(root: int, *paths: Sequence[int]) -> TokenTree:
    tree = TokenTree(root, 80)
    for path in paths:
        node = ROOT
        for token in path:
            node = tree.add(node, token, 0.5)
    return tree


def everything(tree: TokenTree) -> IntArray:
    return np.arange(1, tree.size, dtype=np.int32)


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % 4096


def step(stepper: Stepper, *plans: Plan) -> list[Outcome]:
    outcomes = stepper.step(list(plans))
    assert [outcome.sequence for outcome in outcomes] == [plan.sequence for plan in plans]
    return outcomes


def test_a_prompt_is_prefilled_in_chunks_and_the_last_one_commits(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    stepper = Stepper(target, prefill_chunk=32)
    with running(target, prompts[0]) as sequence:
        committed = []
        while sequence.prefilling:
            (outcome,) = step(stepper, Plan(sequence))
            committed.append(outcome.tokens)
        assert committed == [[], [], truth[:1]]
        assert sequence.computed == len(prompts[0])
        assert step(stepper, Plan(sequence))[0].tokens == truth[1:2]


def test_the_accepted_path_and_the_next_token_are_committed(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    """The right path stands among wrong guesses, out of order; its KV is moved into place, or what follows is wrong."""
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        a, b, c = truth[1:4]
        tree = guesses(truth[0], [wrong(a), 5], [a, wrong(b), 6], [wrong(a, 2)], [a, b, wrong(c)], [a, b, c])
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
        assert outcome.tokens == truth[1:5]
        assert tree.token[outcome.path].tolist() == [a, b, c]
        assert (outcome.accepted, outcome.tried) == (3, 3)
        assert sequence.computed == len(prompts[0]) + 4
        while sequence.finish_reason is None:
            step(stepper, Plan(sequence))
        assert sequence.tokens[len(prompts[0]) :] == truth


def test_what_the_target_chose_behind_every_node_is_told(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    """Behind a refused node it is what the target chooses when that node is the text."""
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], [wrong(truth[1])], truth[1:3])
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
    with running(target, (*prompts[0], truth[0], wrong(truth[1]))) as sequence:
        prefilled(stepper, sequence)
        behind = sequence.tokens[-1]
    assert outcome.choices == [truth[1], behind, *truth[2:4]]


def test_a_refused_guess_costs_nothing_and_is_counted_once(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], [truth[1], wrong(truth[2]), 9], [truth[1], wrong(truth[2], 2)])
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
        assert outcome.tokens == truth[1:3]
        assert (outcome.accepted, outcome.tried) == (1, 2)


def test_only_the_window_is_verified(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], truth[1:6], [7])
        (outcome,) = step(stepper, Plan(sequence, tree, np.asarray([1, 2], np.int32)))
        assert outcome.tokens == truth[1:4]
        assert (outcome.accepted, outcome.tried) == (2, 2)


def test_an_empty_window_is_a_plain_step(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], truth[1:3])
        (outcome,) = step(stepper, Plan(sequence, tree, np.zeros(0, np.int32)))
        assert (outcome.tokens, outcome.accepted, outcome.tried) == (truth[1:2], 0, 0)


def test_unknown_ids_are_wrong_guesses(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], [4096], [2**31 - 1, 3], [-1], [truth[1], -(2**31)])
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
        assert outcome.tokens == truth[1:3]


def test_a_full_window_at_the_last_token_has_room(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target)
    with running(target, prompts[0], SamplingParams(max_tokens=2, ignore_eos=True)) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], truth[1:], *([wrong(truth[1], i)] for i in range(1, MAX_WINDOW + 2 - len(truth))))
        assert tree.size == MAX_WINDOW + 1
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
        assert (outcome.tokens, sequence.finish_reason) == (truth[1:2], "length")
        assert outcome.accepted == 1


def test_an_end_inside_the_accepted_path_cuts_it(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target)
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=(truth[3],))
    end = truth.index(truth[3]) + 1
    with running(target, prompts[0], params) as sequence:
        prefilled(stepper, sequence)
        if sequence.finish_reason is None:
            tree = guesses(truth[0], truth[1:8])
            (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
            assert outcome.tokens == truth[1:end]
            assert outcome.accepted == len(outcome.path) == end - 1
        assert (sequence.tokens[len(prompts[0]) :], sequence.finish_reason) == (truth[:end], "stop")


def test_guesses_behind_the_end_are_neither_right_nor_wrong(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    """Of an output that ends with a guess, and of one that ends with the target's own token."""
    stepper = Stepper(target)
    for end, seen in ((2, 2), (4, 4)):
        params = SamplingParams(max_tokens=1 + end, ignore_eos=True)
        with running(target, prompts[0], params) as sequence:
            prefilled(stepper, sequence)
            tree = guesses(truth[0], truth[1:4])
            [outcome] = step(stepper, Plan(sequence, tree, everything(tree)))
            assert outcome.tokens == truth[1 : 1 + end]
            assert outcome.tried == outcome.accepted == min(end, 3)
            assert tried(tree, everything(tree), outcome.accepted, len(outcome.tokens)).tolist() == [1, 2, 3][:seen]


def test_what_can_no_longer_be_committed_is_not_verified(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    with running(target, prompts[0], SamplingParams(max_tokens=4, ignore_eos=True)) as sequence:
        prefilled(Stepper(target), sequence)
        tree = guesses(truth[0], truth[1:6], [wrong(truth[1])])
        assert sequence.left == 3
        assert useful(sequence, tree, everything(tree)).tolist() == [1, 2, 6], "the third token is the target's own"


def test_prefilling_plain_and_speculating_sequences_share_a_step(
    target: ModelRunner, prompts: list[Tokens], truth: list[int]
) -> None:
    stepper = Stepper(target)
    with (
        running(target, prompts[0]) as plain,
        running(target, prompts[0]) as speculating,
        running(target, prompts[0]) as prefilling,
    ):
        for sequence in (plain, speculating):
            prefilled(stepper, sequence)
        tree = guesses(truth[0], truth[1:4])
        outcomes = step(stepper, Plan(prefilling), Plan(speculating, tree, everything(tree)), Plan(plain))
        assert [outcome.tokens for outcome in outcomes] == [[], truth[1:5], truth[1:2]]


def test_margins_are_computed_when_asked_for(target: ModelRunner, prompts: list[Tokens], truth: list[int]) -> None:
    stepper = Stepper(target, margins=True)
    with running(target, prompts[0]) as sequence:
        prefilled(stepper, sequence)
        tree = guesses(truth[0], truth[1:4])
        (outcome,) = step(stepper, Plan(sequence, tree, everything(tree)))
        assert len(outcome.margins) == len(outcome.tokens) == 4


def test_a_refused_request_holds_no_pages(target: ModelRunner) -> None:
    with pytest.raises(InvalidRequest, match=r"^stop: "):
        Running(GenerationRequest("", (5,), SamplingParams(stop=("x",))), target, None)
    assert target.pool.used_pages == 0
