"""What target and draft do between two forward passes with many sessions, in milliseconds a step.

    python -m benchmarks.bookkeeping --json FILE

Both replicas as they serve, in one process on a gRPC link, with the real pair. The time is that of each loop's own thread
from the end of a pass to the start of the next: waiting, other threads and other work are not in it. The choice of tokens
belongs to the pass, which most models compute in one call with it.
"""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from cluster.draft import DraftReplica
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.target import TargetReplica
from engine.attention import SequenceRows
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.checkpoint import MODELS
from engine.compiled_pass import Passed
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams, TokenChunk

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
_STEP_MS = 30.0
_PATIENCE_S = 60.0


class Gaps:
    """A runner's passes, the choice of tokens with them, and its thread's time between them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.between: list[tuple[int, float]] = []  # sequences in the pass that follows, milliseconds before it
        self.passes: list[tuple[int, float]] = []  # rows, milliseconds
        self._best, self._ended = runner.best, 0.0
        runner.best = self._timed  # type: ignore[assignment, method-assign]

    def _timed(self, batch: Sequence[SequenceRows], *arguments: Any) -> Passed:
        started = time.thread_time()
        self.between.append((len(batch), 1000 * (started - self._ended)))
        passed = self._best(batch, *arguments)
        self._ended = time.thread_time()
        self.passes.append((sum(len(rows.tokens) for rows in batch), 1000 * (self._ended - started)))
        return passed

    def figures(self, sequences: int) -> dict[str, float]:
        """Of the steps with so many sequences, and of those before which there were as many."""
        full = [
            (gap, rows, ms)
            for (before, _), (now, gap), (rows, ms) in zip(
                self.between, self.between[1:], self.passes[1:], strict=False
            )
            if min(before, now) >= sequences
        ]
        gaps = sorted(gap for gap, _, _ in full)
        return {
            "steps": len(full),
            "between_ms": round(median(gaps), 2),
            "between_p90_ms": round(gaps[len(gaps) * 9 // 10], 2),
            "pass_ms": round(median(ms for _, _, ms in full), 2),
            "rows": round(mean(rows for _, rows, _ in full), 1),
        }


def measure(target: ModelRunner, draft: ModelRunner, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Serves all requests at once."""
    cost = CostModel(target.called_with)
    for rows in (1, len(requests)):
        cost.start(rows, _STEP_MS)
    cost.start(2 * len(requests), 1.2 * _STEP_MS)
    replica = TargetReplica(
        target, GoodputWindow(Calibration(), cost), max_batch=len(requests), lookup=8, prefill_tokens=8192
    )
    drafting = DraftReplica(ModelDrafter(draft))
    server = DraftServer("127.0.0.1", 0, drafting.add_link)
    replica.add_link(connect(server.address, _PATIENCE_S))
    sides = {"target": Gaps(target), "draft": Gaps(draft)}
    left = threading.Semaphore(0)

    def sink(chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            left.release()

    for request in requests:
        replica.submit(request, sink)
    for _ in requests:
        left.acquire()
    stats = replica.stats()
    replica.close()
    server.stop()
    drafting.close()
    for runner in (target, draft):
        del runner.best
    figures = {"target": sides["target"].figures(len(requests)), "draft": sides["draft"].figures(1)}
    return figures | {
        "share_of_a_30_ms_step": round(figures["target"]["between_ms"] / _STEP_MS, 3),
        "verified_per_step": round(stats.verified / stats.steps, 1),
        "tokens_per_step": round(stats.decoded / stats.sequence_steps, 2),
    }


def main(
    sessions: Annotated[int, typer.Option(min=2, help="requests that run together")] = 64,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 48,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Prints what the two loops take between passes, at T = 0 and T = 1."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(TARGET)
    texts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    ids = [tuple(tokenizer(texts[i % len(texts)])["input_ids"][i // len(texts) :]) for i in range(sessions)]
    target = ModelRunner(TARGET, dtype="float32", kv_tokens=320 * sessions)
    draft = ModelRunner(DRAFT, dtype="float32", kv_tokens=512 * sessions)
    results: dict[str, Any] = {}
    table = Table("", "between passes (ms)", "90%", "a pass (ms)", "rows", "steps")
    for temperature in (0.0, 1.0):
        requests = [
            GenerationRequest(str(i), prompt, SamplingParams(temperature, seed=i, max_tokens=tokens, ignore_eos=True))
            for i, prompt in enumerate(ids)
        ]
        measure(target, draft, requests[:2])  # compiles
        results[f"T{temperature:g}"] = figures = measure(target, draft, requests)
        for side in ("target", "draft"):
            names = ("between_ms", "between_p90_ms", "pass_ms", "rows", "steps")
            table.add_row(f"{side}, T = {temperature:g}", *(str(figures[side][name]) for name in names))
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
