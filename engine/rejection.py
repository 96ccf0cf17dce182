"""The classical verifier, to compare with: speculative sampling by rejection, in one process, along a chain.

A draft token x is accepted with probability min(1, p(x)/q(x)); the first refused one is replaced by a draw from the residual
max(0, p - q). The output has the target's distribution (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al.
2023, https://arxiv.org/abs/2302.01318), but which tokens come depends on the draft: it stays outside the promise that the
coupled rule keeps. It needs the draft's probabilities, where the coupled rule needs its tokens only.
"""

from collections.abc import Sequence as Seq
from contextlib import ExitStack

import torch

from engine import noise, sampling
from engine.attention import chain_rows
from engine.decode import Generation
from engine.grammar import Vocabulary
from engine.processors import Processors, make_processors
from engine.runner import ModelRunner
from engine.step import NOTHING_ALLOWED, Sequence, StepError, end_tokens
from engine.types import GenerationRequest, SamplingParams

_DRAFT, _COIN, _OWN = 1, 2, 3  # which of a request's independent streams of noise
_NONE = -1  # the target's own token where none is allowed


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What tokens are drawn from, float64 [n, vocab_size]; all on one token when greedy. logits: processed, same shape.

    Rows where no token is allowed, or that are no numbers, are all 0.
    """
    possible = logits.amax(-1, keepdim=True) > -torch.inf
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double() * possible
    shares = sampling.restrict(logits.float() / params.temperature, params).double().softmax(-1)
    return shares.masked_fill(~possible, 0.0)


def draw(weights: torch.Tensor, seed: int, position: int, stream: int) -> int:
    """A token with a probability in proportion to its weight. weights: [vocab_size], not all 0."""
    return int((weights.log() + _gumbel(seed, position, stream, len(weights))).argmax())


def verify(target: torch.Tensor, draft: torch.Tensor, drafted: Seq[int], seed: int, position: int) -> list[int]:
    """The accepted draft tokens and the target's own next one, or _NONE; the first is the output's at `position`.

    target: probabilities [k + 1, vocab_size]; draft: [k, vocab_size], those that the k drafted tokens were drawn from.
    """
    for index, token in enumerate(drafted):
        here = position + index
        coin = float(torch.exp(-torch.exp(-_gumbel(seed, here, _COIN, 1))))  # uniform in (0, 1)
        if coin * float(draft[index, token]) >= float(target[index, token]):
            residual = (target[index] - draft[index]).clamp_(min=0.0)
            return [*drafted[:index], draw(residual, seed, here, _OWN) if target[index].any() else _NONE]
    return [*drafted, draw(target[-1], seed, position + len(drafted), _OWN) if target[-1].any() else _NONE]


def _gumbel(seed: int, position: int, stream: int, size: int) -> torch.Tensor:
    """Noise that is independent by position and stream: float64 [size]."""
    key = noise.keys(noise.derive_seed(seed, stream), [position])
    return noise.gumbel(key, torch.arange(size)).double()


def decode(
    target: ModelRunner,
    draft: ModelRunner,
    request: GenerationRequest,
    window: int,
    vocabulary: Vocabulary | None = None,
) -> Generation:
    """Generates one request, `window` draft tokens a step. Raises InvalidRequest, PoolExhausted or StepError."""
    generation = Generation(request)
    with ExitStack() as leases:
        sequence = Sequence(request, target, vocabulary)
        leases.callback(target.pool.release, sequence.lease)
        drafter = _Drafter(draft, request, sequence.limit + window, vocabulary)
        leases.callback(draft.pool.release, drafter.lease)
        while sequence.finish_reason is None:
            _step(target, sequence, drafter, window, generation)
    generation.finish_reason, generation.error = sequence.finish_reason, sequence.error
    return generation


def _step(target: ModelRunner, sequence: Sequence, drafter: "_Drafter", window: int, generation: Generation) -> None:
    params, position = sequence.request.params, len(sequence.tokens)
    drafted, guessed = drafter.draft(sequence.tokens, window)
    pending = [*sequence.tokens[sequence.computed :], *drafted]
    first = len(pending) - len(drafted) - 1
    logits = target.forward([chain_rows(sequence.lease, sequence.computed, pending, first)])
    if not torch.isfinite(logits.sum()):
        target.pool.wipe(sequence.lease, sequence.computed)
        raise StepError(sequence.request.request_id)
    if sequence.processors is not None:
        logits = sequence.processors.apply(logits, [drafted[:n] for n in range(len(drafted) + 1)])
    tokens = verify(probabilities(logits, params), guessed, drafted, params.seed, position)
    taken = sequence.append([token for token in tokens if token != _NONE])
    if tokens[-1] == _NONE and sequence.finish_reason is None:
        sequence.fail(NOTHING_ALLOWED)
    sequence.computed = len(sequence.tokens) - 1
    drafter.commit(taken)
    generation.tokens += taken
    generation.steps += 1
    generation.accepted += (accepted := min(len(tokens) - 1, len(taken)))
    generation.tried += accepted + (accepted < min(len(taken), len(drafted)))


class _Drafter:
    """Draws chains from the draft model, with their probabilities."""

    def __init__(
        self, runner: ModelRunner, request: GenerationRequest, tokens: int, vocabulary: Vocabulary | None
    ) -> None:
        self._runner = runner
        self._params = params = request.params
        ends, prompt = end_tokens(params, runner, vocabulary), len(request.prompt)
        known = [*request.prompt, *request.resume_tokens]
        self._processors: Processors | None = make_processors(
            params, known, prompt, ends, runner.vocab_size, vocabulary
        )
        self._computed = 0
        self.lease = runner.pool.lease(tokens)

    def draft(self, tokens: Seq[int], count: int) -> tuple[list[int], torch.Tensor]:
        """`count` tokens behind `tokens`, fewer where none may come, and the probabilities that each was drawn from.

        These are float64 [drafted, vocab_size].
        """
        drafted: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(count):
            pending = [*tokens, *drafted][self._computed :]
            logits = self._runner.forward([chain_rows(self.lease, self._computed, pending)])
            self._computed += len(pending)
            if self._processors is not None:
                logits = self._processors.apply(logits, [drafted])
            chances = probabilities(logits, self._params)[0]
            if not chances.any():
                break
            rows.append(chances)
            drafted.append(draw(chances, self._params.seed, len(tokens) + len(drafted), _DRAFT))
        self._computed = min(self._computed, len(tokens))  # what may be refused is computed again
        return drafted, torch.stack(rows) if rows else torch.zeros(0)

    def commit(self, tokens: Seq[int]) -> None:
        """Takes committed tokens."""
        if self._processors is not None:
            self._processors.extend(tokens)
