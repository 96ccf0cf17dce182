"""Plain and sequential decoding behind the same kind of actor as the pipelined target, to compare with."""

import time
from dataclasses import dataclass
from pathlib import Path

from cluster.actors import warm_up
from cluster.placement import Placement
from engine.decode import Generation, Speculation, decode_steps, record
from engine.drafters.model import Growing, ModelDrafter
from engine.runner import Dtype, ModelRunner
from engine.types import GenerationRequest
from engine.windows import FixedChain


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation and how long its decoding took."""

    generation: Generation
    seconds: float  # of the steps that committed tokens, drafting included, prefill excluded


class SequentialActor:
    """One process, one placement, target and draft taking turns: a chain of k draft tokens, then a target step."""

    def __init__(self, target: Path, draft: Path, dtype: Dtype, placement: Placement, invariant: bool = False) -> None:
        placement.apply_to_thread()
        self._target = ModelRunner(target, dtype=dtype, device=placement.device, invariant=invariant)
        self._draft = ModelRunner(draft, dtype=dtype, device=placement.device)
        for runner in (self._target, self._draft):
            warm_up(runner)
        self._drafter = ModelDrafter(self._draft, Growing(rows=1, children=1))

    def run(self, request: GenerationRequest, k: int, margins: bool = False) -> Timed:
        """Decodes one request with chains of k draft tokens; k = 0 is plain decoding."""
        speculation = Speculation(self._drafter, FixedChain(k), k) if k else None
        generation = Generation(request)
        seconds = 0.0
        mark = time.monotonic()
        for _, outcome in decode_steps(self._target, [request], speculation, margins=margins):
            now = time.monotonic()
            seconds += (now - mark) * bool(outcome.tokens)
            mark = now
            record(generation, outcome)
        return Timed(generation, seconds)
