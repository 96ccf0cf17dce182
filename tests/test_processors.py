"""Processors: against a plain reference, the same at every node of a tree as behind the text, invisible to speculation."""

import copy
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.decode import Generation, Speculation, decode
from engine.drafters.model import ModelDrafter
from engine.grammar import Vocabulary
from engine.noise import derive_seed
from engine.processors import Processors, make_processors
from engine.runner import ModelRunner
from engine.types import MAX_TOKEN_ID, GenerationRequest, Grammar, InvalidRequest, SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import until
from tests.exact import Tokens, audit

SIZE = 4096
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
REGEX = r"(self|other)\.[a-z]{1,8} = [0-9]{1,4}\n"
EVERYTHING = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=-0.2,
    logit_bias=((5, 3.5), (199, -2.0)),
    bad_words=((7,), (3, 4), (3, 4, 9)),
    min_tokens=6,
)
CASES = {
    "penalties": SamplingParams(1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "greedy penalties": SamplingParams(0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    "bias and bad words": SamplingParams(0.7, logit_bias=((199, -100.0), (14, 2.0)), bad_words=((11,), (199, 12))),
    "min tokens": SamplingParams(1.0, min_tokens=20, stop_token_ids=(199, 11, 14, 283)),
    "schema": SamplingParams(1.0, grammar=Grammar("json_schema", SCHEMA)),
    "json, penalties, top-p": SamplingParams(0.8, top_p=0.9, presence_penalty=0.4, grammar=Grammar("json_object")),
    "greedy regex": SamplingParams(0.0, grammar=Grammar("regex", REGEX)),
}


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary(tokenizer, SIZE)


def some_logits(rows: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def made(
    params: SamplingParams, tokens: Sequence[int], prompt: int, vocabulary: Vocabulary | None = None
) -> Processors:
    processors = make_processors(params, tokens, prompt, {0, *params.stop_token_ids}, SIZE, vocabulary)
    assert processors is not None
    return processors


def reference(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """One row, token by token, as vLLM and OpenAI's documentation say it."""
    counts, bias, out = Counter(output), dict(params.logit_bias), logits.clone()
    for token in range(len(logits)):
        value = float(logits[token]) + bias.get(token, 0.0)
        for word in params.bad_words:
            if (*output, token)[-len(word) :] == word:
                value = -math.inf
        if token == 0 and len(output) < params.min_tokens:
            value = -math.inf
        if token in counts or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        out[token] = value
    return out


def test_every_row_is_processed_as_the_text_that_leads_to_it_demands() -> None:
    prompt, output, paths = (1, 2, 2, 300), (5, 3, 5), [(), (4,), (4, 9), (7, 7, 2000), (8, 8, 8)]
    logits = some_logits(len(paths))
    before = logits.clone()
    processed = made(EVERYTHING, (*prompt, *output), len(prompt)).apply(logits, paths)
    for row, path in enumerate(paths):
        expected = reference(logits[row], EVERYTHING, prompt, (*output, *path))
        torch.testing.assert_close(processed[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before), "what was given stays as it is"


few = st.lists(st.integers(0, 3), max_size=6)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=20), few, st.lists(few))
def test_a_token_is_kept_out_where_it_would_complete_a_bad_word(
    words: list[list[int]], output: list[int], paths: list[list[int]]
) -> None:
    params = SamplingParams(bad_words=tuple(map(tuple, words)))
    processed = made(params, output, 0).apply(torch.zeros(len(paths), SIZE), paths)
    for row, path in enumerate(paths):
        texts = {token: [*output, *path, token] for token in range(4)}
        bad = {token for token, text in texts.items() if any(text[-len(word) :] == word for word in words)}
        assert set((processed[row] == -math.inf).nonzero().flatten().tolist()) == bad


@pytest.mark.parametrize("name", CASES)
def test_a_node_of_a_tree_is_processed_bit_by_bit_like_the_end_of_the_text(
    name: str, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = {"greedy regex": "self.a"}.get(name, '{"name": "ada", "age": 7')
    path = tokenizer(text)["input_ids"]
    logits = some_logits(len(path) + 1)
    processed = made(CASES[name], (1, 2), 2, vocabulary).apply(logits, [path[:n] for n in range(len(path) + 1)])
    walking = made(CASES[name], (1, 2), 2, vocabulary)
    for row, token in enumerate([*path, 0]):
        assert torch.equal(walking.apply(logits[row : row + 1], [()])[0], processed[row])
        walking.extend([token])


def test_a_path_that_breaks_the_grammar_disturbs_nothing(vocabulary: Vocabulary) -> None:
    """A draft may guess anything: such rows can't be reached, and the others are masked as without them."""
    logits = some_logits(3)
    grammar = made(CASES["schema"], (1,), 1, vocabulary)
    processed = grammar.apply(logits, [(), (199, 199, 5), ()])
    assert torch.equal(processed[1], logits[1])
    assert torch.equal(processed[0].isinf(), processed[2].isinf())
    assert bool(processed[0].isinf().any())


def test_a_request_without_processors_has_none() -> None:
    assert make_processors(SamplingParams(0.7, top_k=3, top_p=0.9, logprobs=3), (1,), 1, {0}, SIZE, None) is None


# the promise


def requests(prompts: Sequence[Tokens], params: SamplingParams) -> list[GenerationRequest]:
    return [
        GenerationRequest(str(i), prompt, replace(params, seed=i, max_tokens=32)) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("speculation", ["chain-5", "tree-31"])
def test_speculation_is_invisible(
    name: str,
    speculation: str,
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = requests(prompts[:2], CASES[name])
    made = exact.SPECULATIONS[speculation](draft)
    plain = [decode(target, [request], tokenizer=tokenizer)[0] for request in asked]
    speculated = decode(target, asked, made, tokenizer)
    assert [(g.tokens, g.finish_reason) for g in speculated] == [(g.tokens, g.finish_reason) for g in plain]
    audit(target, made)


@pytest.mark.parametrize("name", CASES)
def test_an_output_can_be_resumed_anywhere(
    name: str, target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    [request] = requests(prompts[:1], CASES[name])
    [whole] = decode(target, [request], tokenizer=tokenizer)
    for cut in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        resumed = replace(request, resume_tokens=tuple(whole.tokens[:cut]))
        [rest] = decode(target, [resumed], tokenizer=tokenizer)
        assert whole.tokens[:cut] + rest.tokens == whole.tokens


def test_a_draft_that_knows_the_grammar_guesses_better(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = requests(prompts[:3], CASES["schema"])

    def accepted(knows: PreTrainedTokenizerFast | None) -> int:
        speculation = Speculation(ModelDrafter(draft, tokenizer=knows), FixedTree(15), 3)
        return sum(generation.accepted for generation in decode(target, asked, speculation, tokenizer))

    assert accepted(tokenizer) > accepted(None)


# what each of them is for


def generate(
    target: ModelRunner, prompt: Tokens, tokenizer: PreTrainedTokenizerFast | None = None, **fields: Any
) -> Generation:
    [generation] = decode(target, [GenerationRequest("", prompt, SamplingParams(**fields))], tokenizer=tokenizer)
    return generation


def text_of(generation: Generation, tokenizer: PreTrainedTokenizerFast) -> str:
    text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("seed", range(4))
def test_the_output_follows_its_grammar(
    seed: int, target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    schema = generate(target, prompts[0], tokenizer, temperature=1.0, seed=seed, grammar=Grammar("json_schema", SCHEMA))
    value = json.loads(text_of(schema, tokenizer))
    assert value["name"] in ("ada", "bob")
    assert 0 <= value["age"] <= 99
    assert schema.finish_reason == "stop"
    ruled = generate(target, prompts[0], tokenizer, temperature=1.0, seed=seed, grammar=Grammar("regex", REGEX))
    assert re.fullmatch(REGEX, text_of(ruled, tokenizer))
    ebnf = Grammar("ebnf", 'root ::= "yes" | "no"')
    answer = generate(target, prompts[0], tokenizer, temperature=1.0, seed=seed, grammar=ebnf)
    assert text_of(answer, tokenizer) in ("yes", "no")


def test_a_stop_token_is_text_that_a_grammar_may_need(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    [brace] = tokenizer("}", add_special_tokens=False)["input_ids"]
    ruled = generate(target, prompts[0], tokenizer, stop_token_ids=(brace,), grammar=Grammar("regex", "}"))
    assert (ruled.tokens, ruled.finish_reason) == ([brace], "stop")


def test_a_grammar_ends_the_output_of_a_checkpoint_that_names_no_end_token(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    ruled = generate(target, prompts[0], tokenizer, max_tokens=40, grammar=Grammar("regex", "yes|no"))
    assert text_of(ruled, tokenizer) in ("yes", "no")
    assert ruled.finish_reason == "stop"


def test_a_grammar_ends_with_a_token_that_is_only_named_like_an_end_token(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the model's settings nor the tokenizer's say that it is one."""
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    nameless = copy.deepcopy(tokenizer)
    nameless.eos_token = None
    ruled = generate(target, prompts[0], nameless, max_tokens=40, grammar=Grammar("regex", "yes|no"))
    assert text_of(ruled, nameless) in ("yes", "no")
    assert ruled.finish_reason == "stop"


def test_a_grammar_is_refused_where_nothing_could_end_it() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"yes": 0, "no": 1}, "no")))
    with pytest.raises(InvalidRequest, match=r"^grammar: the model names no end token"):
        Vocabulary(words, 2).ends(set())


def test_a_compiled_grammar_that_is_held_is_not_compiled_again(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others came in between, which the compiler remembers instead."""
    vocabulary = Vocabulary(tokenizer, SIZE)
    held = vocabulary.compile(Grammar("regex", "a+"))
    monkeypatch.setattr(vocabulary, "_compile", lambda grammar: pytest.fail("it is compiled again"))
    assert vocabulary.compile(Grammar("regex", "a+")) is held


def test_bad_words_never_come(target: ModelRunner, prompts: list[Tokens]) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64, "ignore_eos": True}
    free = generate(target, prompts[0], **fields).tokens
    pair, single = (free[10], free[11]), (Counter(free).most_common(1)[0][0],)
    ruled = generate(target, prompts[0], bad_words=(pair, single), **fields).tokens
    assert single[0] not in ruled
    assert pair not in pairwise(ruled)


def test_a_bias_forces_and_forbids(target: ModelRunner, prompts: list[Tokens]) -> None:
    forced = generate(target, prompts[0], temperature=1.0, max_tokens=5, logit_bias=((1234, 100.0),))
    assert forced.tokens == [1234] * 5


def test_nothing_ends_an_output_before_min_tokens(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    newline = tokenizer("\n")["input_ids"][0]
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64, "seed": 3}
    assert len(generate(target, prompts[0], stop_token_ids=(newline,), **fields).tokens) < 30
    ruled = generate(target, prompts[0], stop_token_ids=(newline,), min_tokens=30, **fields)
    assert len(ruled.tokens) >= 30
    assert newline not in ruled.tokens[:29]
    stopped = generate(target, prompts[0], tokenizer, stop=("e",), min_tokens=30, **fields)
    assert len(stopped.tokens) >= 30
    assert stopped.finish_reason == "stop"


def test_what_excludes_itself_ends_with_an_error(
    target: ModelRunner, prompts: list[Tokens], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Every text that the grammar allows begins with a bad word."""
    bad = tuple((token,) for word in ("y", "ye", "yes") for token in [tokenizer(word)["input_ids"][0]])
    request = GenerationRequest("", prompts[0], SamplingParams(grammar=Grammar("regex", "yes"), bad_words=bad))
    [generation] = decode(target, [request], tokenizer=tokenizer)
    assert (generation.tokens, generation.finish_reason) == ([], "error")
    assert "no token is allowed" in str(generation.error)


def test_log_probabilities_are_the_models_own(target: ModelRunner, prompts: list[Tokens]) -> None:
    """Of the chosen and the likeliest tokens, before bias, penalties and temperature; with and without speculation."""
    fields: dict[str, Any] = {"temperature": 0.7, "max_tokens": 8, "logit_bias": ((199, 5.0),), "logprobs": 3}
    generation = generate(target, prompts[0], ignore_eos=True, **fields)
    model = AutoModelForCausalLM.from_pretrained(exact.TARGET, dtype=torch.float32)
    ids = torch.tensor([[*prompts[0], *generation.tokens]])
    with torch.inference_mode():
        raw = model(ids).logits[0, len(prompts[0]) - 1 : -1].log_softmax(-1)
    assert len(generation.logprobs) == len(generation.tokens) == 8
    for row, token, found in zip(raw, generation.tokens, generation.logprobs, strict=True):
        best = row.topk(3)
        assert found.chosen == pytest.approx(float(row[token]), abs=1e-3)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_the_samples_of_a_request_have_seeds_of_their_own() -> None:
    seeds = [derive_seed(seed, sample) for seed in range(50) for sample in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [derive_seed(seed, 0) for seed in (0, 7)] == [0, 7]


# bad input


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", '{"type": 3'), ("json_schema", '{"type": "nonsense"}'), ("regex", "[a-z"), ("ebnf", "root ::= (")],
)
def test_a_grammar_that_makes_no_sense_is_refused_in_one_line(
    kind: Any, text: str, target: ModelRunner, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: ") as refused:
        generate(target, (1, 2), tokenizer, grammar=Grammar(kind, text))
    assert "\n" not in str(refused.value)
    assert ".cc:" not in str(refused.value)


@pytest.mark.parametrize(
    "text", [r"\Aa\Z", r"\07", r"[\h]", "a^b", "a$b", "(^a|b$)", "a(?=b)", r"(a)\1", r"\bfoo", "(?i)a"]
)
def test_a_regex_that_would_be_read_as_another_is_refused(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: the regex can't be used: "):
        Vocabulary(tokenizer, SIZE).compile(Grammar("regex", text))


@pytest.mark.parametrize("text", [r"^[a-z]+$", r"\^\$[\^$]+", r"[^$]x[\]^]", r"\d{2}\.\x41", r"\\d\n"])
def test_anchors_at_the_ends_and_escapes_are_taken(
    text: str, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    Vocabulary(tokenizer, SIZE).compile(Grammar("regex", text))
    assert "Warning" not in "".join(capfd.readouterr())


def test_what_needs_a_tokenizer_or_a_larger_vocabulary_is_refused(target: ModelRunner) -> None:
    fields: dict[str, Any] = {
        "grammar": Grammar("json_object"),
        "stop": ("x",),
        "logit_bias": ((SIZE, 1.0),),
        "bad_words": ((1, SIZE),),
    }
    for field, value in fields.items():
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            decode(target, [GenerationRequest("", (1, 2), SamplingParams(**{field: value}))])


def test_a_stop_token_that_does_not_exist_never_comes(target: ModelRunner, prompts: list[Tokens]) -> None:
    for stop in (SIZE, 10**9, MAX_TOKEN_ID):
        params = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(stop,))
        [generation] = decode(target, [GenerationRequest("", prompts[0], params)])
        assert len(generation.tokens) == 6


def test_a_draft_copes_with_ids_that_it_does_not_know(draft: ModelRunner) -> None:
    """In the prefix, in commits, in what it looks up and under every processor."""
    drafter = ModelDrafter(draft)
    drafter.open(1, [5, SIZE, 2**31 - 1] * 3, EVERYTHING, 3)
    for _ in range(4):
        drafter.grow()
        drafter.commit(1, [5, SIZE, 2**31 - 1])
    drafter.check()
    drafter.close(1)


def test_a_draft_with_other_sessions_does_not_wait_for_a_grammar(
    draft: ModelRunner, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it, go_on = Vocabulary.compile, threading.Event()

    def compile_slowly(vocabulary: Vocabulary, grammar: Grammar) -> Any:
        if threading.current_thread().name.startswith("paceline-grammar"):
            assert go_on.wait(30)
        return compile_it(vocabulary, grammar)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    drafter = ModelDrafter(draft, tokenizer=tokenizer, patient=False)
    params = SamplingParams(grammar=Grammar("regex", "[0-9]{40}"))
    prompt, digit = [5, 6, 7], tokenizer("7")["input_ids"][0]

    def guessed() -> str:
        while drafter.grow():
            pass
        tree = drafter.tree(1)
        return "".join(tokenizer.decode(tree.token[tree.chain(8)]))

    drafter.open(1, prompt, params)
    assert not guessed().isdigit()  # as if it had none
    go_on.set()
    vocabulary = drafter._vocabulary
    assert vocabulary is not None
    until(lambda: vocabulary.ready(params.grammar or Grammar("json_object")), "the grammar is compiled")
    drafter.commit(1, [digit])
    drafter.commit(1, [digit + 1])  # nothing of the old tree is left
    assert guessed().isdigit()
    drafter.close(1)
    drafter.check()
