"""The promise: one process, every drafter, window, batch and temperature, the same tokens; and nothing left behind."""

from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine.attention import SequenceRows
from engine.decode import Generation, Speculation, decode, decode_steps
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.kv import KVPool, PoolExhausted
from engine.runner import ModelRunner
from engine.step import MAX_WINDOW, Outcome, StepError
from engine.text import StopStrings
from engine.types import GenerationRequest, InvalidRequest, SamplingParams
from engine.windows import FixedChain, FixedTree
from tests import exact
from tests.exact import TEMPERATURES, TIE, Tokens, audit, differences, make_requests, run

TOKENS = 48


@pytest.fixture(scope="module")
def plain(_target: ModelRunner, prompts: list[Tokens]) -> dict[float, list[list[int]]]:
    """Plain decoding of all prompts one by one, by temperature: what everything is held against."""
    return {
        temperature: [g.tokens for g in run(_target, make_requests(prompts, temperature, TOKENS), batch=1)]
        for temperature in TEMPERATURES
    }


def one(prompt: Tokens, params: SamplingParams | None = None, resume: Sequence[int] = ()) -> GenerationRequest:
    return GenerationRequest("request", prompt, params or SamplingParams(max_tokens=TOKENS), tuple(resume))


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens))
    assert isinstance(text, str)
    return text


def only(generations: list[Generation]) -> Generation:
    (generation,) = generations
    return generation


# what the target says


def test_greedy_equals_transformers_generate_up_to_counted_ties(target: ModelRunner, prompts: list[Tokens]) -> None:
    found = exact.versus_transformers(target, prompts, TOKENS)
    assert len(found) <= 1
    assert all(difference.margin is not None and difference.margin < TIE for difference in found)


def test_a_seed_gives_the_same_tokens_every_time_and_another_seed_others(target: ModelRunner) -> None:
    params = [SamplingParams(5.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in (0, 1, 2, 0)]
    outputs = [generation.tokens for generation in run(target, [one((5,), each) for each in params])]
    assert outputs[0] == outputs[3]
    assert len({tuple(output) for output in outputs}) == 3


# the promise of invariant mode


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_batch_is_invisible(
    target: ModelRunner, prompts: list[Tokens], plain: dict[float, list[list[int]]], temperature: float
) -> None:
    requests = make_requests(prompts, temperature, TOKENS)
    together = run(target, requests[::-1])
    assert not list(differences(together, plain[temperature][::-1]))


@pytest.mark.parametrize(
    ("name", "temperature", "batch"),
    [
        ("chain-1", 0.7, 5),
        ("chain-5", 0.0, 1),
        ("chain-5", 1.0, 3),
        ("chain-15", 0.7, 1),
        ("tree-7", 1.0, 1),
        ("tree-7", 0.7, 3),
        ("tree-31", 0.0, 3),
        ("tree-goodput", 0.0, 5),
        ("tree-goodput", 0.7, 3),
        ("tree-goodput", 1.0, 1),
        ("auto", 0.0, 3),
        ("auto", 1.0, 1),
        ("ngram-3", 1.0, 5),
        ("ngram-12", 0.0, 3),
        ("ngram-12", 0.7, 1),
        ("ngram-goodput", 0.0, 1),
        ("nonsense-chain", 0.0, 3),
        ("nonsense-tree", 0.7, 3),
        ("nonsense-goodput", 1.0, 3),
    ],
)
def test_speculation_is_invisible(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[list[int]]],
    name: str,
    temperature: float,
    batch: int,
) -> None:
    chosen = slice(0, 2) if batch == 1 else slice(None)
    requests = make_requests(prompts, temperature, TOKENS)[chosen]
    generations = run(target, requests, exact.SPECULATIONS[name](draft), batch)
    assert not list(differences(generations, plain[temperature][chosen]))
    if not name.startswith(("nonsense", "ngram")):
        assert sum(generation.accepted for generation in generations) > 0, "nothing was speculated"


