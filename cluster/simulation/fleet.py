"""Targets, drafts and their load on one virtual clock; what comes of it."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from cluster.draft_state import MOST_TOLD
from cluster.intake import Overloaded
from cluster.simulation.clock import Clock
from cluster.simulation.costs import Costs
from cluster.simulation.draft import SimulatedDraft
from cluster.simulation.script import Script, ScriptedDrafter
from cluster.simulation.target import Limits, SimulatedTarget, Turns
from cluster.target_stats import TargetStats
from engine.budget import Calibration, GoodputWindow, Window
from engine.drafters import Drafter
from engine.drafters.model import Growing
from engine.step import MAX_WINDOW
from engine.types import InvalidRequest, TokenChunk, require
from engine.windows import FixedChain

Mode = Literal["plain", "sequential", "pipelined"]
MakeDrafter = Callable[[Growing], Drafter]


@dataclass(frozen=True)
class Fleet:
    """What runs, and what is asked of it."""

    costs: Costs
    mode: Mode = "pipelined"
    chain: int = 3  # draft tokens per step of sequential speculation
    targets: int = 1
    drafts: int = 1  # shared by all targets; of pipelined ones
    streams: int = 1  # per target, each beginning its next request when one ends
    rate: float | None = None  # requests per second and target, at random times; replaces streams
    growing: Growing = field(default_factory=lambda: Growing(lookup=0))
    window_size: int = 31  # draft tokens per step at most
    lookup: int = 0  # tokens that targets look up by themselves
    most_told: int = MOST_TOLD  # nodes of a session that a target hears of
    limits: Limits = field(default_factory=Limits)
    patient: bool = True  # misses may wait for growth
    warm: int = 0  # requests after whose end counting begins
    seed: int = 0  # of wrong guesses, and of the times at which requests come


@dataclass
class Answer:
    """What a client saw of one request; times in milliseconds."""

    arrived: float
    times: list[float] = field(default_factory=list)  # of chunks
    sizes: list[int] = field(default_factory=list)  # in tokens

    @property
    def first_ms(self) -> float:
        """Time to first token."""
        return self.times[0] - self.arrived

    @property
    def tps(self) -> float:
        """Tokens per second after the first chunk; not a number where there is no other."""
        seconds = (self.times[-1] - self.times[0]) / 1000
        return sum(self.sizes[1:]) / seconds if seconds else float("nan")

    def gaps(self) -> list[float]:
        """Inter-token latencies: a chunk's tokens share the time since the chunk before."""
        between = np.diff(self.times) / np.asarray(self.sizes[1:])
        return [float(gap) for gap, size in zip(between, self.sizes[1:], strict=True) for _ in range(size)]


@dataclass
class Outcome:
    """What a fleet did."""

    stats: TargetStats  # of all targets together
    answers: list[Answer]
    seconds: float
    draft_steps: int
    draft_busy: float  # share of the time that a draft is in a step
    growths: int  # messages
    grown: int  # nodes in them

    @property
    def tps(self) -> float:
        """Tokens per second, of everybody together."""
        return self.stats.tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """By the names of docs/ARCHITECTURE.md, None for what too few chunks say. Per stream: the median of requests."""
        stats, steps = self.stats, max(1, self.stats.sequence_steps)
        gaps = [gap for answer in self.answers for gap in answer.gaps()]
        first = [answer.first_ms for answer in self.answers]
        active = max(stats.active_s, 1e-9)
        return {
            "tps": _rounded(self.tps, 1),
            "tps_per_stream": _percentile([answer.tps for answer in self.answers], 50, 1),
            "decoding_tps": _rounded(stats.decoded / active, 1),
            "tokens_per_step": _rounded(stats.decoded / steps, 3),
            "acceptance": _rounded(stats.accepted / max(1, stats.tried), 3),
            "verified_per_step": _rounded(stats.verified / steps, 2),
            "hit_rate": _rounded(stats.hits / steps, 3),
            "empty_step_share": _rounded(stats.empty / steps, 3),
            "target_idle": _rounded(1 - stats.forward_s / active, 3),
            "target_wait": _rounded(stats.wait_s / active, 3),
            "target_step_ms": _rounded(1000 * stats.forward_s / max(1, stats.steps), 2),
            "draft_busy": _rounded(self.draft_busy, 3),
            "draft_steps_per_step": _rounded(self.draft_steps / steps, 2),
            "growths_per_step": _rounded(self.growths / steps, 2),
            "nodes_per_step": _rounded(self.grown / steps, 1),
            **{f"ttft_ms_p{p}": _percentile(first, p, 1) for p in (50, 99)},
            **{f"itl_ms_p{p}": _percentile(gaps, p, 2) for p in (50, 99)},
        }


def _rounded(value: float, digits: int) -> float:
    return round(float(value), digits)


