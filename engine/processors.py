"""What changes a request's logits before a token is chosen: a grammar, bad words, biases, a minimum length, penalties.

They apply at every node of a token tree as they would at the end of the text that leads there: each row of logits comes
with its path, the tokens between the committed text and the row. Target and draft apply the same ones,
in vLLM's order.
"""

from collections.abc import Sequence

import torch

from engine.grammar import GrammarState, Vocabulary
from engine.types import InvalidRequest, SamplingParams

Paths = Sequence[Sequence[int]]
_PLAIN = SamplingParams()


class Processors:
    """The processors of one request, with the committed tokens that they depend on."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: set[int],
        vocab_size: int,
        vocabulary: Vocabulary | None,
    ) -> None:
        """ends: the tokens that end the output. Raises InvalidRequest."""
        self._params = params
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._output: list[int] = []
        self._penalties = _Penalties(params, prompt) if _has_penalties(params) else None
        self._bad = _BadWords(params.bad_words) if params.bad_words else None
        self._biased = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._grammar = _grammar_state(params, ends, vocab_size, vocabulary)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes committed output tokens."""
        self._output.extend(tokens)
        if self._penalties is not None:
            self._penalties.extend(tokens)
        if self._grammar is not None:
            self._grammar.extend(tokens)

    def apply(self, logits: torch.Tensor, paths: Paths) -> torch.Tensor:
        """The processed logits, float32 [n, vocab_size], -inf for what may not come.

        logits: [n, vocab_size]; paths: for each row the tokens behind the committed ones.
        """
        logits = logits.to(torch.float32, copy=True)
        if self._grammar is not None:
            self._grammar.mask(logits, paths)
        if self._bad is not None:
            self._bad.mask(logits, self._output, paths)
        if len(self._biased):
            logits[:, self._biased] += self._biases.to(logits.device)
        for row, path in enumerate(paths):
            if len(self._output) + len(path) < self._params.min_tokens:
                logits[row, self._ends] = -torch.inf
        if self._penalties is not None:
            self._penalties.apply(logits, paths)
        return logits


class _BadWords:
    """Words that may not come, found by the tokens before their last one: a row looks up each length, not each word."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: as tokens, none of them empty."""
        self._never = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.int64)
        self._behind: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if len(word) > 1:
                self._behind.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(start) for start in self._behind})

    def mask(self, logits: torch.Tensor, output: Sequence[int], paths: Paths) -> None:
        """-inf in place for the tokens that would complete a word; see Processors.apply."""
        if len(self._never):
            logits[:, self._never] = -torch.inf
        if not self._lengths:
            return
        end = output[-self._lengths[-1] :]
        for row, path in enumerate(paths):
            tail = (*end, *path)
            for length in self._lengths:
                if length <= len(tail) and (bad := self._behind.get(tail[len(tail) - length :])):
                    logits[row, bad] = -torch.inf


class _Penalties:
    """Repetition (Keskar et al. 2019, https://arxiv.org/abs/1909.05858), presence and frequency penalties.

    Only tokens of prompt and output have any, so only their columns are touched.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._column: dict[int, int] = {}
        self._tokens = torch.zeros(0, dtype=torch.int64)  # of each column
        self._counts = torch.zeros(0)  # in the output
        self._count(prompt, 0.0)
        self._in_prompt = len(self._column)  # the first columns

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes committed output tokens."""
        self._count(tokens, 1.0)

    def _count(self, tokens: Sequence[int], weight: float) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._column]
        self._column.update(zip(new, range(len(self._column), len(self._column) + len(new)), strict=True))
        self._tokens = torch.cat([self._tokens, torch.tensor(new, dtype=torch.int64)])
        self._counts = torch.cat([self._counts, torch.zeros(len(new))])
        columns = torch.tensor([self._column[token] for token in tokens], dtype=torch.int64)
        self._counts.index_add_(0, columns, torch.full((len(tokens),), weight))

    def apply(self, logits: torch.Tensor, paths: Paths) -> None:
        """In place; see Processors.apply."""
        params, device = self._params, logits.device
        new = [token for token in dict.fromkeys(token for path in paths for token in path) if token not in self._column]
        behind = {token: len(self._column) + index for index, token in enumerate(new)}
        tokens = torch.cat([self._tokens, torch.tensor(new, dtype=torch.int64)]).to(device)
        counts = torch.cat([self._counts, torch.zeros(len(new))]).repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, behind[token] if token in behind else self._column[token]] += 1
        counts = counts.to(device)
        seen = counts > 0
        values = logits[:, tokens]
        known = seen.clone()
        known[:, : self._in_prompt] = True
        repetition = params.repetition_penalty
        values = torch.where(known, torch.where(values > 0, values / repetition, values * repetition), values)
        values = values - counts * params.frequency_penalty
        logits[:, tokens] = values - seen * params.presence_penalty


def make_processors(
    params: SamplingParams,
    tokens: Sequence[int],
    prompt: int,
    ends: set[int],
    vocab_size: int,
    vocabulary: Vocabulary | None,
) -> Processors | None:
    """The processors of a request whose first `prompt` tokens are its prompt and the others its output so far.

    None when it needs none. Raises InvalidRequest for token ids beyond the vocabulary or a grammar that can't be used.
    """
    given = params.logit_bias, params.bad_words, params.min_tokens, params.grammar
    if not any(given) and not _has_penalties(params):
        return None
    check_known(params, vocab_size)
    possible = {token for token in ends if 0 <= token < vocab_size}  # a stop token may be any number
    processors = Processors(params, tokens[:prompt], possible, vocab_size, vocabulary)
    processors.extend(tokens[prompt:])
    return processors


def check_known(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest when the parameters name token ids beyond the vocabulary."""
    message = f"token ids must be below {vocab_size}"
    if any(token >= vocab_size for token, _ in params.logit_bias):
        raise InvalidRequest("logit_bias", message)
    if any(not 0 <= token < vocab_size for word in params.bad_words for token in word):
        raise InvalidRequest("bad_words", message)


def _has_penalties(params: SamplingParams) -> bool:
    return any(
        getattr(params, name) != getattr(_PLAIN, name)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )


def _grammar_state(
    params: SamplingParams, ends: set[int], vocab_size: int, vocabulary: Vocabulary | None
) -> GrammarState | None:
    if params.grammar is None:
        return None
    if vocabulary is None:
        raise InvalidRequest("grammar", "grammars need the model's tokenizer")
    return GrammarState(vocabulary.compile(params.grammar), vocabulary.ends(ends), vocab_size)
