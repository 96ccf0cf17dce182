"""`paceline simulate`: plain, sequential and pipelined decoding on a virtual clock, and how many drafts a fleet needs."""

import json
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType

from cluster.simulation.costs import Costs, parse_times
from cluster.simulation.fleet import Fleet
from cluster.simulation.measured import check, load_measured, measured_plan
from cluster.simulation.plan import Plan, Source, Values, compare, drafts_needed, drawn, recorded
from cluster.simulation.script import FOLLOWING, Acceptance
from cluster.simulation.target import Limits
from deployments.simulate_preset import assumptions, predict, preset_table
from deployments.simulate_view import check_table, fleet_table, mode_table
from engine.drafters.model import Growing
from engine.step import MAX_WINDOW
from engine.types import InvalidRequest, require

LOOKUP = 8  # tokens, of recorded texts; drawn ones never repeat themselves
_DRAFT_MS = "1.3"
_GUESSES = ("acceptance", "following", "spread")
_RUNS = ("targets", "drafts", "streams", "rate", "chains", "window", "rows", "tree_nodes", "told", "fleet")
_NOTHING_BESIDE = {  # options that would do nothing, by the one beside which they would
    "preset": (
        *("target_ms", "draft_ms", "overhead_ms", "latency_ms", "measured"),
        *(*_GUESSES, "profile", "temperature", *_RUNS),
    ),
    "measured": ("target_ms", "overhead_ms", "temperature", *_RUNS),
    "profile": (*_GUESSES, "prompt_tokens", "output_tokens"),
    "rate": ("streams",),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Of the command, which says what they mean."""

    target_ms: str
    draft_ms: str | None
    overhead_ms: float
    latency_ms: float
    measured: Path | None
    acceptance: float
    following: str | None
    spread: float
    profile: Path | None
    temperature: str
    targets: int
    drafts: int
    streams: int
    rate: float | None
    requests: int | None
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    chains: str
    window: int
    rows: int
    tree_nodes: int
    told: int
    fleet: str
    preset: str | None
    seed: int

    def source(self, temperature: str) -> Source:
        """The requests; raises OSError, InvalidRequest."""
        if self.profile is not None:
            return recorded(self.profile, temperature)
        following = FOLLOWING if self.following is None else tuple(_floats(self.following, "following"))
        guesses = Acceptance(self.acceptance, following, self.spread)
        return drawn(guesses, self.prompt_tokens, self.output_tokens, self.seed)

    def plan(self) -> Plan:
        """What to simulate; raises OSError, InvalidRequest."""
        costs = Costs(
            parse_times(self.target_ms, "target_ms"),
            parse_times(_DRAFT_MS if self.draft_ms is None else self.draft_ms, "draft_ms"),
            self.overhead_ms,
            self.latency_ms,
        )
        lookup = 0 if self.profile is None else LOOKUP
        described = Fleet(
            costs,
            targets=self.targets,
            drafts=self.drafts,
            streams=self.streams,
            rate=self.rate,
            growing=Growing(rows=self.rows, max_nodes=self.tree_nodes, lookup=lookup),
            window_size=self.window,
            lookup=lookup,
            most_told=self.told,
            limits=Limits(kv_tokens=self.kv_tokens, mirror_nodes=self.tree_nodes),
            seed=self.seed,
        )
        chains = _counts(self.chains, "chains", MAX_WINDOW)
        require(bool(chains), "chains", "must not be empty")
        requests = self.requests or (4 * self.streams if self.rate is None else 64)
        return Plan(described, self.source(f"T{self.temperature}"), requests, chains)


def check_given(given: Set[str]) -> None:
    """Of the options in a command line: raises InvalidRequest for one that would do nothing there."""
    for option, others in _NOTHING_BESIDE.items():
        for name in others:
            require(option not in given or name not in given, name, f"does nothing beside --{option}")
    require("temperature" not in given or "profile" in given, "temperature", "does nothing without --profile")


def run(options: Options, console: Console, json_file: Path | None) -> None:
    """Simulates and prints; raises OSError, InvalidRequest."""
    if options.preset is not None:
        values, parts = _preset(options)
    elif options.measured is not None:
        values, parts = _measured(options, options.measured)
    else:
        values, parts = _plan(options)
    for part in parts:
        console.print(part)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(values, indent=1) + "\n")


def _preset(options: Options) -> tuple[Values, list[RenderableType]]:
    limits = Limits(kv_tokens=options.kv_tokens)
    rows = predict(options.requests or 12, options.prompt_tokens, options.output_tokens, options.seed, limits)
    return {"preset": rows, "assumptions": assumptions()}, [preset_table(rows), assumptions()]


def _measured(options: Options, path: Path) -> tuple[Values, list[RenderableType]]:
    draft = None if options.draft_ms is None else parse_times(options.draft_ms, "draft_ms")
    checked: Values = {}
    costs = Costs(parse_times("1", ""), parse_times("1", ""), latency_ms=options.latency_ms)
    fleet = Fleet(costs, limits=Limits(kv_tokens=options.kv_tokens), seed=options.seed)
    for name, values in load_measured(path).items():
        plan = measured_plan(values, options.source(name), fleet, options.requests or 8, draft)
        checked[name] = check(plan, values)
    return checked, [check_table(name, rows) for name, rows in checked.items()]


def _plan(options: Options) -> tuple[Values, list[RenderableType]]:
    plan, fleets = options.plan(), _counts(options.fleet, "fleet", 64)
    modes = compare(plan)
    needs = drafts_needed(plan, fleets) if fleets else []
    return {"modes": modes, "fleet": needs}, [mode_table(modes), *([fleet_table(needs)] if needs else [])]


def _counts(text: str, name: str, most: int) -> list[int]:
    """`1,2,4` in order; raises InvalidRequest."""
    numbers = _floats(text, name) if text.strip() else []
    good = all(number in range(1, most + 1) for number in numbers)
    require(good, name, f"must be whole numbers between 1 and {most}")
    return sorted({int(number) for number in numbers})


def _floats(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(name, f"{text!r} is no list of numbers") from None
