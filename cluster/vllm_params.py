"""Requests as vLLM takes them: its sampling parameters, what it can't do, and its log probabilities as ours."""

from typing import Any

from engine.noise import derive_seed
from engine.processors import check_known
from engine.types import GenerationRequest, InvalidRequest, SamplingParams, TokenLogprobs, check_prompt, require

_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # the name of each kind in vLLM
_MAX_TOP_K = 2**31 - 1  # what vLLM's messages hold; more is no limit either


def sampling_params(request: GenerationRequest) -> Any:
    """vllm.SamplingParams for what is left of a request; stop strings are left to the one who reads the text.

    Raises vLLM's own errors.
    """
    from vllm import SamplingParams as VllmParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import (  # type: ignore[import-not-found,unused-ignore]
        RequestOutputKind,
        StructuredOutputsParams,
    )

    params, done = request.params, len(request.resume_tokens)
    grammar = params.grammar
    structured = None
    if grammar is not None:
        given = {"json_object": True} if grammar.kind == "json_object" else {_GRAMMARS[grammar.kind]: grammar.text}
        structured = StructuredOutputsParams(**given)
    made = VllmParams(
        temperature=params.temperature,
        top_k=min(params.top_k, _MAX_TOP_K),
        top_p=params.top_p,
        min_p=params.min_p,
        # Another seed where output was resumed: with the same one, random numbers of the first tokens would come again.
        seed=derive_seed(params.seed, done) if done else params.seed,
        max_tokens=params.max_tokens - done,
        min_tokens=max(0, params.min_tokens - done),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.logprobs,
        structured_outputs=structured,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    if params.bad_words:  # vLLM's own field for them takes text
        made._bad_words_token_ids = [list(word) for word in params.bad_words]
    return made


def check_request(request: GenerationRequest, engine: Any) -> None:
    """Raises InvalidRequest for what vLLM can't run, can't with speculation, or can't go on with. engine: AsyncLLM."""
    from vllm.exceptions import VLLMClientError  # type: ignore[import-not-found,unused-ignore]

    config = engine.vllm_config
    vocab_size = int(config.model_config.get_vocab_size())
    check_prompt(request, vocab_size, int(config.model_config.max_model_len))
    params = request.params
    check_known(params, vocab_size)
    if config.speculative_config is not None:
        message = "vLLM does not take it with speculation; ask a model without a draft"
        require(not params.min_p or params.temperature == 0, "min_p", message)
        require(not params.logit_bias, "logit_bias", message)
    if request.resume_tokens:
        _check_resumable(params)
    try:
        sampling_params(request).verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, engine.get_tokenizer()
        )
    except (VLLMClientError, ValueError) as error:
        name = getattr(error, "parameter", None) or ("grammar" if params.grammar is not None else "params")
        raise InvalidRequest(str(name), " ".join(str(error).split())) from None


def _check_resumable(params: SamplingParams) -> None:
    """To vLLM the output so far is a part of the prompt, where these don't look."""
    message = "vLLM can't go on with an output that has it"
    require(params.grammar is None, "grammar", message)
    require(not params.presence_penalty, "presence_penalty", message)
    require(not params.frequency_penalty, "frequency_penalty", message)
    require(all(len(word) == 1 for word in params.bad_words), "bad_words", f"{message}, of several tokens")


def chunk_logprobs(tokens: list[int], given: Any, number: int | None) -> list[TokenLogprobs]:
    """Of each token, and of the `number` likeliest ones in its place; none if they were not asked for.

    given: for each token vLLM's mapping token id -> Logprob, of the likeliest ones and the chosen one.
    """
    if number is None:
        return []
    return [_logprobs(token, at, number) for token, at in zip(tokens, given, strict=True)]


def _logprobs(token: int, given: Any, number: int) -> TokenLogprobs:
    ranked = sorted((entry.rank, other, entry.logprob) for other, entry in given.items())[:number]
    return TokenLogprobs(given[token].logprob, tuple((other, logprob) for _, other, logprob in ranked))
