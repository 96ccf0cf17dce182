"""Every drafter with every window on three workloads, against plain decoding and transformers' assisted generation.

    python -m benchmarks.drafting --json build/drafting.json --plot build/drafting.png --update docs/DRAFTING.md

One process, one thread, one stream. Contenders take turns prompt by prompt, in an order that a seed shuffles for each
prompt, so that a machine that drifts drifts for all. Not counted are prefill (the clock of a prompt starts when its first
tokens are there; a draft model reads the prompt before that, all but what exceeds its first steps) and the first `--warm`
prompts of each workload: there calibrations, learned windows and the confidences of lookups begin at nothing, anew for each
workload and temperature. They go on learning on the prompts that count.

The JSON is a list of rows: drafter, window, workload, temperature, prompts, max_tokens; tokens_per_step; acceptance (null
where nothing is tried or it isn't known); tokens_per_s, over_plain and over_transformers, medians over the prompts of the
figure on each prompt, with the quartiles of the first two, and over_plain_each, prompt by prompt; equal: whether all outputs
have the token ids of plain's (null for transformers' sampling, which draws otherwise); differing: how many don't, and the
largest margin of plain's choice where they part, which is tiny where another shape of a pass flips a tie; repeated: how much
of plain's output repeats the prompt. The workloads are described in benchmarks/drafting_texts.py.

`--cpu-time` counts the seconds that this one thread computes: on a machine with other work the clock says more about that.
"""

import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.drafting_contenders import (
    DRAFTERS,
    WINDOWS,
    Bench,
    Contender,
    Ours,
    Sample,
    TransformersAssisted,
    expanded,
    make_contender,
)
from benchmarks.drafting_report import PEER, PLAIN, Row, automatic, draw, full_table, pooled, update
from benchmarks.drafting_texts import WORKLOADS, Item, Source, repeated
from cluster.warm import warm_up
from engine.budget import CostModel
from engine.checkpoint import MODELS, ModelError
from engine.decode import decode
from engine.drafters.model import Growing
from engine.runner import Dtype, ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, InvalidRequest, SamplingParams, require

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
Name = tuple[str, str]  # drafter, window
_PLAIN_RUNS = 3  # of each prompt
_WIDTH = 160  # characters that the table needs, also in a file
MIN_TOKENS = 24  # more than any first step commits: something is left to time
CHOSEN = [name for name, kind in WINDOWS.items() if not kind.own]  # windows that can be named
_PLAIN, _PEER = (PLAIN, "none"), (PEER, "dynamic")
console = Console(stderr=True)


@dataclass(frozen=True)
class Settings:
    """What is measured. `count` includes the first `warm` prompts, which don't count."""

    count: int
    warm: int
    tokens: int
    temperatures: tuple[float, ...]
    names: tuple[Name, ...]
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    seed: int = 0


