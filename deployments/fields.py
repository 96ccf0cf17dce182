"""What a client may ask for, whatever the protocol: the one validator of HTTP, gRPC and the command line."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from transformers import PreTrainedTokenizerFast

from deployments.schemas import check_schema
from engine.grammar import GrammarState, Vocabulary
from engine.noise import derive_seed
from engine.processors import check_known
from engine.text import word_tokens
from engine.types import MAX_BAD_WORDS, GenerationRequest, Grammar, InvalidRequest, SamplingParams, require
from engine.window_choice import check_window

MAX_SAMPLES = 8
MAX_STOP_CHARACTERS = 1000  # of one stop string
MAX_WORD_CHARACTERS = 1000  # of one bad word
MAX_WORDS = MAX_BAD_WORDS // 2  # each is kept out in two spellings
MAX_DOCUMENTS = 32  # of a request
MAX_DOCUMENT_CHARACTERS = 2**18  # of all of them together
MAX_DOCUMENT_TOKENS = 2**16  # likewise
_DRAWN_SEEDS = 2**53  # seeds drawn here stay exact in clients that read numbers as doubles

Model = TypeVar("Model", bound=BaseModel)
Served = TypeVar("Served")
Item = TypeVar("Item")
Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]  # integers too
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Many = Annotated[tuple[Item, ...], Field(fail_fast=True)]  # of megabytes that are wrong, one error is told, not each


class ContextExceeded(InvalidRequest):
    """The prompt, or prompt and output together, is longer than the model's context."""

    code = "context_length_exceeded"


class UnknownModel(LookupError):
    """No model of this name is served."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What the validator has to know of a model."""

    tokenizer: PreTrainedTokenizerFast
    context: int  # tokens that one request may come to, prompt and output together
    vocab_size: int

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its tokens as grammars see them."""
        return Vocabulary(self.tokenizer, self.vocab_size)

    @cached_property
    def longest_prompt(self) -> int:
        """Characters: no longer text has few enough tokens."""
        return self.context * max(len(token) for token in self.tokenizer.get_vocab())


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def known_prompt(value: Any) -> Any:
    """A prompt as it is; raises ValueError for what is none."""
    ids = isinstance(value, list | tuple) and all(type(token) is int for token in value)
    if not (ids or isinstance(value, str)):
        raise ValueError("must be a text or a list of token ids")
    return value


Prompt = Annotated[Text | Many[Int], BeforeValidator(known_prompt, Text | list[Int])]


def _biases(value: Any) -> Any:
    """Keys are token ids, which JSON can only write as strings."""
    if not isinstance(value, Mapping):
        raise ValueError("must map token ids to biases")
    if not all(isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) < 10) for key in value):
        raise ValueError("its keys must be token ids")
    if len({int(key) for key in value}) < len(value):
        raise ValueError("one bias for each token")
    return {int(key): bias for key, bias in value.items()}


class NullsAreAbsent(BaseModel):
    """A model whose fields can be given as null: they have their defaults then."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return (
            {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class Sampling(NullsAreAbsent):
    """How tokens are chosen, as every protocol names it. Ranges are checked in `make_requests`, with the model."""

    model: Text | None = None  # None: the only one
    min_tokens: Int = 0
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Int = 0  # 0: no limit
    min_p: Number = 0.0
    seed: Int | None = None  # None: drawn at random
    n: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stop: Annotated[Many[Text], BeforeValidator(_listed, Text | list[Text])] = ()
    stop_token_ids: Many[Int] = ()
    ignore_eos: Flag = False
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[dict[Int, Number], Field(fail_fast=True), BeforeValidator(_biases, dict[Text, Number])] = (
        Field(default_factory=dict)
    )
    bad_words: Annotated[Many[Text], BeforeValidator(_listed, Text | list[Text])] = ()


class GenerationFields(Sampling):
    """Every field of a request to generate, with its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    prompt: Prompt
    max_tokens: Int | None = None  # None: as many as the context has room for
    logprobs: Int | None = None  # report each token's log probability, and of so many likeliest ones
    grammar: Grammar | None = None
    window: Text = ""  # what is verified in a step; none: what the model's configuration says
    documents: Many[Text] = ()  # texts that the output may quote, which the prompt doesn't hold


def validated(kind: type[Model], values: Any) -> Model:
    """`values` as this model. Raises InvalidRequest with the first thing that is wrong, naming the client's field."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = first["loc"]
    param = str(path[0]) if path else "body"
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    raise InvalidRequest(param, f"{inner.lstrip('.')} {_plain(first['msg'])}".strip())


def _plain(message: str) -> str:
    """A message of pydantic's as the others here are, in words of JSON."""
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("Tuple should", "must").replace("valid tuple", "list")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message)
    return message[:1].lower() + message[1:]


def find_model(models: Mapping[str, Served], name: str | None) -> Served:
    """The model of this name, or the only one there is. Raises UnknownModel or InvalidRequest."""
    if name is None:
        require(len(models) == 1, "model", "must name one of the models that are served")
        return next(iter(models.values()))
    if name not in models:
        raise UnknownModel("no model of this name is served")
    return models[name]


