"""Drafts of `paceline draft` under an unmodified vLLM, beside vLLM's own ways to draft, in one run.

    python -m benchmarks.vllm_drafts --json FILE

Needs `make vllm`. Each contender is an engine in a process of its own, with one thread on the first core; the draft service
has the second, vLLM's own draft model runs in the engine. They take turns, prompt by prompt. `hook` is the cost of the way
in: our class with no service behind it.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.server import ROOT, free_port
from engine.text import load_tokenizer

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TARGET, DRAFT = ROOT / "models" / "code-target", ROOT / "models" / "code-draft"
CONTEXT = 1024
console = Console(stderr=True)


@dataclass(frozen=True)
class Engine:
    """A contender's process."""

    name: str
    process: "subprocess.Popen[str]"

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Writes so many tokens for each prompt, all at the same time."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def wait_ready(self) -> None:
        """Raises SystemExit when it ended instead."""
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; see its log")
        return line


def contenders(lengths: Sequence[int]) -> dict[str, dict[str, Any] | None]:
    """vLLM's speculative configuration of each: those that draft once for each number of draft tokens per step."""
    found: dict[str, dict[str, Any] | None] = {"plain": None}
    ours: dict[str, Any] = {"method": "custom_class", "model": "cluster.vllm_proposer.RemoteProposer"}
    kinds: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
        "draft_model": {"method": "draft_model", "model": str(DRAFT)},
        "paceline": ours,
    }
    found["hook"] = {**ours, "num_speculative_tokens": lengths[0]}
    for name, config in kinds.items():
        found |= {f"{name}-{k}": {**config, "num_speculative_tokens": k} for k in lengths}
    return found


def select(lengths: Sequence[int], only: str) -> dict[str, dict[str, Any] | None]:
    """Plain, and all other contenders or those that `only` names."""
    known = contenders(lengths)
    names = ["plain", *filter(None, only.split(","))] if only else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]!r} is none of {', '.join(known)}")
    return {name: known[name] for name in names}


