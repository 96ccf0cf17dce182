"""Plain and sequential decoding in one process, to compare with: as an actor like the pipelined target, or as a process."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

from cluster.placement import Placement
from cluster.warm import warm_up
from engine.automatic import taking_turns
from engine.budget import CostModel
from engine.decode import Generation, Speculation, decode_steps, record
from engine.drafters.model import Growing, ModelDrafter
from engine.runner import Dtype, ModelRunner
from engine.tree import Moved
from engine.types import GenerationRequest
from engine.windows import FixedChain


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation and how long its decoding took."""

    generation: Generation
    seconds: float  # of the steps that decoded, drafting included, the target's prefill excluded
    tokens: int  # committed in these
    steps: int  # of the target, in these
    drafting_s: float = 0.0  # of `seconds`: the target had nothing to do; not counted of the automatic choice
    arrivals: tuple[
        tuple[float, int], ...
    ] = ()  # seconds since the call, prefill included; tokens that were there then


class _TimedDrafter(ModelDrafter):
    """Counts the seconds that the target spends waiting for it."""

    spent_s = 0.0

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        started = time.monotonic()
        moved = super().commit(session, tokens)
        self.spent_s += time.monotonic() - started
        return moved

    def grow(self) -> list[int]:
        started = time.monotonic()
        grown = super().grow()
        self.spent_s += time.monotonic() - started
        return grown


class SequentialActor:
    """One process, one placement, target and draft taking turns: draft tokens, then a target step.

    target: its runner. automatic: the speculation that users get without choosing; it goes on learning from request to
    request.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        dtype: Dtype,
        placement: Placement,
        invariant: bool = False,
        compile: bool = False,
    ) -> None:
        placement.apply_to_thread()
        self.target = ModelRunner(target, dtype=dtype, device=placement.device, invariant=invariant, compile=compile)
        self._draft = ModelRunner(draft, dtype=dtype, device=placement.device, compile=compile, weights="auto")
        self._cost = CostModel(self.target.called_with)
        warm_up(self.target, self._cost)
        self._draft_cost = CostModel()
        warm_up(self._draft, self._draft_cost)
        self._drafters = {
            lookup: _TimedDrafter(self._draft, Growing(rows=1, children=1, lookup=lookup)) for lookup in (0, 8)
        }

    @cached_property
    def automatic(self) -> Speculation:
        """See the class."""
        return taking_turns(self._draft, self._cost, float(self._draft_cost.table(1)[1]))

    def run(self, request: GenerationRequest, k: int | None, margins: bool = False, lookup: int = 0) -> Timed:
        """Decodes one request with chains of k draft tokens; 0: plain decoding, None: what users get without choosing.

        lookup: 0 or 8, beside a chain's draft; see Growing.
        """
        drafter = self._drafters[lookup]
        chain = Speculation(drafter, FixedChain(k), k) if k else None
        speculation = self.automatic if k is None else chain
        generation = Generation(request)
        seconds, drafted_s, tokens, steps = 0.0, drafter.spent_s, 0, 0
        arrivals: list[tuple[float, int]] = []
        started = mark = time.monotonic()
        for _, outcome in decode_steps(self.target, [request], speculation, margins=margins):
            now = time.monotonic()
            if outcome.decoded:
                seconds += now - mark
                tokens += len(outcome.tokens)
                steps += 1
            else:
                drafted_s = drafter.spent_s
            mark = now
            if outcome.tokens:
                arrivals.append((now - started, len(outcome.tokens)))
            record(generation, outcome)
        return Timed(generation, seconds, tokens, steps, drafter.spent_s - drafted_s, tuple(arrivals))


class SequentialProcess:
    """The same in a process of its own; a context manager that ends it.

    Without Ray: what belongs to an actor takes half a percent of a core while it does nothing, which who compares two cores
    with one would find with the two.
    """

    def __init__(self, target: Path, draft: Path, dtype: Dtype, where: Placement, invariant: bool = False) -> None:
        """Begins to load the models; `run` waits for them."""
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _load, (target, draft, dtype, where, invariant)
        )
        with patch.dict(os.environ, OMP_NUM_THREADS=str(where.threads)):  # it is started now, and inherits them
            self._pool.submit(os.getpid)

    def run(self, request: GenerationRequest, k: int | None, lookup: int = 0) -> Timed:
        """See SequentialActor.run. Raises BrokenExecutor when the models can't be loaded or the process died."""
        return self._pool.submit(_run, request, k, lookup).result()

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "SequentialProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_held: list[SequentialActor] = []  # in that process, the one


def _load(target: Path, draft: Path, dtype: Dtype, where: Placement, invariant: bool) -> None:
    _held.append(SequentialActor(target, draft, dtype, where, invariant))


def _run(request: GenerationRequest, k: int | None, lookup: int) -> Timed:
    return _held[0].run(request, k, lookup=lookup)
