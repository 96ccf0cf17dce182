"""What the choice of tokens costs over large vocabularies: noise for every token, and where it can matter only.

    python benchmarks/noise.py --json FILE

Both rules in turns, on one core, on the same made-up logits; milliseconds of the thread's own time, so that other work on
the machine weighs little. The outcomes must be equal.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from engine import noise, sampling
from engine.types import SamplingParams

CHILDREN = 6  # that a draft keeps
LOGITS = {"flat": 0.0, "usual": 2.5, "peaked": 8.0}  # by their standard deviation


def whole(logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor) -> torch.Tensor:
    """The rule itself: noise for every token."""
    values = noise.gumbel(keys[:, None], torch.arange(logits.shape[1]))
    return sampling.scores(logits, params, values).argmax(-1)


def measure(vocab_size: int, rows: int, spread: float, times: int) -> dict[str, float]:
    """Medians of one case; the first round only warms up."""
    params = SamplingParams(1.0)
    logits = spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    took: dict[str, list[float]] = {"greedy": [], "whole": [], "bounded": [], "propose": []}
    for position in range(times + 1):
        keys = noise.keys(position, range(rows))
        results: dict[str, torch.Tensor] = {}
        ways: dict[str, Callable[[], object]] = {
            "greedy": lambda: sampling.choose(logits, [SamplingParams(0.0)] * rows, None),
            "whole": lambda keys=keys, results=results: results.update(whole=whole(logits, params, keys)),  # type: ignore[misc]
            "bounded": lambda keys=keys, results=results: results.update(
                bounded=torch.from_numpy(sampling.choose(logits, [params] * rows, keys))
            ),  # type: ignore[misc]
            "propose": lambda keys=keys: sampling.propose(logits, [params] * rows, keys, CHILDREN),  # type: ignore[misc]
        }
        for name, way in ways.items():
            started = time.thread_time()
            way()
            if position:
                took[name].append(1000 * (time.thread_time() - started))
        assert torch.equal(results["whole"], results["bounded"])
    return {name: round(median(values), 3) for name, values in took.items()}


def main(
    sizes: Annotated[str, typer.Option(help="vocabularies")] = "4096,16384,131072,262144",
    rows: Annotated[str, typer.Option(help="rows in a step")] = "1,8",
    times: Annotated[int, typer.Option(help="of each case")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Prints milliseconds for a whole step's choices."""
    torch.set_num_threads(1)
    table = Table("vocabulary", "rows", "logits", "argmax alone", "whole noise", "bounded", "a draft's guesses")
    results = []
    for size in map(int, sizes.split(",")):
        for count in map(int, rows.split(",")):
            for name, spread in LOGITS.items():
                figures = measure(size, count, spread, times)
                results.append({"vocab_size": size, "rows": count, "logits": name, **figures})
                table.add_row(str(size), str(count), name, *(f"{value:.2f}" for value in figures.values()))
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
