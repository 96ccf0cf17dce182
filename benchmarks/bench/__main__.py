"""Everything against everything: transformers, vLLM and Paceline, in one run.

    make bench                     hours; all of it
    make bench QUICK=1             at most ten minutes
    python -m benchmarks.bench --sizes bundled --count 4 --names transformers,paceline-pipelined

Contenders take turns, prompt by prompt; only one computes at a time. The method is described in benchmarks/README.md. Every
row is written as soon as it is there, so a run that was stopped keeps its rows, and --resume goes on with what is missing.
"""

import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args

import ray
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.bench import many_streams, one_stream
from benchmarks.bench.checkpoints import PROMPTS, TARGET, Dtype, Pair, make_pair
from benchmarks.bench.contenders import CHAINS, VLLM, VLLM_SPECULATIVE, Environments, Notes, Place, Setup, preloaded
from benchmarks.bench.one_stream import PROBED, Best, Work
from benchmarks.bench.plot import draw
from benchmarks.bench.streams import Accounting, Limit, Row
from benchmarks.server import ROOT
from engine.text import load_tokenizer

_WIDTH = 150  # characters that a table needs, also in a file
QUICK_S = 510.0  # the last prompts, and ending everything, come on top
COLUMNS = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
console = Console(stderr=True)


@dataclass
class Results:
    """The rows, in a file that always holds all of them; and the picture."""

    path: Path
    rows: list[Row] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Written at once."""
        self.rows += rows
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def missing(self, setup: Setup, temperatures: Iterable[float], loops: Collection[str], parts: int) -> list[float]:
        """The temperatures of which an earlier run did not measure all parts; what it has of those is dropped."""
        wanted = (setup.pair.params, setup.pair.dtype, setup.place.accounting)

        def among(row: Row, temperature: float) -> bool:
            measured = (row["target_params"], row.get("dtype"), row["accounting"]) == wanted
            return measured and row["loop"] in loops and row["temperature"] == temperature

        left = []
        for temperature in temperatures:
            found = [row for row in self.rows if among(row, temperature)]
            if len({(row["loop"], row["streams"], row.get("rate")) for row in found}) < parts:
                self.rows = [row for row in self.rows if row not in found]
                left.append(temperature)
        return left


@dataclass
class Budget:
    """Time for so many parts, shared out evenly as they come; without an end, as long as they take."""

    seconds: float | None
    parts: int
    started: float = field(default_factory=time.monotonic)

    def share(self) -> float:
        """Until when the next part may take, as the monotonic clock has it."""
        now = time.monotonic()
        if self.seconds is None:
            return float("inf")
        left = max(0.0, self.started + self.seconds - now)
        part = left / max(1, self.parts)
        self.parts -= 1
        return now + part


def conditions(cores: tuple[int, ...], arguments: dict[str, object]) -> str:
    """Where and how this run was."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {model}; cores {cores}; load before {load}; {arguments}"


def report(rows: list[Row]) -> None:
    """The rows of one part."""
    names = (
        "contender",
        "tokens_per_s",
        "spread",
        "ttft_ms",
        "itl_ms_p50",
        "itl_ms_p99",
        "equal",
        "ties",
        "differing",
        "k",
    )
    first = rows[0]
    title = f"{first['target_params'] / 1e6:.0f}M, {first['accounting']}, T = {first['temperature']:g}, {first['loop']}"
    table = Table(*names, title=f"{title}, streams {first['streams']} {first.get('rate', '')}")
    for row in sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0)):
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in names))
    Console(stderr=True, width=max(_WIDTH, console.width)).print(table)


