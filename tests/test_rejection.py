"""The classical verifier: the target's distribution, whatever the draft's is; and both verifiers under all processors."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine import noise, rejection, sampling
from engine.decode import decode
from engine.grammar import Vocabulary
from engine.processors import Processors
from engine.rejection import draw, probabilities, verify
from engine.runner import ModelRunner
from engine.step import StepError
from engine.types import GenerationRequest, Grammar, SamplingParams
from tests.exact import Tokens
from tests.test_sampling import SEEDS, chi_square, some_logits

SIZE = 9
PROMPT = (2, 3)
PARAMS = [
    SamplingParams(1.0),
    SamplingParams(
        0.8, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((4, 1.0),)
    ),
]


class Model:
    """The next token's logits depend on the last token; processed as any model's."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._first, self._then = some_logits(SIZE, seed=seed) / 2, some_logits(SIZE, SIZE, seed=seed + 1) / 2
        self._params = params
        self._chances: dict[tuple[int, ...], torch.Tensor] = {}
        self._known = {
            path: self._row(path) for length in range(3) for path in itertools.product(range(SIZE), repeat=length)
        }

    def _row(self, path: Sequence[int]) -> torch.Tensor:
        row = (self._then[path[-1]] if path else self._first)[None]
        if self._params == SamplingParams(1.0):
            return row[0]
        return Processors(self._params, PROMPT, set(), SIZE, None).apply(row, [path])[0]

    def logits(self, path: tuple[int, ...]) -> torch.Tensor:
        """Processed, behind this output: [SIZE]."""
        return self._known[path]

    def chances(self, path: tuple[int, ...] = ()) -> torch.Tensor:
        """Of each next token: float64 [SIZE]."""
        if path not in self._chances:
            self._chances[path] = probabilities(self.logits(path)[None], self._params)[0]
        return self._chances[path]


def pairs(model: Model) -> torch.Tensor:
    """The probability of each pair of first and second token: [SIZE x SIZE]."""
    first = model.chances()
    return torch.stack([first[token] * model.chances((token,)) for token in range(SIZE)]).flatten()


def by_rejection(target: Model, draft: Model, seed: int) -> list[int]:
    """Two tokens of output, drafted two at a time as long as two are needed."""
    output: list[int] = []
    while len(output) < 2:
        drafted: list[int] = []
        for _ in range(2 - len(output)):
            drafted.append(draw(draft.chances((*output, *drafted)), seed, len(output) + len(drafted), 1))
        paths = [(*output, *drafted[:n]) for n in range(len(drafted) + 1)]
        guessed = torch.stack([draft.chances(path) for path in paths[:-1]])
        output += verify(torch.stack([target.chances(path) for path in paths]), guessed, drafted, seed, len(output))
    return output


def by_coupling(target: Model, params: SamplingParams) -> torch.Tensor:
    """Two tokens of output for every seed: [SEEDS, 2]."""

    def choose(logits: torch.Tensor, position: int) -> torch.Tensor:
        keys = torch.cat([noise.keys(seed, [position]) for seed in range(SEEDS)])
        return torch.from_numpy(sampling.choose(logits, [params] * SEEDS, keys))

    first = choose(target.logits(()).expand(SEEDS, -1), 0)
    then = torch.stack([target.logits((token,)) for token in range(SIZE)])
    return torch.stack([first, choose(then[first], 1)], 1)


