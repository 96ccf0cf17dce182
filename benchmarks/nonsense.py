"""What a draft costs that is never right: a target linked to one against the same target alone, one stream.

    python -m benchmarks.nonsense --json FILE

The draft is a process of its own on the last core, over gRPC. Both targets run each prompt in turns. Compared is the loop's
own thread time for a token, with the time it waited for growth; other work on the machine is not in the first.
"""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from cluster.draft import DraftReplica
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.target import TargetReplica
from cluster.warm import warm_up
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.checkpoint import MODELS
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.tree import Moved, TokenTree
from engine.types import GenerationRequest, SamplingParams, TokenChunk

TARGET, PROMPTS = MODELS / "code-target", MODELS / "heldout.jsonl"
KINDS = {"wrong but sure": 1.0, "unknown ids too": 0.7}  # by the share of ids that the target knows
_PATIENCE_S = 60.0


@dataclass
class WrongDrafter:
    """Implements Drafter: tokens at random, all over the tree, and very sure of them."""

    vocab_size: int
    known: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    trees: dict[int, TokenTree] = field(default_factory=dict)

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        self.trees[session] = TokenTree(tokens[-1], 64)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        return self.trees[session].commit(tokens)

    def grow(self) -> list[int]:
        time.sleep(0.002)  # what a draft step takes
        growing = [session for session, tree in self.trees.items() if tree.size < tree.capacity - 12]
        for session in growing:
            tree = self.trees[session]
            parents = self.rng.integers(tree.size, size=12).tolist()
            tokens = self.rng.integers(self.vocab_size, size=12)
            tokens[self.rng.random(12) >= self.known] += self.vocab_size
            tree.add_many(parents, tokens.tolist(), [0.99] * 12)
        return growing

    def tree(self, session: int) -> TokenTree:
        return self.trees[session]

    def close(self, session: int) -> None:
        self.trees.pop(session, None)

    def check(self) -> None:
        pass


def draft_process(pipe: Connection, core: int, vocab_size: int, known: float) -> None:
    """Says its address, serves until it is told to end."""
    os.sched_setaffinity(0, {core})
    replica = DraftReplica(WrongDrafter(vocab_size, known))
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    pipe.send(server.address)
    pipe.recv()
    server.stop()
    replica.close()


@dataclass
class Spent:
    """Of one target, over all prompts."""

    tokens: int = 0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    verified: int = 0

    @property
    def ms(self) -> float:
        """A token's."""
        return 1000 * (self.cpu_s + self.wait_s) / max(1, self.tokens)


def run(replica: TargetReplica, request: GenerationRequest, spent: Spent) -> list[int]:
    """One request, from its first chunk to its last."""
    ended = threading.Event()
    tokens: list[int] = []
    times: list[tuple[float, int]] = []

    def sink(chunk: TokenChunk) -> None:
        tokens.extend(chunk.tokens)
        times.append((time.thread_time(), len(tokens)))
        if chunk.finish_reason is not None:
            ended.set()

    before = replica.stats()
    replica.submit(request, sink)
    ended.wait()
    after = replica.stats()
    spent.tokens += times[-1][1] - times[0][1]
    spent.cpu_s += times[-1][0] - times[0][0]
    spent.wait_s += after.wait_s - before.wait_s
    spent.verified += after.verified - before.verified
    return tokens


def measure(runner: ModelRunner, ids: Sequence[tuple[int, ...]], tokens: int, known: float) -> dict[str, Any]:
    """Both targets in turns; the first two prompts are not counted."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    core = max(os.sched_getaffinity(os.getppid()))
    arguments = (theirs, core, runner.vocab_size, known)
    process = multiprocessing.get_context("spawn").Process(target=draft_process, args=arguments, daemon=True)
    process.start()
    cost = CostModel(runner.called_with)
    warm_up(runner, cost)
    replicas = {name: TargetReplica(runner, GoodputWindow(Calibration(), cost)) for name in ("plain", "linked")}
    replicas["linked"].add_link(connect(ours.recv(), _PATIENCE_S))
    spent: dict[str, Spent] = {}
    for index, prompt in enumerate(ids):
        if index in (0, 2):
            spent = {name: Spent() for name in replicas}
        params = SamplingParams(0.0 if index % 2 else 1.0, seed=index, max_tokens=tokens, ignore_eos=True)
        order = list(replicas) if index // 2 % 2 else list(replicas)[::-1]
        outputs = [run(replicas[name], GenerationRequest(str(index), prompt, params), spent[name]) for name in order]
        assert outputs[0] == outputs[1]
    for replica in replicas.values():
        replica.close()
    ours.send(None)
    process.join()
    plain, linked = spent["plain"], spent["linked"]
    return {
        "plain_ms": round(plain.ms, 3),
        "linked_ms": round(linked.ms, 3),
        "linked_wait_ms": round(1000 * linked.wait_s / linked.tokens, 3),
        "verified_per_token": round(linked.verified / linked.tokens, 3),
        "cost": round(linked.ms / plain.ms - 1, 4),
    }


def main(
    count: Annotated[int, typer.Option(help="prompts, of which two only warm up")] = 8,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Prints what each kind of wrong draft costs."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(TARGET)
    ids = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in PROMPTS.read_text().splitlines()[:count]]
    runner = ModelRunner(TARGET, dtype="float32", kv_tokens=4096)
    results = {kind: measure(runner, ids, tokens, known) for kind, known in KINDS.items()}
    table = Table("draft", "plain (ms a token)", "linked", "of it waiting", "verified a token", "cost")
    for kind, figures in results.items():
        table.add_row(kind, *(str(value) for value in figures.values()))
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