def text_tokens(text: str, model: TextModel, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The token ids of a text. Raises InvalidRequest, or ContextExceeded where they would be too many in any case."""
    if len(text) > model.longest_prompt:  # to tokenize it would be work for nothing
        raise ContextExceeded("prompt", f"has {len(text)} characters; the model's context is {model.context} tokens")
    _check_encodable("prompt", text)
    return tuple(model.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def prompt_tokens(prompt: str | tuple[int, ...], model: TextModel) -> tuple[int, ...]:
    """The token ids of a prompt. Raises InvalidRequest, or ContextExceeded when no output would fit behind it."""
    tokens = text_tokens(prompt, model) if isinstance(prompt, str) else prompt
    require(bool(prompt) and bool(tokens), "prompt", "must not be empty")
    known = min(tokens) >= 0 and max(tokens) < model.vocab_size
    require(known, "prompt", f"token ids must be between 0 and {model.vocab_size - 1}")
    if len(tokens) >= model.context:
        raise ContextExceeded("prompt", f"has {len(tokens)} tokens; the model's context is {model.context}")
    return tokens


def _check_encodable(field: str, *texts: str) -> None:
    """Raises InvalidRequest for what tokenizers don't take: a command line can hold any bytes."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "must be UTF-8 text") from None


def document_tokens(documents: tuple[str, ...], model: TextModel) -> tuple[tuple[int, ...], ...]:
    """The token ids of a request's documents, the empty ones left out. Raises InvalidRequest for too much of them."""
    require(len(documents) <= MAX_DOCUMENTS, "documents", f"at most {MAX_DOCUMENTS}")
    characters = sum(len(text) for text in documents)
    limit = f"they may have {MAX_DOCUMENT_CHARACTERS} and {MAX_DOCUMENT_TOKENS} tokens"
    require(characters <= MAX_DOCUMENT_CHARACTERS, "documents", f"have {characters} characters together; {limit}")
    read = model.tokenizer.backend_tokenizer.encode
    tokens = [tuple(read(text, add_special_tokens=False).ids) for text in documents]
    count = sum(len(ids) for ids in tokens)
    require(count <= MAX_DOCUMENT_TOKENS, "documents", f"have {count} tokens together; at most {MAX_DOCUMENT_TOKENS}")
    return tuple(ids for ids in tokens if ids)


def draw_seed() -> int:
    """A seed at random."""
    return secrets.randbelow(_DRAWN_SEEDS)


def make_requests(
    fields: GenerationFields, model: TextModel, request_id: str, salt: bytes = b"", trusted: bool = False
) -> list[GenerationRequest]:
    """One request for each of the `n` samples; sample i has the seed `derive_seed(seed, i)`.

    Tokenizes and compiles grammars: not for an event loop's thread. trusted: the grammar may be a regular expression
    or EBNF, which is not for the network. Raises InvalidRequest or ContextExceeded; no other error.
    """
    prompt = prompt_tokens(fields.prompt, model)
    limit = model.context - len(prompt) if fields.max_tokens is None else fields.max_tokens
    if len(prompt) + limit > model.context:
        total = f"{len(prompt)} prompt tokens and {limit} new ones make {len(prompt) + limit}"
        raise ContextExceeded("max_tokens", f"{total}; the model's context is {model.context}")
    seed = draw_seed() if fields.seed is None else fields.seed
    params = _params(fields, model.tokenizer, limit, seed)
    check_window(fields.window)
    documents = document_tokens(fields.documents, model)
    check_known(params, model.vocab_size)
    if params.grammar is not None:
        _check_grammar(params.grammar, model, trusted)
    samples = [replace(params, seed=derive_seed(seed, sample)) for sample in range(fields.n)]
    return [
        GenerationRequest(
            f"{request_id}-{sample}", prompt, params, salt=salt, window=fields.window, documents=documents
        )
        for sample, params in enumerate(samples)
    ]


def _params(fields: GenerationFields, tokenizer: PreTrainedTokenizerFast, max_tokens: int, seed: int) -> SamplingParams:
    short = all(len(stop) <= MAX_STOP_CHARACTERS for stop in fields.stop)
    require(short, "stop", f"at most {MAX_STOP_CHARACTERS} characters each")
    short = all(len(word) <= MAX_WORD_CHARACTERS for word in fields.bad_words)
    require(short and len(fields.bad_words) <= MAX_WORDS, "bad_words", f"at most {MAX_WORDS} short ones")
    require(all(fields.bad_words), "bad_words", "words must not be empty")
    _check_encodable("bad_words", *fields.bad_words)
    _check_encodable("stop", *fields.stop)
    return SamplingParams(
        fields.temperature,
        fields.top_k,
        fields.top_p,
        fields.min_p,
        seed,
        max_tokens,
        fields.stop,
        fields.stop_token_ids,
        fields.ignore_eos,
        fields.min_tokens,
        fields.repetition_penalty,
        fields.presence_penalty,
        fields.frequency_penalty,
        tuple(fields.logit_bias.items()),
        word_tokens(tokenizer, fields.bad_words),
        fields.grammar,
        fields.logprobs,
    )


def _check_grammar(grammar: Grammar, model: TextModel, trusted: bool) -> None:
    """Raises InvalidRequest for a grammar that can't be used, or that nothing can follow."""
    if not trusted:
        require(grammar.kind in ("json_object", "json_schema"), "grammar", f"{grammar.kind} is not taken from clients")
    if grammar.kind == "json_schema":
        check_schema(grammar.text)
    state = GrammarState(model.vocabulary.compile(grammar), set(), model.vocab_size)
    logits = torch.zeros(1, model.vocab_size)
    state.mask(logits, [()])
    require(bool((logits > -torch.inf).any()), "grammar", "nothing can follow it")