@pytest.fixture
def _noise_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of all seeds is computed in one go: one by one it would be most of the test."""
    known: dict[tuple[int, int, int], torch.Tensor] = {}
    for position, (stream, size) in itertools.product(range(3), [(1, SIZE), (2, 1), (3, SIZE)]):
        keys = torch.cat([noise.keys(noise.derive_seed(seed, stream), [position]) for seed in range(SEEDS)])
        rows = noise.gumbel(keys[:, None], torch.arange(size)).double()
        known.update({(seed, position, stream): row for seed, row in enumerate(rows.unbind())})
    for place in ((0, 0, 1), (7, 2, 2), (SEEDS - 1, 1, 3)):
        assert torch.equal(known[place], rejection._gumbel(*place, len(known[place])))
    monkeypatch.setattr(rejection, "_gumbel", lambda seed, position, stream, size: known[seed, position, stream])


def has_the_distribution_of(target: Model, outputs: torch.Tensor) -> None:
    """Single tokens and pairs. outputs: [SEEDS, 2]."""
    first, both = outputs[:, 0], outputs[:, 0] * SIZE + outputs[:, 1]
    for counts, expected in (
        (torch.bincount(first, minlength=SIZE), target.chances()),
        (torch.bincount(both, minlength=SIZE**2), pairs(target)),
    ):
        assert counts[expected == 0].sum() == 0
        assert chi_square(counts, expected) < 4


@pytest.mark.parametrize("params", PARAMS)
def test_coupled_choices_have_the_targets_distribution(params: SamplingParams) -> None:
    target = Model(params, seed=10)
    has_the_distribution_of(target, by_coupling(target, params))


@pytest.mark.usefixtures("_noise_at_once")
@pytest.mark.parametrize("params", PARAMS)
def test_rejection_has_the_targets_distribution_whatever_the_draft(params: SamplingParams) -> None:
    target, draft = Model(params, seed=10), Model(params, seed=20)
    outputs = [by_rejection(target, draft, seed)[:2] for seed in range(SEEDS)]
    has_the_distribution_of(target, torch.tensor(outputs))


def test_a_draft_like_the_target_is_always_accepted() -> None:
    target = Model(PARAMS[0], seed=10)
    chances = torch.stack([target.chances()] * 3)
    for seed in range(500):
        drafted = [draw(chances[0], seed, position, 1) for position in range(2)]
        assert verify(chances, chances[:2], drafted, seed, 0)[:2] == drafted


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.0, max_tokens=40),
        SamplingParams(0.0, max_tokens=40, repetition_penalty=1.3, bad_words=((11,),)),
        SamplingParams(0.0, max_tokens=40, grammar=Grammar("regex", "[a-z]+ = [0-9]{3}")),
    ],
)
def test_greedy_output_equals_plain_decoding(
    params: SamplingParams,
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    request = GenerationRequest("", prompts[0], params)
    [plain] = decode(target, [request], tokenizer=tokenizer)
    found = rejection.decode(target, draft, request, 4, Vocabulary(tokenizer, target.vocab_size))
    assert (found.tokens, found.finish_reason) == (plain.tokens, plain.finish_reason)
    assert found.steps < len(found.tokens)


def test_sampled_output_is_reproducible_and_a_target_accepts_itself(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens]
) -> None:
    request = GenerationRequest("", prompts[0], SamplingParams(1.0, max_tokens=24, ignore_eos=True, seed=5))
    first, again = (rejection.decode(target, draft, request, 3) for _ in range(2))
    assert first.tokens == again.tokens
    other = rejection.decode(target, draft, replace(request, params=replace(request.params, seed=6)), 3)
    assert other.tokens != first.tokens
    itself = rejection.decode(target, target, request, 3)
    assert itself.accepted == itself.tried == 18


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_allowed_the_output_ends_with_an_error(
    temperature: float,
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Whatever comes behind "ab", which the grammar asks for, is a bad word."""
    bad = tuple((token,) for word in ("yes", "ye", "y") for token in [tokenizer(word)["input_ids"][0]])
    params = SamplingParams(temperature, max_tokens=8, grammar=Grammar("regex", "abyes"), bad_words=bad)
    request = GenerationRequest("", prompts[0], params)
    [coupled] = decode(target, [request], tokenizer=tokenizer)
    found = rejection.decode(target, draft, request, 4, Vocabulary(tokenizer, target.vocab_size))
    assert tokenizer.decode(found.tokens) == "ab"
    assert (found.finish_reason, found.error) == (coupled.finish_reason, coupled.error)
    assert "no token is allowed" in str(found.error)
    assert found.accepted <= found.tried <= len(found.tokens)


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS])
def test_nothing_is_drawn_where_no_token_is_allowed(params: SamplingParams) -> None:
    rows = torch.full((2, SIZE), -torch.inf)
    rows[0, 4] = 1.0
    chances = probabilities(rows, params)
    assert chances.sum(-1).tolist() == [1.0, 0.0]
    assert verify(chances, chances[:1], [4], 0, 0) == [4, -1]
    assert verify(chances[1:].expand(2, -1), chances[:1], [4], 0, 0) == [-1]


def spoil(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are not finite."""
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: forward(batch) * float("nan"))


def test_a_target_that_gives_no_numbers_is_an_error(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(target, monkeypatch)
    with pytest.raises(StepError, match="request 1 are not finite"):
        rejection.decode(target, draft, GenerationRequest("1", prompts[0]), 4)
    assert target.pool.used_pages == draft.pool.used_pages == 0


def test_a_draft_that_gives_no_numbers_guesses_nothing(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest("", prompts[0], SamplingParams(1.0, max_tokens=8, ignore_eos=True))
    spoil(draft, monkeypatch)
    found = rejection.decode(target, draft, request, 4)
    assert (len(found.tokens), found.tried, found.steps) == (8, 0, 8)