def test_the_largest_window_is_invisible(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], plain: dict[float, list[list[int]]]
) -> None:
    speculation = Speculation(ModelDrafter(draft, Growing(rows=32)), FixedTree(MAX_WINDOW), 4)
    params = SamplingParams(1.0, seed=0, max_tokens=12, ignore_eos=True)
    generation = only(run(target, [one(prompts[0], params)], speculation))
    assert generation.tokens == plain[1.0][0][:12]


def test_a_perfect_draft_is_invisible_and_fast(
    target: ModelRunner, prompts: list[Tokens], plain: dict[float, list[list[int]]]
) -> None:
    drafts = ModelRunner(exact.TARGET, dtype="float32", kv_tokens=2048)
    speculation = Speculation(ModelDrafter(drafts, Growing(children=1)), FixedChain(7), 7)
    generation = only(run(target, make_requests(prompts[:1], 0.0, TOKENS), speculation))
    assert generation.tokens == plain[0.0][0]
    assert generation.tokens_per_step > 5
    assert drafts.pool.used_pages == 0


def test_bfloat16_keeps_the_promise_too(prompts: list[Tokens]) -> None:
    target = ModelRunner(exact.DRAFT, dtype="bfloat16", invariant=True, kv_tokens=2048)
    requests = make_requests(prompts[-3:], 0.7, 12)
    expected = [generation.tokens for generation in run(target, requests, batch=1)]
    assert not list(differences(run(target, requests), expected))
    assert not list(differences(run(target, requests, exact.ngram(5)(target)), expected))
    assert not list(differences(run(target, requests, exact.tree(9, 2)(target)), expected))


# outside invariant mode


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ["plain", "tree-31"])
def test_a_divergence_outside_invariant_mode_is_a_tie(
    fast_target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[list[int]]],
    name: str,
    temperature: float,
) -> None:
    speculation = exact.SPECULATIONS[name](draft) if name != "plain" else None
    generations = run(fast_target, make_requests(prompts[:3], temperature, TOKENS), speculation, margins=True)
    found = list(differences(generations, plain[temperature][:3]))
    assert len(found) <= 1
    assert all(difference.margin is not None and difference.margin < TIE for difference in found)


def test_every_token_has_its_margin(target: ModelRunner, draft: ModelRunner, prompts: list[Tokens]) -> None:
    requests = make_requests(prompts[:3], 0.7, 20)
    alone = run(target, requests, margins=True)
    speculated = run(target, requests, exact.SPECULATIONS["tree-7"](draft), margins=True)
    assert [g.margins for g in speculated] == [g.margins for g in alone]
    assert all(len(g.margins) == 20 and min(g.margins) >= 0 for g in alone)


# resuming


@pytest.mark.parametrize("cut", [1, 17, TOKENS - 1])
@pytest.mark.parametrize("name", ["plain", "tree-7", "ngram-12"])
def test_a_resumed_request_goes_on_with_the_same_tokens(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[list[int]]],
    name: str,
    cut: int,
) -> None:
    requests = [
        replace(request, resume_tokens=tuple(tokens[:cut]))
        for request, tokens in zip(make_requests(prompts[:3], 0.7, TOKENS), plain[0.7], strict=False)
    ]
    speculation = exact.SPECULATIONS[name](draft) if name != "plain" else None
    generations = run(target, requests, speculation)
    assert not list(differences(generations, [tokens[cut:] for tokens in plain[0.7][:3]]))
    assert all(generation.finish_reason == "length" for generation in generations)


def test_a_resumed_output_that_ended_already_only_says_so(target: ModelRunner, prompts: list[Tokens]) -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(77,))
    ended, other = decode(target, [one(prompts[0], params, resume=(5, 77)), one(prompts[1], params)])
    assert (ended.tokens, ended.finish_reason) == ([], "stop")
    assert other.finish_reason is not None


