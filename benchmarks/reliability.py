"""Is a probability of 0.7 right seven times out of ten? The draft's own confidences, and what calibration makes of them.

    python benchmarks/reliability.py --json FILE --picture FILE

Held-out prompts are decoded in one process with trees of the model drafter. Every draft token that was compared with the
target's is a trial: its confidence, its calibrated probability at that moment, and whether it was accepted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from engine.budget import Calibration, CostModel, GoodputWindow
from engine.checkpoint import MODELS
from engine.decode import Speculation, decode
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.tree import ROOT, TokenTree
from engine.types import GenerationRequest, IntArray, SamplingParams

BINS = 10
DRAFT_STEPS = 3
TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
COLOURS = {"confidence": "#d9822b", "calibrated": "#2f7f93"}
console = Console(stderr=True)


@dataclass
class Recording(GoodputWindow):
    """A goodput window that keeps every trial: (confidence, calibrated probability, accepted)."""

    trials: list[tuple[float, float, bool]] = field(default_factory=list)

    def observe(self, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """See Window."""
        walked = {ROOT, *path}
        tried = nodes[[int(parent) in walked for parent in tree.parent[nodes]]]
        reach = self.calibration.paths(tree)
        calibrated = reach[tried] / reach[tree.parent[tried]]
        for node, confidence, probability in zip(tried.tolist(), tree.confidence[tried], calibrated, strict=True):
            self.trials.append((float(confidence), float(probability), node in walked))
        super().observe(tree, nodes, path)


def curve(predicted: np.ndarray, accepted: np.ndarray) -> list[dict[str, float]]:
    """Per bin of predicted probability: its mean, the share that was accepted, and the trials."""
    bins = np.clip((predicted * BINS).astype(int), 0, BINS - 1)
    return [
        {
            "predicted": round(float(predicted[bins == index].mean()), 4),
            "accepted": round(float(accepted[bins == index].mean()), 4),
            "trials": int((bins == index).sum()),
        }
        for index in range(BINS)
        if (bins == index).any()
    ]


def expected_error(points: list[dict[str, float]]) -> float:
    """Expected calibration error: the mean distance of a bin's prediction from its truth, by trials."""
    total = sum(point["trials"] for point in points)
    return round(sum(abs(point["predicted"] - point["accepted"]) * point["trials"] for point in points) / total, 4)


def draw(results: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """The picture: one plot a temperature."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(results)), results.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
        for kind, points in curves.items():
            sizes = [4 + 0.6 * point["trials"] ** 0.5 for point in points]
            x, y = [point["predicted"] for point in points], [point["accepted"] for point in points]
            axes.plot(x, y, color=COLOURS[kind], label=f"{kind}, error {expected_error(points):.3f}")
            axes.scatter(x, y, s=[size**2 / 4 for size in sizes], color=COLOURS[kind])
        axes.set(title=name.replace("T", "T = "), xlabel="predicted", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    count: Annotated[int, typer.Option(help="prompts")] = 24,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
    picture: Annotated[Path, typer.Option(help="where the picture goes")] = Path("build/reliability.png"),
) -> None:
    """Draws reliability curves at T = 0 and T = 1."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(target)
    ids = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in prompts.read_text().splitlines()[:count]]
    target_runner, draft_runner = ModelRunner(target, dtype="float32"), ModelRunner(draft, dtype="float32")
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for temperature in (0.0, 1.0):
        cost = CostModel(target_runner.called_with)
        cost.start(1, 10.0)
        cost.start(32, 20.0)
        window = Recording(Calibration(), cost)
        speculation = Speculation(ModelDrafter(draft_runner), window, DRAFT_STEPS)
        for index, prompt in enumerate(track(ids, f"T = {temperature:g}", console=console)):
            params = SamplingParams(temperature, seed=index, max_tokens=tokens, ignore_eos=True)
            decode(target_runner, [GenerationRequest(str(index), prompt, params)], speculation)
        confidence, calibrated, accepted = (np.asarray(column, float) for column in zip(*window.trials, strict=True))
        results[f"T{temperature:g}"] = {
            "confidence": curve(confidence, accepted),
            "calibrated": curve(calibrated, accepted),
        }
    draw(results, picture)
    errors = {
        name: {kind: expected_error(points) for kind, points in curves.items()} for name, curves in results.items()
    }
    if json_file is not None:
        json_file.write_text(json.dumps({"curves": results, "expected_error": errors}, indent=1) + "\n")
    Console().print_json(data=errors)
    Console().print(f"picture: {picture}")


if __name__ == "__main__":
    typer.run(main)
