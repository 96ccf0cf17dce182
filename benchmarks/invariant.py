"""What invariant mode costs: a decoding pass of 1, 16 and 64 sequences in it and outside it, in turns.

    python benchmarks/invariant.py --json FILE

One core, the bundled target; milliseconds of the thread's own time, so that other work on the machine weighs little.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from engine.attention import SequenceRows, chain_rows
from engine.checkpoint import MODELS
from engine.runner import Dtype, ModelRunner

TARGET = MODELS / "code-target"
_PREFIX = 100  # tokens of each sequence
_ROOM = 128  # of its lease


def batch_of(runner: ModelRunner, sequences: int) -> list[SequenceRows]:
    """A row of each of so many sequences, whose prefixes are computed."""
    leases = [runner.pool.lease(_ROOM) for _ in range(sequences)]
    for at, lease in enumerate(leases):
        runner.forward([chain_rows(lease, 0, [at + 1] * _PREFIX)])
    return [chain_rows(lease, _PREFIX, [7]) for lease in leases]


def measure(runners: dict[str, ModelRunner], sequences: int, times: int) -> dict[str, float]:
    """Medians; the first round only warms up."""
    batches = {name: batch_of(runner, sequences) for name, runner in runners.items()}
    took: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(times + 1):
        for name, runner in runners.items():
            started = time.thread_time()
            runner.forward(batches[name])
            if round_:
                took[name].append(1000 * (time.thread_time() - started))
    for name, batch in batches.items():
        for rows in batch:
            runners[name].pool.release(rows.lease)
    return {name: round(median(values), 3) for name, values in took.items()}


def compare(
    checkpoint: Path, dtype: Dtype, sequences: Sequence[int], rows: Sequence[int], times: int
) -> dict[str, Any]:
    """By number of sequences: milliseconds of the fast mode, and of invariant mode for each number of rows in a call."""
    tokens = _ROOM * max(sequences) + 64
    runners = {"fast": ModelRunner(checkpoint, dtype=dtype, kv_tokens=tokens)}
    for count in rows:
        runners[str(count)] = ModelRunner(
            checkpoint, dtype=dtype, kv_tokens=tokens, invariant=True, invariant_rows=count
        )
    return {str(count): measure(runners, count, times) for count in sequences}


def main(
    checkpoint: Annotated[Path, typer.Option(help="the target")] = TARGET,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16")] = "float32,bfloat16",
    sequences: Annotated[str, typer.Option(help="in a pass")] = "1,16,64",
    rows: Annotated[str, typer.Option(help="of each call in invariant mode; the runner's default is 8")] = "8,16",
    times: Annotated[int, typer.Option(help="passes of each case")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Prints milliseconds of a pass and what invariant mode takes over the fast one."""
    torch.set_num_threads(1)
    counts = [int(count) for count in rows.split(",")]
    table = Table("dtype", "sequences", "fast (ms)", *(f"{count} rows (ms)" for count in counts), "over fast")
    results: dict[str, Any] = {}
    for name in dtypes.split(","):
        dtype: Dtype = "bfloat16" if name == "bfloat16" else "float32"
        results[dtype] = compare(checkpoint, dtype, [int(n) for n in sequences.split(",")], counts, times)
        for number, figures in results[dtype].items():
            fast, *invariant = figures.values()
            over = ", ".join(f"{value / fast:.2f}" for value in invariant)
            table.add_row(dtype, number, f"{fast:.1f}", *(f"{value:.1f}" for value in invariant), over)
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
