"""One prompt to streamed text: by two actors, or in this process, one after the other or the target alone."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import ray
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from cluster.actors import TargetConfig
from cluster.drafters import DraftConfig, LocalConfig
from cluster.intake import Unsent
from cluster.local import LocalCluster
from cluster.placement import place
from cluster.target_stats import TargetStats
from cluster.warm import warm_up, warm_up_drafter, warm_up_turns
from deployments.figures import Figures
from deployments.service import GenerationFailed
from engine.automatic import taking_turns
from engine.budget import CostModel
from engine.decode import Speculation, decode_steps
from engine.runner import Dtype, ModelRunner
from engine.step import check_room
from engine.text import OutputText, load_tokenizer
from engine.types import GenerationRequest, TokenChunk

Mode = Literal["pipelined", "sequential", "plain"]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Which models run, and how."""

    target: Path
    draft: Path | None  # None in plain mode
    dtype: Dtype = "auto"
    invariant: bool = False
    local: LocalConfig = field(default_factory=LocalConfig)  # in pipelined mode


class Engine(Protocol):
    """Decodes one request after another."""

    def stream(self, request: GenerationRequest) -> Generator[TokenChunk]:
        """The chunks of a request. Closing the iterator cancels the request and frees what it held."""

    def figures(self) -> Figures:
        """Of everything decoded so far."""

    def close(self) -> None:
        """Ends whatever was started."""


def start(mode: Mode, pair: Pair, progress: Progress) -> Engine:
    """Loads what the mode needs; raises ModelError."""
    transformers_logging.disable_progress_bar()
    return TwoActors(pair, progress) if mode == "pipelined" else OneProcess(pair, progress)


class TwoActors:
    """Target and draft as two Ray actors on this machine."""

    def __init__(self, pair: Pair, progress: Progress) -> None:
        target = TargetConfig(pair.target, pair.dtype, pair.invariant, local=pair.local)
        self._cluster = LocalCluster(target, DraftConfig(pair.draft, pair.dtype), progress=progress)

    def stream(self, request: GenerationRequest) -> Generator[TokenChunk]:
        """See Engine."""
        return self._cluster.stream(request)

    def figures(self) -> Figures:
        """See Engine."""
        return Figures.between(TargetStats(), ray.get(self._cluster.targets[0].stats.remote()))

    def close(self) -> None:
        """See Engine."""
        self._cluster.close()


class OneProcess:
    """Everything in this process, placed as the two actors would be, so that invariant mode gives the same bytes."""

    def __init__(self, pair: Pair, progress: Progress) -> None:
        progress("loading the models")
        placement = place(1, 1, torch.cuda.device_count())[0][0]
        placement.apply_to_process()
        self._tokenizer = load_tokenizer(pair.target)
        room, device = TargetConfig(pair.target).kv_tokens, placement.device
        self._target = ModelRunner(
            pair.target, kv_tokens=room, dtype=pair.dtype, device=device, invariant=pair.invariant
        )
        draft = None
        if pair.draft is not None:
            room = DraftConfig(pair.draft).kv_tokens
            draft = ModelRunner(pair.draft, kv_tokens=room, dtype=pair.dtype, device=device, weights="auto")
        progress("timing the models; the first time, compiling what runs between their passes")
        cost = CostModel(self._target.called_with)
        warm_up(self._target, cost)
        self._speculation = self._timed(draft, cost) if draft is not None else None
        self._figures = Figures(0, 0.0, 0, 0, 0)

    def _timed(self, draft: ModelRunner, cost: CostModel) -> Speculation:
        draft_cost = CostModel()
        warm_up(draft, draft_cost)
        tried, speculation = (
            taking_turns(draft, cost, float(draft_cost.table(1)[1]), self._tokenizer) for _ in range(2)
        )
        warm_up_drafter(tried.drafter)
        if tried.effort is not None:
            warm_up_turns(tried.drafter, tried.effort)
        return speculation

    def stream(self, request: GenerationRequest) -> Generator[TokenChunk]:
        """See Engine. Raises InvalidRequest."""
        check_room(request, self._target)
        unsent = Unsent(request.request_id)
        mark = time.monotonic()
        for _, outcome in decode_steps(self._target, [request], self._speculation, self._tokenizer):
            now = time.monotonic()
            if outcome.tokens or outcome.sequence.finish_reason is not None:
                if outcome.decoded:
                    self._figures += Figures(len(outcome.tokens), now - mark, 1, outcome.tried, outcome.accepted)
                unsent.add(outcome.tokens, outcome.accepted, outcome.logprobs)
                yield unsent.flush(outcome.sequence.finish_reason, outcome.sequence.error)
            mark = time.monotonic()

    def figures(self) -> Figures:
        """See Engine. Idle time is not known here."""
        return self._figures

    def close(self) -> None:
        """See Engine."""


def texts(
    chunks: Iterator[TokenChunk], tokenizer: PreTrainedTokenizerFast, request: GenerationRequest
) -> Iterator[str]:
    """The text of a request's stream, piece by piece, up to the first stop string; raises GenerationFailed."""
    params = request.params
    text = OutputText(tokenizer, params.stop, params.min_tokens, request.prompt)
    for chunk in chunks:
        last = len(chunk.tokens) - 1 if chunk.finish_reason == "stop" else None
        yield "".join(text.end(token) if at == last else text.push(token) for at, token in enumerate(chunk.tokens))
        if chunk.finish_reason == "error":
            raise GenerationFailed(chunk.error)
    yield text.flush()


def print_text(
    request: GenerationRequest, pair: Pair, mode: Mode, tokenizer: PreTrainedTokenizerFast, stats: bool
) -> None:
    """Streams the text to standard output; progress and statistics go to standard error."""
    errors = Console(stderr=True, highlight=False)
    with errors.status("starting") as status:
        engine = start(mode, pair, lambda text: status.update(text))
    with closing(engine), closing(engine.stream(request)) as chunks:
        for text in texts(chunks, tokenizer, request):
            write(text)
        write("\n")
        if stats:
            errors.print(summary(engine.figures()), style="dim", soft_wrap=True)


def write(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(figures: Figures) -> str:
    """The figures in one line."""
    parts = [
        f"{figures.tokens} tokens",
        f"{figures.tokens_per_second:.1f} tokens/s",
        f"{figures.tokens_per_step:.2f} tokens per step",
    ]
    rates = {"acceptance": figures.acceptance, "hit rate": figures.hit_rate, "idle": figures.idle}
    return ", ".join(parts + [f"{name} {rate:.2f}" for name, rate in rates.items() if rate is not None])