@dataclass
class Record:
    """What was measured on one workload at one temperature, prompt by prompt; the warm-up is left out."""

    samples: dict[Name, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    requests: list[GenerationRequest] = field(default_factory=list)

    def add(self, request: GenerationRequest, samples: dict[Name, Sample]) -> None:
        """One prompt, of all contenders."""
        self.requests.append(request)
        for name, sample in samples.items():
            self.samples[name].append(sample)


@dataclass(frozen=True)
class Models:
    """What stays loaded. cost: of a target step; draft_ms: a draft step."""

    source: Source
    draft: ModelRunner
    peer: TransformersAssisted | None  # none: it doesn't take part
    cost: CostModel
    draft_ms: float
    clock: Callable[[], float]


def load(
    target: Path,
    draft: Path,
    prompts: Path,
    dtype: Dtype = "auto",
    invariant: bool = False,
    clock: Callable[[], float] = time.monotonic,
    peer: bool = True,
) -> Models:
    """Loads and times the pair, for us and, as `peer`, for transformers. clock: in seconds. Raises ModelError."""
    big, small = ModelRunner(target, dtype=dtype, invariant=invariant), ModelRunner(draft, dtype=dtype)
    cost, draft_cost = CostModel(big.called_with), CostModel(small.called_with)
    warm_up(big, cost, clock=clock)
    warm_up(small, draft_cost, clock=clock)
    source = Source(big, load_tokenizer(target), prompts)
    rows = Growing().rows
    assisted = TransformersAssisted(target, draft, big.dtype, clock) if peer else None
    return Models(source, small, assisted, cost, float(draft_cost.table(rows)[rows]), clock)


def select(drafters: str, windows: str) -> Iterator[Name]:
    """The pairs of the named drafters and windows, "all" for all. Raises InvalidRequest for an unknown name."""
    chosen = _listed(windows, CHOSEN, "windows")
    for drafter in _listed(drafters, DRAFTERS, "drafters"):
        kind = DRAFTERS[drafter]
        yield from ((drafter, window) for window in kind.windows or chosen)


def _listed(names: str, known: Collection[str], param: str) -> list[str]:
    chosen = list(known) if names == "all" else names.split(",")
    for name in chosen:
        require(name in known, param, f"{name!r} is none of {', '.join(known)}")
    return chosen


def measure(models: Models, settings: Settings) -> Iterator[list[Row]]:
    """All contenders on all workloads at all temperatures; yields the rows of one workload and temperature at a time."""
    with Progress(console=console) as progress:
        passes = len(settings.temperatures) * len(settings.workloads)
        task = progress.add_task("", total=passes * settings.count)
        for workload in settings.workloads:
            rng = random.Random(f"{settings.seed} {workload}")
            items = WORKLOADS[workload](models.source, settings.count, rng)
            for temperature in settings.temperatures:
                progress.update(task, description=f"{workload}, T = {temperature:g}")
                record = Record()
                contenders = make_all(models, settings, items)
                for index, item in enumerate(items):
                    params = SamplingParams(temperature, seed=index, max_tokens=settings.tokens, ignore_eos=True)
                    request = GenerationRequest(f"{workload}-{index}", item.prompt, params)
                    samples = take_turns(contenders, request, rng)
                    if index >= settings.warm:
                        record.add(request, samples)
                    progress.advance(task)
                yield summarize(models, record, workload, temperature)


def make_all(models: Models, settings: Settings, items: Sequence[Item]) -> dict[Name, Contender]:
    """Every contender, fresh."""
    documents = tuple(dict.fromkeys(document for item in items for document in item.documents))
    source = models.source
    bench = Bench(source.target, models.draft, source.tokenizer, documents, models.cost, models.draft_ms, models.clock)
    made: dict[Name, Contender] = {_PLAIN: Ours(source.target, clock=models.clock)}
    if models.peer is not None:
        made[_PEER] = models.peer
    return made | {(drafter, window): make_contender(drafter, window, bench) for drafter, window in settings.names}


def take_turns(contenders: dict[Name, Contender], request: GenerationRequest, rng: random.Random) -> dict[Name, Sample]:
    """One prompt through all of them, in an order of its own; plain, which all are compared with, counts by its median."""
    order = [*contenders, *[_PLAIN] * (_PLAIN_RUNS - 1)]
    rng.shuffle(order)
    samples: dict[Name, list[Sample]] = {name: [] for name in contenders}
    for name in order:
        samples[name].append(contenders[name].run(request))
    return {name: sorted(runs, key=lambda run: run.seconds)[len(runs) // 2] for name, runs in samples.items()}


def summarize(models: Models, record: Record, workload: str, temperature: float) -> list[Row]:
    """The rows of one workload and temperature."""
    plain = record.samples[_PLAIN]
    shares = [repeated(r.prompt, sample.tokens) for r, sample in zip(record.requests, plain, strict=True)]
    common = {
        "workload": workload,
        "temperature": temperature,
        "prompts": len(plain),
        "max_tokens": record.requests[0].params.max_tokens,
        "repeated": round(statistics.mean(shares), 3),
    }
    peer = _rates(record.samples[_PEER]) if _PEER in record.samples else None
    rows = []
    for (drafter, window), samples in record.samples.items():
        figures = _speeds(_rates(samples), _rates(plain), peer) | _counts(samples)
        comparable = drafter != PEER or temperature == 0
        same = _compare(models, record, samples) if comparable else {"equal": None, "differing": None, "margin": None}
        rows.append({"drafter": drafter, "window": window} | common | figures | same)
    return rows


def _rates(samples: Sequence[Sample]) -> list[float]:
    return [sample.counted / sample.seconds for sample in samples]


def _speeds(rates: list[float], plain: list[float], peer: list[float] | None) -> Row:
    over = [a / b for a, b in zip(rates, plain, strict=True)]
    over_peer = [a / b for a, b in zip(rates, peer, strict=True)] if peer is not None else None
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_quartiles": _quartiles(rates),
        "over_plain": round(statistics.median(over), 3),
        "over_plain_quartiles": _quartiles(over),
        "over_plain_each": [round(ratio, 3) for ratio in over],
        "over_transformers": round(statistics.median(over_peer), 3) if over_peer is not None else None,
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) == 1:
        return [round(values[0], 3)] * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 3), round(high, 3)]