def test_a_stop_string_may_begin_in_the_resumed_output(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    first = only(decode(target, [one(prompts[0], SamplingParams(max_tokens=12, ignore_eos=True))])).tokens
    text = text_of(tokenizer, first)
    text = text[len(text) // 2 : len(text) // 2 + 4]
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=(text,))
    whole = only(decode(target, [one(prompts[0], params)], tokenizer=tokenizer))
    assert whole.finish_reason == "stop"
    cut = len(whole.tokens) - 1
    resumed = only(decode(target, [one(prompts[0], params, resume=first[:cut])], tokenizer=tokenizer))
    assert (resumed.tokens, resumed.finish_reason) == (whole.tokens[cut:], "stop")


# where an output ends


def uncommon(tokens: Sequence[int]) -> int:
    """A place in the output whose token did not occur before it."""
    return next(i for i in range(len(tokens) - 1, 0, -1) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("name", ["plain", "tree-31", "chain-15"])
def test_a_stop_token_ends_the_output_and_belongs_to_it(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], plain: dict[float, list[list[int]]], name: str
) -> None:
    tokens = plain[1.0][0]
    at = uncommon(tokens)
    params = SamplingParams(1.0, seed=0, max_tokens=TOKENS, ignore_eos=True, stop_token_ids=(tokens[at],))
    speculation = exact.SPECULATIONS[name](draft) if name != "plain" else None
    generation = only(run(target, [one(prompts[0], params)], speculation))
    assert (generation.tokens, generation.finish_reason) == (tokens[: at + 1], "stop")


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_end_token_ends_the_output_unless_ignored(
    target: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    ignore: bool,
) -> None:
    tokens = plain[1.0][0]
    at = uncommon(tokens)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [tokens[at]] * 2)
    params = SamplingParams(1.0, seed=0, max_tokens=TOKENS, ignore_eos=ignore)
    generation = only(decode(target, [one(prompts[0], params)]))
    expected = (tokens, "length") if ignore else (tokens[: at + 1], "stop")
    assert (generation.tokens, generation.finish_reason) == expected


@pytest.mark.parametrize("name", ["plain", "tree-31", "chain-15"])
def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[list[int]]],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
) -> None:
    tokens = plain[0.0][0]
    text = text_of(tokenizer, tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop=("never said", stop))
    speculation = exact.SPECULATIONS[name](draft) if name != "plain" else None
    generation = only(decode(target, [one(prompts[0], params)], speculation, tokenizer))
    assert generation.finish_reason == "stop"
    assert generation.tokens == tokens[: len(generation.tokens)]
    assert stop in text_of(tokenizer, generation.tokens)
    assert stop not in text_of(tokenizer, generation.tokens[:-1])
    assert StopStrings((stop,)).push(text_of(tokenizer, generation.tokens)) == text[: text.find(stop)]


@pytest.mark.parametrize("limit", [1, 2, 13])
def test_never_more_than_max_tokens(target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], limit: int) -> None:
    params = SamplingParams(max_tokens=limit, ignore_eos=True)
    generation = only(run(target, [one(prompts[0], params)], exact.SPECULATIONS["tree-31"](draft)))
    assert (len(generation.tokens), generation.finish_reason) == (limit, "length")


def test_counts_add_up(target: ModelRunner, draft: ModelRunner, prompts: list[Tokens]) -> None:
    for generation in run(target, make_requests(prompts[:2], 0.0, 24), exact.SPECULATIONS["tree-31"](draft)):
        assert len(generation.tokens) - generation.steps <= generation.accepted < len(generation.tokens)
        assert generation.accepted <= generation.tried <= generation.accepted + generation.steps


