"""Variants of Paceline against each other, prompt by prompt: revisions of the code, and ways to decode.

    git worktree add ../before HEAD~1
    python -m benchmarks.paired before=../before now=. turns=.@3+lookup

Runs after one another drift by a quarter on a shared machine; here every prompt goes through all variants, one after the
other, so that what drifts is shared, and the ratio to the first variant has a standard error. Each variant is a checkout of
this repository, with the draft that is bundled there, and after an @ how it decodes: `pipelined` (the default), `plain`, or
a number (taking turns, a chain of so many draft tokens). Pipelined variants look up what the text has already; a number does
so as `3+lookup`, and not by itself. Nobody looks earlier outputs up: the prompts come again. Targets share the first core,
drafts the last; no Ray. The first round doesn't count.
"""

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.checkpoint import MODELS
from engine.text import load_tokenizer

WORKER = Path(__file__).with_name("paired_worker.py")
console = Console(stderr=True)


@dataclass(frozen=True)
class Variant:
    """What is compared: code, and how it decodes."""

    name: str
    checkout: Path
    mode: str

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """NAME=CHECKOUT or NAME=CHECKOUT@MODE; raises SystemExit."""
        name, _, rest = text.partition("=")
        checkout, _, mode = rest.partition("@")
        path = Path(checkout)
        if not name or not checkout or not (path / "cluster").is_dir():
            raise SystemExit(f"{text!r}: wanted NAME=CHECKOUT@MODE, and {checkout or 'nothing'!r} is no checkout")
        if not (mode in ("", "pipelined", "plain") or mode.removesuffix("+lookup").isdecimal()):
            raise SystemExit(
                f"{text!r}: the mode is pipelined, plain or a number of draft tokens, perhaps with +lookup"
            )
        return cls(name, path.resolve(), mode or "pipelined")


@dataclass
class Row:
    """One variant at one temperature, over the prompts that count."""

    variant: str
    temperature: float
    tokens: int = 0
    steps: int = 0
    hits: int = 0
    verified: int = 0  # draft tokens; not known of those that take turns
    forward_s: float = 0.0  # in the target's steps
    rates: list[list[float]] = field(default_factory=list)  # tokens per second of each prompt, round by round

    def add(self, prompt: int, answer: dict[str, Any]) -> None:
        """A prompt, by its number, once more."""
        self.tokens += answer["decoded"]
        self.steps += answer["steps"]
        self.hits += answer["hits"]
        self.verified += answer["verified"] or 0
        self.forward_s += answer["forward_s"]
        while len(self.rates) <= prompt:
            self.rates.append([])
        self.rates[prompt].append(answer["decoded"] / answer["seconds"])

    @property
    def tokens_per_s(self) -> float:
        """Of all prompts together, each as long as the others."""
        return statistics.harmonic_mean([rate for rates in self.rates for rate in rates])

    def over(self, other: "Row") -> tuple[float, float]:
        """The ratio to another's speed on the same prompts: geometric mean, and its standard error.

        Rounds of a prompt say the same of it again: the error is over prompts, of which there are two at least.
        """
        logs = np.log(np.asarray(self.rates) / np.asarray(other.rates)).mean(axis=1)
        ratio = float(np.exp(logs.mean()))
        return ratio, ratio * float(logs.std(ddof=1)) / len(logs) ** 0.5


