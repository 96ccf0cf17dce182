"""What would a pipeline do if its parts took this long? The real draft and policies on a virtual clock, free of noise.

    python benchmarks/simulate.py --draft-ms 2.8 --target-ms 2:6.3,4:7.1,8:8.4,16:11.2

The target's tokens come from plain decoding, computed once; its steps cost what the table says. The draft grows real trees
with the real model. The rest is `cluster.simulation`, as in `paceline simulate`, which needs no models. Two runs give
the same figures, so that a change of policy shows by itself; whether the costs are true is for pipeline.py to say.

    python benchmarks/simulate.py --record FILE

writes the draft's guesses at every token instead, for `paceline simulate --profile FILE`.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cluster.drafters import NODE_COST_ON_CPUS
from cluster.simulation.costs import Costs, measured_times, parse_points
from cluster.simulation.fleet import Fleet, simulate
from cluster.simulation.script import Script, save_scripts
from cluster.simulation.target import Limits
from engine.checkpoint import MODELS
from engine.decode import decode
from engine.drafters.model import Growing, ModelDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.tree import ROOT
from engine.types import GenerationRequest, SamplingParams

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
GROWING = Growing()
STEP_MS = "2:6.3,4:7.1,6:7.8,8:8.4,16:11.2,32:16.5"
NOT_SHOWN = ("tps", "tps_per_stream", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
console = Console(stderr=True)


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    count: Annotated[int, typer.Option(min=1, help="prompts, the first of which only warm up")] = 8,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 128,
    record: Annotated[Path | None, typer.Option(help="write the draft's guesses here, and simulate nothing")] = None,
    target_ms: Annotated[str, typer.Option(help="rows:milliseconds of a target step")] = STEP_MS,
    draft_ms: Annotated[float, typer.Option(help="milliseconds of a draft step, bookkeeping and all")] = 2.1,
    overhead_ms: Annotated[float, typer.Option(help="milliseconds of the target beside its forward pass")] = 0.9,
    latency_ms: Annotated[float, typer.Option(help="milliseconds of a message")] = 0.35,
    patient: Annotated[bool, typer.Option(help="a miss may wait for growth")] = True,
    lookup: Annotated[int, typer.Option(help="tokens that the target looks up by itself")] = 8,
    rows: Annotated[int, typer.Option(help="nodes expanded per draft step, at most")] = GROWING.rows,
    node_cost: Annotated[float, typer.Option(help="of a draft step: see Growing")] = NODE_COST_ON_CPUS,
    children: Annotated[int, typer.Option(help="children kept of each")] = GROWING.children,
) -> None:
    """Prints what the pipeline would do at T = 0 and T = 1."""
    if record is None and count < 2:
        raise typer.BadParameter("--count: at least 2, the first of which only warms up")
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(target)
    ids = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in prompts.read_text().splitlines()[:count]]
    target_runner, draft_runner = ModelRunner(target, dtype="float32"), ModelRunner(draft, dtype="float32")
    scripts = {
        f"T{temperature:g}": [
            _script(target_runner, draft_runner, _request(index, prompt, temperature, tokens), record is not None)
            for index, prompt in enumerate(track(ids, f"T = {temperature:g}", console=console))
        ]
        for temperature in (0.0, 1.0)
    }
    if record is not None:
        save_scripts(record, scripts)
        console.print(f"written: {record}")
        return
    step_times = measured_times(parse_points(target_ms, "target_ms"), target_runner.called_with)
    costs = Costs(step_times, measured_times({rows: draft_ms}), overhead_ms, latency_ms)
    growing = Growing(rows=rows, children=children, node_cost=node_cost)
    fleet = Fleet(costs, growing=growing, lookup=lookup, patient=patient, warm=1, limits=Limits(prefills=False))
    columns = {
        name: simulate(fleet, group, lambda growing: ModelDrafter(draft_runner, growing)).figures()
        for name, group in scripts.items()
    }
    shown = Table("", *columns)
    for name in next(iter(columns.values())):
        if name not in NOT_SHOWN:
            shown.add_row(name, *(str(column[name]) for column in columns.values()))
    Console().print(shown)


def _request(index: int, prompt: tuple[int, ...], temperature: float, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        str(index), prompt, SamplingParams(temperature, seed=index, max_tokens=tokens, ignore_eos=True)
    )


def _script(target: ModelRunner, draft: ModelRunner, request: GenerationRequest, guesses: bool) -> Script:
    """A request with its output, and with the draft's guesses at it where they are wanted."""
    output = _known_output(target, request)
    tokens, confidences = _guesses(draft, request, output) if guesses else ([[]], [[]])
    return Script(request, tuple(output), np.asarray(tokens, np.int32), np.asarray(confidences, np.float32))


def _guesses(
    runner: ModelRunner, request: GenerationRequest, output: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """What the draft thinks of each token of the output, given those before: (tokens, confidences), [output, children]."""
    drafter = ModelDrafter(runner, Growing(rows=1, max_depth=1, lookup=0))
    drafter.open(0, request.prompt, request.params)
    tokens, confidences = [], []
    for token in output:
        tree = drafter.tree(0)
        while not tree.expanded[ROOT]:
            drafter.grow()
        tokens.append(tree.token[1 : tree.size].tolist())
        confidences.append(tree.confidence[1 : tree.size].tolist())
        drafter.commit(0, [token])
    drafter.close(0)
    return tokens, confidences


def _known_output(runner: ModelRunner, request: GenerationRequest) -> list[int]:
    """By plain decoding; kept in build/, since it takes longer than everything else."""
    kept = Path("build/simulate") / f"{runner.path.name}-{request.params.temperature:g}-{request.request_id}.json"
    known: dict[str, list[int]] = json.loads(kept.read_text()) if kept.is_file() else {}
    if known.get("prompt") != list(request.prompt) or len(known["output"]) != request.params.max_tokens:
        [generation] = decode(runner, [request])
        known = {"prompt": list(request.prompt), "output": generation.tokens}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known))
    return known["output"]


if __name__ == "__main__":
    typer.run(main)