# requests that cannot be


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (one(()), "prompt"),
        (one((0, -1)), "prompt"),
        (one((4096,)), "prompt"),
        (one((5,), resume=(4096,)), "prompt"),
        (one((5,) * 1000), "prompt"),
        (one((5,), SamplingParams(max_tokens=2), resume=(1, 2)), "resume_tokens"),
        (one((5,), SamplingParams(stop=("x",))), "stop"),  # without a tokenizer
    ],
)
def test_an_impossible_request_is_refused_with_its_field(
    target: ModelRunner, request_: GenerationRequest, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(target, [one((5,)), request_])
    assert refused.value.param == param
    audit(target, None)


def test_the_context_can_be_filled_to_its_end(fast_target: ModelRunner) -> None:
    prompt = (5,) * (fast_target.max_length - 3)
    generation = only(decode(fast_target, [one(prompt, SamplingParams(max_tokens=3, ignore_eos=True))]))
    assert len(generation.tokens) == 3


# nothing is left behind


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("name", ["plain", "tree-7", "ngram-3", "nonsense-tree"])
def test_a_cancelled_batch_frees_everything(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], name: str, after: int
) -> None:
    speculation = exact.SPECULATIONS[name](draft) if name != "plain" else None
    steps = decode_steps(target, make_requests(prompts[:3], 0.7, 20), speculation)
    assert isinstance(steps, Generator)
    for _ in range(after):
        next(steps)
    steps.close()
    audit(target, speculation)
    assert draft.pool.used_pages == 0


def test_everything_stays_in_order_during_a_batch(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens]
) -> None:
    speculation = exact.SPECULATIONS["tree-goodput"](draft)
    for _ in decode_steps(target, make_requests(prompts[:3], 0.7, 12), speculation):
        target.pool.check()
        speculation.drafter.check()


def test_too_many_requests_for_the_pool_free_everything(target: ModelRunner, prompts: list[Tokens]) -> None:
    with pytest.raises(PoolExhausted):
        decode(target, make_requests(prompts * 2, 0.0, 192))
    audit(target, None)


@pytest.mark.parametrize("name", ["tree-7", "auto"])
@pytest.mark.parametrize("tokens", [64, 7 * 32, 12 * 32])
def test_a_draft_without_room_is_done_without(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    name: str,
) -> None:
    """No room for the prefix, for the tree, or for the tokens to come."""
    monkeypatch.setattr(draft, "pool", KVPool(2, 1, 64, tokens, torch.float32))
    requests = make_requests(prompts[:2], 0.0, 128)
    plain = [generation.tokens for generation in decode(target, requests)]
    speculation = exact.SPECULATIONS[name](draft)
    assert [generation.tokens for generation in decode(target, requests, speculation)] == plain
    audit(target, speculation)
    draft.pool.check()
    assert draft.pool.used_pages == 0


class BrokenDrafter(NgramDrafter):
    def grow(self) -> list[int]:
        raise RuntimeError("broken")


def test_a_drafter_that_raises_frees_everything(target: ModelRunner, prompts: list[Tokens]) -> None:
    speculation = Speculation(BrokenDrafter(), FixedTree(4), 1)
    with pytest.raises(RuntimeError, match="broken"):
        decode(target, make_requests(prompts[:2], 0.0, 8), speculation)
    audit(target, speculation)


def spoil(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, prompt: Tokens, value: float) -> None:
    """One logit of this prompt's sequence is `value`, whenever there is one."""
    forward = runner.forward

    def spoiled(batch: Sequence[SequenceRows]) -> torch.Tensor:
        logits = forward(batch).clone()
        row = 0
        for rows in batch:
            count = len(rows.tokens) - rows.wanted
            if count and rows.prefix + len(rows.tokens) >= len(prompt) + 3:
                logits[row, 17] = value
            row += count
        return logits

    monkeypatch.setattr(runner, "forward", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_request(
    target: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch, temperature: float, value: float
) -> None:
    requests = make_requests([prompts[4], prompts[0]], temperature, 8)
    spoil(target, monkeypatch, prompts[0], value)
    with pytest.raises(StepError, match="request 1 are not finite") as failed:
        decode(target, requests)
    assert failed.value.request_id == "1"
    audit(target, None)


def test_nothing_is_committed_in_a_step_that_fails(
    target: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests([prompts[4], prompts[0]], 0.0, 8)
    spoil(target, monkeypatch, prompts[0], float("nan"))
    collected: list[tuple[int, Outcome]] = []
    with pytest.raises(StepError):
        collected.extend(decode_steps(target, requests))
    other = [outcome for index, outcome in collected if index == 0]
    assert other[-1].sequence.tokens[2:] == [token for outcome in other for token in outcome.tokens]