def _percentile(values: Sequence[float], percent: float, digits: int) -> float | None:
    """Of the values that are numbers; None if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return _rounded(float(np.percentile(known, percent)), digits) if known else None


def simulate(fleet: Fleet, scripts: Sequence[Script], make_drafter: MakeDrafter | None = None) -> Outcome:
    """Serves all scripts, in this order; make_drafter: of each draft, if not one that reads the scripts off.

    Raises InvalidRequest when a script doesn't fit in a target, when more of them wait than a target lets wait, or when
    none is left to be counted.
    """
    needed = max((len(script.request.prompt) + len(script.output) for script in scripts), default=0) + MAX_WINDOW + 1
    require(needed <= fleet.limits.kv_tokens, "kv_tokens", f"one request needs {needed}")
    try:
        return _Run(
            fleet, scripts, make_drafter or (lambda growing: ScriptedDrafter(scripts, growing, fleet.seed))
        ).outcome()
    except Overloaded as error:
        name = "streams" if fleet.rate is None else "rate"
        raise InvalidRequest(name, f"too many for these targets: {error}") from None


class _Run:
    def __init__(self, fleet: Fleet, scripts: Sequence[Script], make_drafter: MakeDrafter) -> None:
        self._fleet = fleet
        self._clock = Clock()
        self._make_drafter = make_drafter
        self._waiting = deque(scripts)
        self._answers: dict[str, Answer] = {}
        self._finished = 0
        self._counting_from = 0.0
        count = fleet.drafts if fleet.mode == "pipelined" else 0
        self._drafts = [self._draft() for _ in range(count)]
        self._targets = [self._target(index) for index in range(fleet.targets)]

    def _draft(self) -> SimulatedDraft:
        growing = self._fleet.growing
        return SimulatedDraft(
            self._clock, self._make_drafter(growing), growing, self._fleet.costs, self._fleet.most_told
        )

    def _target(self, index: int) -> SimulatedTarget:
        fleet, costs, turns = self._fleet, self._fleet.costs, None
        window: Window = GoodputWindow(Calibration(), costs.target, fleet.window_size)
        if fleet.mode == "sequential":
            chain = replace(fleet.growing, rows=fleet.limits.max_batch, children=1, max_depth=fleet.chain, lookup=0)
            turns, window = Turns(self._make_drafter(chain), fleet.chain), FixedChain(fleet.chain)
        if fleet.mode != "pipelined":
            costs = replace(costs, overhead_ms=0.0)
        lookup = fleet.lookup if fleet.mode == "pipelined" else 0
        target = SimulatedTarget(self._clock, costs, window, fleet.limits, index, lookup, turns, fleet.patient)
        for draft in self._drafts:
            _join(target, draft)
        return target

    def outcome(self) -> Outcome:
        """Runs everything."""
        if self._fleet.rate is None:
            for _ in range(min(len(self._waiting), self._fleet.targets * self._fleet.streams)):
                self._next()
        else:
            random, when = np.random.default_rng(self._fleet.seed), 0.0
            for _ in range(len(self._waiting)):
                when += random.exponential(1000 / (self._fleet.rate * self._fleet.targets))
                self._clock.after(when, self._next)
        self._clock.run()
        counted = [answer for answer in self._answers.values() if answer.arrived >= self._counting_from]
        require(bool(counted), "requests", f"none begins behind the {self._fleet.warm} that warm up")
        since, until = self._counting_from, max(answer.times[-1] for answer in counted)
        milliseconds = until - since
        busy = sum(draft.busy_ms(since, until) for draft in self._drafts)
        return Outcome(
            _sum([target.stats for target in self._targets]),
            counted,
            milliseconds / 1000,
            sum(draft.steps for draft in self._drafts),
            busy / (milliseconds * max(1, len(self._drafts))),
            sum(draft.messages for draft in self._drafts),
            sum(draft.nodes for draft in self._drafts),
        )

    def _next(self) -> None:
        """The next request comes, if there is one, and goes to the target that has the fewest."""
        if not self._waiting:
            return
        script = self._waiting.popleft()
        self._answers[script.request.request_id] = Answer(self._clock.now)
        min(self._targets, key=lambda target: target.load).submit(script, self._receive)

    def _receive(self, chunk: TokenChunk) -> None:
        answer = self._answers[chunk.request_id]
        answer.times.append(self._clock.now)
        answer.sizes.append(len(chunk.tokens))
        if chunk.finish_reason is not None:
            self._finished += 1
            if self._finished == self._fleet.warm:
                self._clock.after(0.0, self._count_anew)
            elif self._fleet.rate is None:
                self._clock.after(0.0, self._next)

    def _count_anew(self) -> None:
        """What came before only taught the policies."""
        self._counting_from = self._clock.now
        for target in self._targets:
            target.stats = TargetStats()
        for draft in self._drafts:
            draft.steps = draft.messages = draft.nodes = 0
        if self._fleet.rate is None:
            self._next()


def _join(target: SimulatedTarget, draft: SimulatedDraft) -> None:
    """Both ends of a link need the other's way in."""
    arriving: list[Callable[..., None]] = []
    send = draft.connect(lambda growths: arriving[0](growths))
    arriving.append(target.add_draft(send))


def _sum(parts: Sequence[TargetStats]) -> TargetStats:
    names = [each.name for each in fields(TargetStats) if each.name not in ("link", "places")]
    return TargetStats(**{name: sum(getattr(part, name) for part in parts) for name in names})
