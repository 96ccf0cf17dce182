"""How weights should lie in memory: products with both layouts of engine.torch_calls, by how large the model is.

    python -m benchmarks.weights --sizes 3,30,60,300 --json FILE

On one core, in bfloat16, layers of the bundled target's shape one after the other. Each layout makes a few passes in a row
before it is the other one's turn, and the last counts: weights come from where they come from while a model serves.
"""

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import torch_calls
from engine.compiled import compiled
from engine.huge_pages import use_huge_pages
from engine.torch_calls import NARROW, PAGE_BYTES, WIDE, blocks_of, leave, product
from engine.types import FloatArray

SHAPES = ((640, 384), (384, 384), (2048, 384), (384, 1024))  # [out_features, in_features], of a layer
_IN_A_ROW = 3  # passes
console = Console(stderr=True)


@partial(compiled, long=True)
def one_pass(blocks: Any, sizes: Any, line: int, x: FloatArray) -> None:
    """Products of x [rows, most in_features] with weights at these addresses, of these sizes [n, 2]."""
    for i in range(len(blocks)):
        outputs, inputs = sizes[i]
        product(x[:, :inputs].copy(), blocks[i], line, np.empty((len(x), outputs), np.float32))
    leave()


def laid_out(layers: int, line: int) -> tuple[torch.Tensor, list[int]]:
    """Weights of so many layers in one piece of memory, and where in it each begins."""
    weights = [blocks_of(torch.randn(shape).bfloat16(), line) for _ in range(layers) for shape in SHAPES]
    starts = np.cumsum([0, *(len(weight) for weight in weights)])
    whole = torch.empty(int(starts[-1]) + PAGE_BYTES // 2, dtype=torch.bfloat16)
    first = -whole.data_ptr() % PAGE_BYTES // 2
    whole[first : first + int(starts[-1])] = torch.cat(weights)
    return whole, [whole.data_ptr() + 2 * (first + int(start)) for start in starts[:-1]]


def measure(megabytes: int, rows: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    """Microseconds of a layer, for each number of rows: medians over the rounds."""
    layers = max(1, round(megabytes * 1e6 / sum(2 * outputs * inputs for outputs, inputs in SHAPES)))
    held = {line: laid_out(layers, line) for line in (NARROW, WIDE)}
    use_huge_pages()
    sizes = np.array(SHAPES * layers)
    times: dict[tuple[int, int], list[float]] = {(line, n): [] for line in held for n in rows}
    for number in track(range(rounds + 1), f"{megabytes} MB", console=console):
        for n in rows:
            x = np.ones((n, max(inputs for _, inputs in SHAPES)), np.float32)
            for line in list(held)[:: 1 if number % 2 else -1]:
                blocks = np.array(held[line][1], np.uint64)
                for _ in range(_IN_A_ROW - 1):
                    one_pass(blocks, sizes, line, x)
                started = time.perf_counter()
                one_pass(blocks, sizes, line, x)
                took = time.perf_counter() - started
                times[line, n] += [1e6 * took / layers] if number else []  # the first round makes the kernels
    found = []
    for n in rows:
        narrow, wide = (statistics.median(times[line, n]) for line in (NARROW, WIDE))
        found.append({"megabytes": megabytes, "rows": n, "narrow_us": narrow, "wide_us": wide, "ratio": wide / narrow})
    return found


def main(
    sizes: Annotated[str, typer.Option(help="MB of weights")] = "3,30,60,300",
    rows: Annotated[str, typer.Option(help="of a pass")] = "1,8,14",
    rounds: Annotated[int, typer.Option(min=1, help="that count, behind one to warm up")] = 9,
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/weights.json"),
) -> None:
    """Measures."""
    if not torch_calls.narrow_available():
        raise SystemExit("this processor has no products in bfloat16, or torch is not as expected: nothing is laid out")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    numbers = tuple(int(each) for each in rows.split(","))
    found = [row for size in sizes.split(",") for row in measure(int(size), numbers, rounds)]
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(found, indent=1) + "\n")
    table = Table("MB", "rows", "narrow, us a layer", "wide", "wide / narrow", box=None)
    for row in found:
        cells = f"{row['narrow_us']:.0f}", f"{row['wide_us']:.0f}", f"{row['ratio']:.2f}"
        table.add_row(f"{row['megabytes']:.0f}", f"{row['rows']:.0f}", *cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