@contextmanager
def engine(
    name: str,
    config: dict[str, Any] | None,
    service: str,
    streams: int,
    out: Path,
    target: Path = TARGET,
    dtype: str = "float32",
) -> Iterator[Engine]:
    """A vLLM on the first core."""
    core = min(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PACELINE_DRAFT": service,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(PYTHON), str(ROOT / "benchmarks" / "vllm_worker.py"), str(target), json.dumps(config)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, str(CONTEXT), str(streams), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        with process:
            try:
                yield Engine(name, process)
            finally:
                process.terminate()


@contextmanager
def draft_service(
    out: Path, address: str | None = None, dtype: str = "auto"
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`paceline draft` on the last core, at any address by default; its address and process, once it is ready."""
    address = address or f"127.0.0.1:{free_port()}"
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "from deployments.cli import app; app()", "draft", "--listen", address]
    command += ["--dtype", dtype]
    file = out / f"draft-{address.rpartition(':')[2]}.log"
    with file.open("w") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with process:
            while "ready" not in file.read_text():
                if process.poll() is not None:
                    raise SystemExit("the draft service ended; see its log")
                time.sleep(0.2)
            try:
                yield address, process
            finally:
                process.terminate()


def measure(engines: list[Engine], batches: list[list[list[int]]], tokens: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of each contender, batch by batch; they take turns. The first batch warms up."""
    answers: dict[str, list[dict[str, Any]]] = {each.name: [] for each in engines}
    for each in engines:
        each.wait_ready()
    for batch in track(batches, "measuring", console=console):
        for each in engines:
            answers[each.name].append(each.ask(batch, tokens))
    return {name: held[1:] for name, held in answers.items()}


def rows(answers: dict[str, list[dict[str, Any]]], streams: int) -> list[dict[str, Any]]:
    """One row a contender: medians over batches, and whether its texts are those of plain vLLM."""
    plain = answers["plain"]
    found = []
    for name, held in answers.items():
        tps = [sum(map(len, answer["texts"])) / answer["seconds"] for answer in held]
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(plain, held, strict=True)]
        grown = sum(len(text) - 1 for answer in held for text in answer["texts"])
        count = {key.rpartition("num_")[2]: sum(a["counts"].get(key, 0) for a in held) for key in held[0]["counts"]}
        drafts, accepted = count.get("drafts", 0), count.get("accepted_tokens", 0)
        found.append(
            {
                "contender": name,
                "streams": streams,
                "tokens_per_s": round(statistics.median(tps), 1),
                "over_plain": round(statistics.median(ratios), 3),
                "tokens_per_step": round(grown / count["steps"], 3),
                "acceptance": round(accepted / count["draft_tokens"], 3) if drafts else None,
                **propose_ms([one for answer in held for one in answer["propose_s"]]),
                "equal": sum(
                    a == b
                    for x, y in zip(held, plain, strict=True)
                    for a, b in zip(x["texts"], y["texts"], strict=True)
                ),
                "texts": sum(len(answer["texts"]) for answer in held),
            }
        )
    return found


def propose_ms(calls: list[tuple[float, float]]) -> dict[str, float | None]:
    """Milliseconds that our class' `propose` took, apart from waiting for growth, and that wait. calls: seconds of both."""
    if not calls:
        return dict.fromkeys(("propose_p50_ms", "propose_p99_ms", "wait_p50_ms", "wait_p99_ms"))
    values = {"propose": [1000 * (took - waited) for took, waited in calls], "wait": [1000 * each for _, each in calls]}
    shares = {"p50": 50, "p99": 99}
    return {
        f"{name}_{share}_ms": round(float(np.percentile(found, percent)), 3)
        for name, found in values.items()
        for share, percent in shares.items()
    }


def as_table(found: list[dict[str, Any]]) -> Table:
    """Narrow enough for 80 columns; milliseconds are at p50 and p99."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for head in ("", "tokens/s", "of plain", "a step", "accepted", "propose", "waits", "equal"):
        table.add_column(head, no_wrap=True)
    for row in found:
        cells = [f"{row[name]:.2f}" for name in ("over_plain", "tokens_per_step")]
        cells.append("" if row["acceptance"] is None else f"{row['acceptance']:.2f}")
        for what in ("propose", "wait"):
            times = [row[f"{what}_p50_ms"], row[f"{what}_p99_ms"]]
            cells.append("" if None in times else "{:.2f}/{:.2f}".format(*times))
        table.add_row(row["contender"], str(row["tokens_per_s"]), *cells, f"{row['equal']}/{row['texts']}")
    return table


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/vllm-drafts.json"),
    count: Annotated[int, typer.Option(help="batches, one to warm up apart")] = 6,
    streams: Annotated[int, typer.Option(help="prompts at the same time")] = 1,
    tokens: Annotated[int, typer.Option(help="written for each prompt")] = 128,
    k: Annotated[str, typer.Option(help="draft tokens per step, several separated by commas: each in turn")] = "5,8",
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    dtype: Annotated[str, typer.Option(help="of vLLM and of our draft: float32 or bfloat16")] = "float32",
    only: Annotated[str, typer.Option(help="contenders beside plain, separated by commas; all by default")] = "",
) -> None:
    """Measures tokens/s of an unmodified vLLM with and without our drafts."""
    if not PYTHON.exists():
        raise SystemExit("there is no vLLM: run 'make vllm'")
    out = json_file.parent
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(TARGET)
    lines = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()[: streams * (count + 1)]
    prompts = [list(tokenizer(json.loads(line))["input_ids"]) for line in lines]
    batches = [prompts[i : i + streams] for i in range(0, len(prompts), streams)]
    chosen = select([int(length) for length in k.split(",")], only)
    with ExitStack() as stack:
        engines = []
        for name, config in chosen.items():
            address = f"127.0.0.1:{free_port()}"  # nobody's, but for those that have a service: each its own
            if name.startswith("paceline"):
                address, _ = stack.enter_context(draft_service(out, address, dtype))
            engines.append(stack.enter_context(engine(name, config, address, streams, out, target, dtype)))
        found = rows(measure(engines, batches, tokens), streams)
    console.print(as_table(found))
    json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
