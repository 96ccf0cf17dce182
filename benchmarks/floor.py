"""How far a plain step is from the time that reading the weights alone would take, on one core.

    python -m benchmarks.floor --size 150M --json FILE

The bandwidth is that of reading an array far larger than any cache, by the fastest of a few ways, measured in turn with the
steps: a step is compared with the reads just before and after it. What a step has to read is every weight once as it is
held in memory (the embedding only where it is the output's too) and the keys and values so far.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.bench.checkpoints import make_pair
from cluster.warm import warm_up
from engine.cpu import HalfLinear
from engine.decode import decode_steps
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams

READ_BYTES = 1 << 29
_STEPS = 4  # of a round
console = Console(stderr=True)


def readers() -> dict[str, Callable[[], object]]:
    """Ways to read READ_BYTES from memory."""
    numbers = torch.ones(READ_BYTES // 4)
    array, half = numbers.numpy(), numbers.view(-1, 4096)
    vector = torch.ones(4096)
    return {"sum": numbers.sum, "dot": lambda: np.dot(array, array), "matrix": lambda: half @ vector}


def seconds(call: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def weight_bytes(runner: ModelRunner, params: int) -> int:
    """What a step reads of them: layers hold them in float16 where that loses nothing, else as the arithmetic is."""
    halved = any(isinstance(module, HalfLinear) for module in runner.model.modules())
    return params * (2 if halved else torch.finfo(runner.dtype).bits // 8)


def measure(runner: ModelRunner, weights: int, rounds: int, context: int) -> dict[str, object]:
    """Medians over rounds of reads and steps in turn. A step is everything that plain decoding does for a token."""
    ways = readers()
    params = SamplingParams(max_tokens=rounds * (_STEPS + 1) + 1, ignore_eos=True)
    going = decode_steps(runner, [GenerationRequest("floor", tuple(range(1, context + 1)), params)])
    while not next(going)[1].tokens:
        pass  # the prompt is read
    steps: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, read in ways.items():
            rates[name].append(READ_BYTES / seconds(read))
        next(going)  # finds the caches as the reads left them
        steps += [seconds(lambda: next(going)) for _ in range(_STEPS)]
    list(going)  # to its end, which gives everything back
    context += rounds * _STEPS // 2
    data = runner.pool.data
    to_read = weights + context * data[:, :, :, 0].numel() * data.element_size()
    best = max(statistics.median(held) for held in rates.values())
    step_s = statistics.median(steps)
    return {
        "step_ms": round(1000 * step_s, 2),
        "floor_ms": round(1000 * to_read / best, 2),
        "step_over_floor": round(step_s * best / to_read, 3),
        "weights_mb": round(weights / 1e6, 1),
        "gb_per_s": {name: round(statistics.median(held) / 1e9, 1) for name, held in rates.items()},
        "rounds": rounds,
        "tokens_before": context,
    }


def main(
    size: Annotated[str, typer.Option(help="bundled, or about so many parameters")] = "150M",
    rounds: Annotated[int, typer.Option(help="of steps and reads in turn")] = 30,
    context: Annotated[int, typer.Option(help="tokens of the prompt")] = 200,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "float32",
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/floor.json"),
) -> None:
    """Measures."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    pair = make_pair(size, Path("build/bench/models"))
    runner = ModelRunner(pair.target, dtype=dtype, kv_tokens=1024)  # type: ignore[arg-type]
    warm_up(runner)
    with torch.inference_mode():
        found = {"target_params": pair.params, "dtype": dtype} | measure(
            runner, weight_bytes(runner, pair.params), rounds, context
        )
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(found, indent=1) + "\n")
    console.print_json(data=found)


if __name__ == "__main__":
    typer.run(main)