@dataclass
class Run:
    """The parts of one run: what an earlier one has done is left out."""

    env: Environments
    cores: tuple[int, ...]
    work: Work
    budget: Budget
    results: Results
    notes: Notes
    logs: Path
    progress: Progress
    best: dict[int, Best] = field(default_factory=dict)  # by parameters of the target

    def one(self, pair: Pair, kind: Accounting) -> None:
        """One stream."""
        setup = Setup(pair, Place(kind, self.cores), self.env, self.notes, self.logs)
        missing = self.results.missing(setup, self.work.temperatures, ("prompts",), 1)
        if missing:
            work, best = replace(self.work, temperatures=tuple(missing)), self._best(pair)
            self._keep(one_stream.measure(setup, work, best, self.budget.share, self.progress))

    def many(self, pair: Pair, kind: Accounting, load: many_streams.Load) -> None:
        """Closed and open loops."""
        setup = Setup(pair, Place(kind, self.cores), self.env, self.notes, self.logs)
        parts = len(load.streams) + len(load.rates)
        missing = self.results.missing(setup, self.work.temperatures, ("closed", "open"), parts)
        if missing:
            work, best = replace(self.work, temperatures=tuple(missing)), self._best(pair)
            self._keep(many_streams.measure(setup, work, load, best, self.budget.share, self.progress))

    def _best(self, pair: Pair) -> Best:
        """vLLM's draft tokens a step: tried once for each target, on one core, or known from a run that was stopped."""
        known = Best.known(self.results.rows, pair.params, pair.dtype)
        wanted = [name for name in VLLM_SPECULATIVE if self.work.wants(name)]
        if all((name, temperature) in known.vllm for name in wanted for temperature in self.work.temperatures):
            self.best.setdefault(pair.params, known)
        if pair.params not in self.best:
            setup = Setup(pair, Place("same-target-core", self.cores), self.env, self.notes, self.logs)
            if len(self.work.chains) > 1:
                console.print(f"choosing vLLM's draft tokens a step for {pair.target.name}: some minutes")
            self.best[pair.params] = one_stream.probe_vllm(setup, self.work)
        return self.best[pair.params]

    def _keep(self, parts: Iterable[list[Row]]) -> None:
        for part in parts:
            if part:
                self.results.add(part)
                report(part)


