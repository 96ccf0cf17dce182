"""Does anything grow while 100,000 tokens are decoded? Resident memory, objects, KV pages and sessions, again and again.

    python -m benchmarks.memory --tokens 100000 --json FILE      exit code 1 unless everything held

A target and a draft in one process, some streams at a time, T = 0 and 1 in turn. Between two batches nothing runs: then no
page and no session may be held, all counts are audited, and resident memory and the number of Python objects are noted.
While a batch runs, the pages held have to be those of its sequences, and no more than these can ever need.
"""

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench.checkpoints import DRAFT, PROMPTS, TARGET
from cluster.draft import DraftReplica
from cluster.link import memory_link
from cluster.target import TargetReplica
from cluster.warm import warm_up
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.step import MAX_WINDOW
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams, TokenChunk

GROWTH_MB = (
    16.0  # resident memory of the last quarter over that of the second: allocators keep a little more now and then
)
GROWTH_OBJECTS = 2000
_IDLE_S = 60.0
console = Console(stderr=True)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """After so many tokens, while nothing ran. pages: held then by (target, draft); most_pages: while the batch ran."""

    tokens: int
    resident_mb: float
    objects: int
    pages: tuple[int, int]
    sessions: int
    most_pages: int
    allowed_pages: int  # what the sequences of the batch could need at most


def resident_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Pair:
    """A target and a draft in this process, with a link between them."""

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        cost = CostModel(target.called_with)
        self._runners = (target, draft)
        self.target = TargetReplica(target, GoodputWindow(Calibration(), cost), lookup=8, on_step=cost.observe)
        self.draft = DraftReplica(ModelDrafter(draft))
        down, up = memory_link()
        self.draft.add_link(up)
        self.target.add_link(down)

    def run(self, requests: Sequence[GenerationRequest]) -> tuple[int, int]:
        """All of them at the same time; the tokens that came, and the most pages held meanwhile."""
        left, lock, ended = len(requests), threading.Lock(), threading.Event()
        tokens = most = 0

        def sink(chunk: TokenChunk) -> None:
            nonlocal left, tokens, most
            with lock:
                tokens += len(chunk.tokens)
                most = max(most, self.target.pages[0])
                left -= chunk.finish_reason is not None
                assert chunk.error is None, chunk.error
                if not left:
                    ended.set()

        for request in requests:
            self.target.submit(request, sink)
        ended.wait()
        return tokens, most

    def settle(self) -> tuple[tuple[int, int], int]:
        """Waits until nothing runs, and audits both; pages and sessions held then. Raises AssertionError."""
        assert self.target.wait_idle(_IDLE_S), "the target did not become idle"
        deadline = time.monotonic() + _IDLE_S
        while self.draft.stats().sessions and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.draft.wait_idle(_IDLE_S), "the draft did not become idle"
        self.target.check()
        self.draft.check()
        target, draft = self._runners
        return (target.pool.used_pages, draft.pool.used_pages), self.draft.stats().sessions

    def close(self) -> None:
        """Ends both."""
        self.target.close()
        self.draft.close()


def batches(prompts: Sequence[Tokens], streams: int, length: int) -> Iterator[list[GenerationRequest]]:
    """Requests without end, so many at a time."""
    number = 0
    while True:
        batch = []
        for _ in range(streams):
            params = SamplingParams(float(number % 2), seed=number, max_tokens=length, ignore_eos=True)
            batch.append(GenerationRequest(str(number), prompts[number % len(prompts)], params))
            number += 1
        yield batch


def watch(
    pair: Pair, page_size: int, work: Iterator[list[GenerationRequest]], tokens: int, told: Callable[[int], None]
) -> Iterator[Sample]:
    """Decodes so many tokens; a sample after each batch. told: how many there are by then."""
    written = 0
    while written < tokens:
        batch = next(work)
        wholes = [len(request.prompt) + request.params.max_tokens + MAX_WINDOW + 1 for request in batch]
        count, most = pair.run(batch)
        written += count
        pages, sessions = pair.settle()
        gc.collect()
        allowed = sum(-(-whole // page_size) for whole in wholes)
        yield Sample(written, round(resident_mb(), 1), len(gc.get_objects()), pages, sessions, most, allowed)
        told(written)


def complaints(samples: Sequence[Sample]) -> list[str]:
    """What did not hold."""
    found = []
    for sample in samples:
        if any(sample.pages) or sample.sessions:
            found.append(f"after {sample.tokens} tokens {sample.pages} pages, {sample.sessions} sessions are held")
        if sample.most_pages > sample.allowed_pages:
            found.append(f"{sample.most_pages} pages were held of {sample.allowed_pages}")
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    megabytes = statistics.median(s.resident_mb for s in late) - statistics.median(s.resident_mb for s in early)
    objects = statistics.median(s.objects for s in late) - statistics.median(s.objects for s in early)
    if megabytes > GROWTH_MB:
        found.append(f"resident memory grew by {megabytes:.0f} MB")
    if objects > GROWTH_OBJECTS:
        found.append(f"there are {objects:.0f} objects more")
    return found


def main(
    tokens: Annotated[int, typer.Option(help="decoded in all")] = 100_000,
    streams: Annotated[int, typer.Option(help="at a time")] = 4,
    length: Annotated[int, typer.Option(help="tokens of each")] = 256,
    json_file: Annotated[Path, typer.Option("--json", help="where the samples go")] = Path("build/memory.json"),
) -> None:
    """Decodes and watches."""
    torch.set_num_threads(1)
    target = ModelRunner(TARGET, dtype="float32", kv_tokens=8192)
    draft = ModelRunner(DRAFT, dtype="float32", kv_tokens=16384)
    for runner in (target, draft):
        warm_up(runner)
    tokenizer = load_tokenizer(TARGET)
    lines = PROMPTS.read_text().splitlines()
    prompts = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in lines]
    json_file.parent.mkdir(parents=True, exist_ok=True)
    pair, samples = Pair(target, draft), list[Sample]()
    with Progress(console=console) as progress:
        task = progress.add_task("tokens", total=tokens)
        work = batches(prompts, streams, length)
        for sample in watch(pair, target.pool.page_size, work, tokens, lambda n: progress.update(task, completed=n)):
            samples.append(sample)
            found = complaints(samples)
            rows = [asdict(each) for each in samples]
            json_file.write_text(json.dumps({"complaints": found, "samples": rows}, indent=1) + "\n")
    pair.close()
    found = complaints(samples)
    first, last = samples[len(samples) // 4], samples[-1]
    console.print(f"resident memory {first.resident_mb} MB after {first.tokens} tokens, {last.resident_mb} at the end")
    console.print("\n".join(found) or "everything held")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
