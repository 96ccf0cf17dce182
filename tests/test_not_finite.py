"""Numbers that overflow are a request's own trouble, be it by a token of its prompt or of its guesses."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import torch_calls
from engine.decode import Generation, decode
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.step import Plan, Sequence, StepError, Stepper
from engine.tree import ROOT, TokenTree
from engine.types import GenerationRequest, SamplingParams
from engine.verify import walk
from tests.families import LLAMA, save
from tests.test_step import everything

OVERFLOWS = 77  # this token's embedding is infinite
PROMPT = (5, 9, 14)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save("llama", LLAMA | dict(tie_word_embeddings=False), tmp_path_factory.mktemp("overflows"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[OVERFLOWS] = torch.inf
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["float32", "float32 invariant", "bfloat16"])
def runner(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    dtype, _, invariant = request.param.partition(" ")
    if dtype == "bfloat16" and not torch_calls.narrow_available():
        pytest.skip("bfloat16 is emulated")
    made = ModelRunner(checkpoint, dtype=dtype, kv_tokens=512, invariant=bool(invariant))
    yield made
    made.pool.check()
    assert made.pool.used_pages == 0


def started(runner: ModelRunner, prompt: Seq[int], params: SamplingParams) -> Sequence:
    return Sequence(GenerationRequest("request", tuple(prompt), params), runner, None)


def generated(runner: ModelRunner, prompt: Seq[int]) -> Generation:
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=((OVERFLOWS, -100.0),))
    (generation,) = decode(runner, [GenerationRequest("", tuple(prompt), params)])
    return generation


def test_a_guess_that_overflows_fails_nobody(runner: ModelRunner) -> None:
    expected = generated(runner, PROMPT).tokens
    stepper, params = Stepper(runner), SamplingParams(max_tokens=12, ignore_eos=True)
    for before in (PROMPT, PROMPT[:1]):
        sequence = started(runner, before, params)
        while sequence.prefilling:
            stepper.step([Plan(sequence)])
        tree = TokenTree(sequence.tokens[-1])
        tree.add(ROOT, OVERFLOWS, 0.9)
        plans = [Plan(sequence, tree, everything(tree))]
        (outcome,) = stepper.step(plans)
        assert (len(outcome.tokens), outcome.accepted) == (1, 0)
        assert (plans[0].nodes, len(outcome.choices)) == (None, 1), "nothing was verified"
        while sequence.finish_reason is None:
            stepper.step([Plan(sequence)])
        runner.pool.release(sequence.lease)
        if before == PROMPT:
            assert sequence.tokens[len(before) :] == expected


def test_a_prompt_that_overflows_spoils_no_page_for_others(runner: ModelRunner) -> None:
    expected = generated(runner, PROMPT).tokens
    stepper = Stepper(runner, prefill_chunk=16)
    spoiled = started(runner, (*PROMPT, OVERFLOWS, *range(20, 60)), SamplingParams(max_tokens=4))
    stepper.step([Plan(spoiled)])  # part of the prompt is read, whose numbers nobody has looked at
    runner.pool.release(spoiled.lease)  # its client is gone
    assert generated(runner, PROMPT).tokens == expected
    with pytest.raises(StepError):
        generated(runner, (OVERFLOWS,))
    assert generated(runner, PROMPT).tokens == expected


def test_a_draft_that_overflows_guesses_as_well_afterwards(checkpoint: Path) -> None:
    drafter = ModelDrafter(ModelRunner(checkpoint, dtype="float32", kv_tokens=1024))

    def best() -> list[int]:
        drafter.open(1, PROMPT, SamplingParams())
        while drafter.grow():
            pass
        tokens: list[int] = drafter.tree(1).token[: drafter.tree(1).size].tolist()
        drafter.close(1)
        return tokens

    expected = best()
    drafter.open(2, (*PROMPT, OVERFLOWS), SamplingParams())
    for _ in range(8):
        drafter.grow()
    drafter.close(2)
    drafter.check()
    assert best() == expected


def test_where_no_token_is_allowed_none_is_accepted() -> None:
    tree = TokenTree(5)
    tree.add_many([ROOT], [-1], [0.9])
    assert walk(tree, everything(tree), torch.tensor([-1, 3], dtype=torch.int32).numpy()) == ([0], True)