def main(
    out: Annotated[Path, typer.Option(help="folder of rows, picture and notes")] = Path("benchmarks/results"),
    name: Annotated[str, typer.Option(help="of the files; none: bench and the date")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="two targets, few prompts, 4 and 16 streams: ten minutes")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a run of this name that was stopped")] = False,
    sizes: Annotated[str, typer.Option(help="targets: bundled, or about so many parameters")] = "bundled,30M,150M",
    count: Annotated[int, typer.Option(help="prompts, warm-up included")] = 10,
    warm: Annotated[int, typer.Option(help="of them, the first ones that are not counted")] = 2,
    tokens: Annotated[int, typer.Option(help="per prompt, at most")] = 128,
    temperatures: Annotated[str, typer.Option(help="0 is greedy")] = "0,1",
    accountings: Annotated[str, typer.Option(help="same-target-core, total-cores")] = "same-target-core,total-cores",
    dtype: Annotated[Dtype, typer.Option(help="that everybody computes in")] = "float32",
    chains: Annotated[str, typer.Option(help="vLLM's draft tokens a step to choose from")] = ",".join(map(str, CHAINS)),
    streams: Annotated[str, typer.Option(help="of closed loops; empty for none")] = "1,4,16,64",
    stream_size: Annotated[str, typer.Option(help="target of closed and open loops")] = "30M",
    rounds: Annotated[int, typer.Option(help="of closed loops, one to warm up apart")] = 3,
    rates: Annotated[str, typer.Option(help="of open loops, over plain vLLM's best closed loop; empty for none")] = (
        "0.25,0.5,0.75,1,1.25"
    ),
    seconds: Annotated[float, typer.Option(help="of an open loop at one rate")] = 30.0,
    ttft_limit: Annotated[float, typer.Option(help="ms to the first token that a client puts up with")] = 1000.0,
    itl_limit: Annotated[float, typer.Option(help="ms between tokens (p99 of a stream) that it puts up with")] = 200.0,
    served: Annotated[bool, typer.Option(help="also through HTTP with one stream")] = True,
    names: Annotated[str, typer.Option(help="contenders; none: all")] = "",
    vllm: Annotated[Path, typer.Option(help="interpreter of vLLM's environment")] = ROOT / ".venv-vllm/bin/python",
    transformers: Annotated[Path, typer.Option(help="of transformers'")] = ROOT / ".venv-transformers/bin/python",
    eager: Annotated[
        bool, typer.Option("--eager", help="vLLM without torch.compile: starts sooner, runs slower")
    ] = False,
    budget: Annotated[float, typer.Option(help="seconds in all: later prompts are left out; 0 for no end")] = 0.0,
) -> None:
    """Measures, and writes rows, notes and the picture."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # also under nohup: servers that were started are ended
        signal.signal(ending, lambda *_: sys.exit("ended before it was done; --resume goes on"))
    if quick:
        sizes, count, warm, tokens, chains, accountings = "bundled,30M", 5, 1, 64, "3", "same-target-core"
        streams, rounds, rates, served, budget = "4,16", 1, "", False, budget or QUICK_S
    name = name or f"bench-{datetime.now(UTC):%Y-%m-%d}{'-quick' if quick else ''}"
    logs, models = Path("build/bench") / name, Path("build/bench/models")
    for folder in (out, logs, models):
        folder.mkdir(parents=True, exist_ok=True)
    results, notes = Results(out / f"{name}.json"), Notes(out / f"{name}-notes.json")
    if resume and results.path.exists():
        results.rows = json.loads(results.path.read_text())
        notes.lines = json.loads(notes.path.read_text())
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    env = Environments(vllm, transformers, eager)
    kinds: list[Accounting] = [kind for kind in get_args(Accounting) if kind in accountings.split(",")]
    many = tuple(int(each) for each in streams.split(",") if each)
    degrees = tuple(float(each) for each in temperatures.split(","))
    settings = {
        "sizes": sizes,
        "count": count,
        "warm": warm,
        "tokens": tokens,
        "dtype": dtype,
        "eager": eager,
        "quick": quick,
    }
    notes.add(conditions(cores, settings))
    notes.add(f"vLLM has preloaded: {', '.join(path.name for path in preloaded(vllm)) or 'nothing'}")
    tokenizer = load_tokenizer(TARGET)
    prompts = tuple(tuple(tokenizer(json.loads(line))["input_ids"]) for line in PROMPTS.read_text().splitlines())
    if not 0 <= warm < count or count * len(degrees) + PROBED > len(prompts):
        raise typer.BadParameter(f"--count: more than --warm, and at most {(len(prompts) - PROBED) // len(degrees)}")
    work = Work(
        prompts=prompts,
        count=count,
        tokens=tokens,
        warm=warm,
        temperatures=degrees,
        order=degrees,
        chains=tuple(map(int, chains.split(","))),
        served=served,
        names=tuple(each for each in names.split(",") if each),
        ends=frozenset({int(tokenizer.eos_token_id)}),
        decode=lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
    )
    limit = Limit(ttft_limit, itl_limit)
    shares = tuple(float(each) for each in rates.split(",") if each)
    methods = (VLLM, "vllm-draft-model") if quick else (VLLM, *VLLM_SPECULATIVE)
    load = many_streams.Load(methods, many, rounds, 1 if quick else 2, shares, seconds, limit)
    chosen = [each for each in sizes.split(",") if each]
    parts = len(chosen) * len(kinds) * (1 + len(degrees))  # 1: starting everybody
    parts += 1 + len(many) * len(degrees) if many else 0
    os.environ["RAY_ADDRESS"] = "local"  # an instance of our own, here and in the server that is started
    logging.getLogger("ray").setLevel(logging.ERROR)
    console.print(f"{'at most ten minutes' if quick else 'all of it takes about three hours'} on two quiet cores")
    with Progress(*COLUMNS, console=console) as progress:
        run = Run(env, cores, work, Budget(budget or None, parts), results, notes, logs, progress)
        for size in chosen:
            pair = make_pair(size, models, dtype)
            for kind in kinds:
                run.one(pair, kind)
        if many:
            run.many(make_pair(stream_size, models, dtype), kinds[0], load)
    ray.shutdown()
    draw(results.rows, results.path.with_suffix(".png"))
    console.print(f"written: {results.path}, {results.path.with_suffix('.png')}, {notes.path}")


if __name__ == "__main__":
    typer.run(main)