def _counts(samples: Sequence[Sample]) -> Row:
    accepted, tried = sum(sample.accepted for sample in samples), sum(sample.tried for sample in samples)
    counted, steps = sum(sample.counted for sample in samples), sum(sample.steps for sample in samples)
    return {
        "tokens_per_step": round(counted / max(1, steps), 3),
        "acceptance": round(accepted / tried, 4) if tried else None,
    }


def _compare(models: Models, record: Record, samples: Sequence[Sample]) -> Row:
    """Whether the outputs are plain's; where they are not, how close plain's choice was where they part."""
    margins = []
    for request, sample, plain in zip(record.requests, samples, record.samples[_PLAIN], strict=True):
        if sample.tokens != plain.tokens:
            pairs = enumerate(zip(sample.tokens, plain.tokens, strict=True))
            at = next(index for index, (a, b) in pairs if a != b)
            margins.append(decode(models.source.target, [request], margins=True)[0].margins[at])
    margin = round(max(margins), 5) if margins else None
    return {"equal": not margins, "differing": len(margins), "margin": margin}


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    count: Annotated[int, typer.Option(help="prompts of each workload, warm-up included")] = 10,
    warm: Annotated[int, typer.Option(help="of them, the first ones that are not counted")] = 2,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 96,
    temperature: Annotated[str, typer.Option(help="temperatures")] = "0,1",
    drafters: Annotated[str, typer.Option(help=f"of {', '.join(DRAFTERS)}")] = "all",
    windows: Annotated[str, typer.Option(help=f"of {', '.join(CHOSEN)}")] = "all",
    workloads: Annotated[str, typer.Option(help=f"of {', '.join(WORKLOADS)}")] = "all",
    seed: Annotated[int, typer.Option(help="of the choice of prompts and of the order")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    invariant: Annotated[bool, typer.Option(help="bits that don't depend on the batch")] = False,
    peer: Annotated[bool, typer.Option(help="transformers takes part")] = True,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="count the CPU time of this thread, not the clock's")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="3 prompts of 32 tokens at T = 0")] = False,
    rows_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--rows", exists=True, help="take the rows of this file, measure nothing; of several, the choice is judged"
        ),
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", help="where the rows go")] = Path("build/drafting.json"),
    plot: Annotated[Path | None, typer.Option(help="where the picture goes")] = None,
    page: Annotated[Path | None, typer.Option("--update", help="page whose table is written anew")] = None,
) -> None:
    """Measures, prints the table, and says how good the automatic choice is."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # it warns of its own defaults
    transformers.logging.disable_progress_bar()
    if quick:
        count, warm, tokens, temperature = 3, 1, 32, "0"
    try:
        if rows_files:
            runs = [json.loads(file.read_text()) for file in rows_files]
            if len(runs) > 1:
                require(len(set(rows_files)) == len(runs), "rows", "the same file twice")
                require(plot is None and page is None, "rows", "a table and a picture are of one file")
                typer.echo("\n".join(pooled(runs)))
                return
            rows = runs[0]
        else:
            require(0 <= warm < count, "warm", "some prompts must be left to count")
            require(tokens >= MIN_TOKENS, "tokens", f"at least {MIN_TOKENS}")
            kinds: Dtype = dtype  # type: ignore[assignment]
            names = tuple(measurable(select(drafters, windows), target))
            texts = tuple(_listed(workloads, WORKLOADS, "workloads"))
            temperatures = tuple(map(float, temperature.split(",")))
            settings = Settings(count, warm, tokens, temperatures, names, texts, seed)
            clock = time.thread_time if cpu_time else time.monotonic
            rows = []
            json_file.parent.mkdir(parents=True, exist_ok=True)
            for part in measure(load(target, draft, prompts, kinds, invariant, clock, peer), settings):
                rows += part
                json_file.write_text(json.dumps(rows, indent=1) + "\n")  # as far as it is: a run takes long
        if page is not None:
            update(page, rows)
    except (InvalidRequest, ModelError) as error:
        raise typer.BadParameter(str(error)) from None
    if plot is not None:
        draw(rows, plot)
    printed = Console(width=max(_WIDTH, console.width))
    printed.print(full_table(rows))
    for line in automatic(rows):
        printed.print(line, markup=False)


def measurable(names: Iterator[Name], target: Path) -> Iterator[Name]:
    """All of them, but those that read the target's layers only where all its layers were trained."""
    added = expanded(target)
    for drafter, window in names:
        if added and DRAFTERS[drafter].reads_layers:
            console.print(f"left out: {drafter}, since {target} is expanded")
        else:
            yield drafter, window


if __name__ == "__main__":
    typer.run(main)