class Worker:
    """A variant's process that answers requests."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """It is asked through its standard input and output, a line each."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked: IO[str] = process.stdin
        self._said: IO[str] = process.stdout

    def line(self) -> dict[str, Any]:
        """What it says next; raises SystemExit when it ended."""
        line = self._said.readline()
        if not line:
            raise SystemExit("a process ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decodes a request."""
        with suppress(BrokenPipeError):  # reading says it
            self._asked.write(json.dumps(request) + "\n")
            self._asked.flush()
        return self.line()


@contextmanager
def worker(variant: Variant, core: int, options: dict[str, Any]) -> Iterator[Worker]:
    """A process with the variant's code, pinned to a core; it ends when its input does."""
    environment = {**os.environ, "PYTHONPATH": str(variant.checkout), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, str(WORKER), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=variant.checkout,
        env=environment,
    )
    with process:
        try:
            yield Worker(process)
        finally:
            process.terminate()


def start(stack: ExitStack, variant: Variant, options: dict[str, Any]) -> Worker:
    """The variant's target, with a draft beside if it is pipelined; ready when its first line is there."""
    cores = sorted(os.sched_getaffinity(0))
    own = {**options, "mode": variant.mode}
    own["draft"] = own["draft"] or str(variant.checkout / "models" / "code-draft")
    if variant.mode == "pipelined":
        draft = stack.enter_context(worker(variant, cores[-1], {**own, "mode": "draft", "core": cores[-1]}))
        own["address"] = draft.line()["address"]
    target = stack.enter_context(worker(variant, cores[0], {**own, "core": cores[0]}))
    target.line()
    return target


def measure(
    workers: dict[str, Worker], prompts: Sequence[Sequence[int]], temperature: float, rounds: int, tokens: int
) -> list[Row]:
    """All prompts through all variants, in an order that is shuffled anew for each."""
    rows = {name: Row(name, temperature) for name in workers}
    differing = 0
    for number in track(range(len(prompts) * (1 + rounds)), f"T = {temperature:g}", console=console):
        turn, index = divmod(number, len(prompts))
        request = {"prompt": list(prompts[index]), "seed": index, "temperature": temperature, "tokens": tokens}
        order = list(workers)
        random.Random(number).shuffle(order)
        answers = {name: workers[name].ask(request) for name in order}
        differing += len({tuple(answer["output"]) for answer in answers.values()}) > 1
        if turn:
            for name, answer in answers.items():
                rows[name].add(index, answer)
    if differing:
        console.print(f"T = {temperature:g}: {differing} times outputs differ (ties?)")
    return list(rows.values())


def main(
    variants: Annotated[list[str], typer.Argument(help="NAME=CHECKOUT@MODE; ratios are to the first")],
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = MODELS / "code-target",
    draft: Annotated[Path | None, typer.Option(help="checkpoint of the draft, if not the one in each checkout")] = None,
    dtype: Annotated[str, typer.Option(help="of both")] = "float32",
    count: Annotated[int, typer.Option(min=2, help="prompts")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="that count, behind one to warm up")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="per prompt")] = 128,
    temperatures: Annotated[str, typer.Option(help="0 is greedy")] = "0,1",
    file: Annotated[Path, typer.Option("--json", help="where the rows go")] = Path("build/paired.json"),
) -> None:
    """Measures."""
    chosen = [Variant.parse(text) for text in variants]
    if len({variant.name for variant in chosen}) < len(chosen):
        raise SystemExit("two variants have the same name")
    tokenizer = load_tokenizer(target)
    lines = (MODELS / "heldout.jsonl").read_text().splitlines()[:count]
    prompts = [tokenizer(json.loads(line))["input_ids"] for line in lines]
    options = {"target": str(target.resolve()), "draft": draft and str(draft.resolve()), "dtype": dtype}
    found: list[Row] = []
    with ExitStack() as stack:
        workers = {variant.name: start(stack, variant, options) for variant in chosen}
        for temperature in map(float, temperatures.split(",")):
            found += measure(workers, prompts, temperature, rounds, tokens)
    table = Table(
        "T", "variant", "tokens/s", "ratio to the first", "tokens a step", "verified", "hits", "pass ms", box=None
    )
    shown = []
    for row in found:
        first = next(each for each in found if each.temperature == row.temperature)
        ratio, error = row.over(first)
        figures = {"tokens_per_s": round(row.tokens_per_s, 1), "ratio": round(ratio, 3), "error": round(error, 3)}
        shown.append({**asdict(row), **figures})
        cells = f"{row.tokens_per_s:.0f}", f"{ratio:.3f} ± {error:.3f}", f"{row.tokens / row.steps:.2f}"
        more = (
            f"{row.verified / row.steps:.2f}",
            f"{row.hits / row.steps:.2f}",
            f"{1000 * row.forward_s / row.steps:.2f}",
        )
        table.add_row(f"{row.temperature:g}", row.variant, *cells, *more)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(shown, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
