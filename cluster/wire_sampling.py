"""Sampling parameters on the wire: the part that shapes the choice of a token. Limits and stop strings do not cross."""

from collections.abc import Iterable
from itertools import islice
from typing import cast

from cluster.pb import draft_pb2 as pb
from engine.types import MAX_BAD_TOKENS, MAX_STOP_TOKENS, Grammar, GrammarKind, SamplingParams

_MAX_TOP_K = 2**32 - 1  # what the field holds; more is no limit either


class WireError(ValueError):
    """Bytes that are not a well-formed message, or a message that no bytes may carry."""


def require(condition: bool, message: str) -> None:
    """Raises WireError unless `condition` holds."""
    if not condition:
        raise WireError(message)


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """Raises ValueError for a number that its field cannot hold."""
    grammar = params.grammar
    return pb.Sampling(
        temperature=params.temperature,
        top_k=min(params.top_k, _MAX_TOP_K),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_tokens=[token for token, _ in params.logit_bias],
        biases=[bias for _, bias in params.logit_bias],
        min_tokens=params.min_tokens,
        stop_tokens=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        bad_words=[token for word in params.bad_words for token in word],
        bad_word_lengths=[len(word) for word in params.bad_words],
        grammar=None if grammar is None else pb.Grammar(kind=grammar.kind, text=grammar.text),
    )


def decode_sampling(sampling: pb.Sampling) -> SamplingParams:
    """Raises WireError for what no target would send."""
    require(len(sampling.stop_tokens) <= MAX_STOP_TOKENS, f"over {MAX_STOP_TOKENS} stop tokens")
    require(len(sampling.bad_words) <= MAX_BAD_TOKENS, f"bad words of over {MAX_BAD_TOKENS} tokens")
    require(len(sampling.bias_tokens) == len(sampling.biases), "as many biases as tokens are needed")
    require(sum(sampling.bad_word_lengths) == len(sampling.bad_words), "the lengths do not add up to the bad words")
    try:
        grammar = None
        if sampling.HasField("grammar"):
            grammar = Grammar(cast(GrammarKind, sampling.grammar.kind), sampling.grammar.text)
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=max(SamplingParams().max_tokens, sampling.min_tokens),  # does not cross
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(zip(sampling.bias_tokens, sampling.biases, strict=True)),
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_tokens),
            ignore_eos=sampling.ignore_eos,
            bad_words=tuple(_runs(sampling.bad_words, sampling.bad_word_lengths)),
            grammar=grammar,
        )
    except ValueError as error:
        raise WireError(str(error)) from error


def _runs(values: Iterable[int], lengths: Iterable[int]) -> Iterable[tuple[int, ...]]:
    """The values in consecutive runs of these lengths."""
    rest = iter(values)
    return [tuple(islice(rest, length)) for length in lengths]
