"""How often is a draft token accepted by the coupled rule, and by classical rejection sampling? Same pair and prompts.

    python benchmarks/verifiers.py --json FILE

Counts only, no time: both verifiers run in one process, along chains of each length, at several temperatures.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import rejection
from engine.checkpoint import MODELS
from engine.decode import Generation, Speculation, decode
from engine.drafters.model import Growing, ModelDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams
from engine.windows import FixedChain

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
console = Console(stderr=True)


def figures(generations: list[Generation]) -> dict[str, float | str]:
    """Acceptance and block efficiency over all of them."""
    accepted, tried = sum(g.accepted for g in generations), sum(g.tried for g in generations)
    tokens, steps = sum(len(g.tokens) for g in generations), sum(g.steps for g in generations)
    return {"acceptance": round(accepted / tried, 4), "tokens_per_step": round(tokens / steps, 3)}


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    count: Annotated[int, typer.Option(help="prompts")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 128,
    chains: Annotated[str, typer.Option(help="draft tokens per step to try")] = "1,3,5",
    temperatures: Annotated[str, typer.Option(help="temperatures to try")] = "0.7,1.0",
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Prints acceptance and tokens per step of both verifiers."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(target)
    ids = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in prompts.read_text().splitlines()[:count]]
    big, small = ModelRunner(target, dtype="float32"), ModelRunner(draft, dtype="float32")
    rows: list[dict[str, float | str]] = []
    for temperature in map(float, temperatures.split(",")):
        for k in map(int, chains.split(",")):
            made: dict[str, list[Generation]] = {"coupled": [], "rejection": []}
            drafter = ModelDrafter(small, Growing(rows=1, children=1, lookup=0))
            for seed, prompt in enumerate(track(ids, f"T = {temperature:g}, k = {k}", console=console)):
                params = SamplingParams(temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
                request = GenerationRequest(str(seed), prompt, params)
                made["coupled"] += decode(big, [request], Speculation(drafter, FixedChain(k), k))
                made["rejection"].append(rejection.decode(big, small, request, k))
            for name, generations in made.items():
                row: dict[str, float | str] = {"verifier": name, "temperature": temperature, "k": k}
                rows.append(row | figures(generations))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
