"""What would a pipeline do if its parts took this long? The real draft and policies on a virtual clock, free of noise.

    python benchmarks/simulate.py --draft-ms 2.8 --target-ms 2:6.3,4:7.1,8:8.4,16:11.2

The target's tokens come from plain decoding, computed once; its steps cost what the table says. The draft grows real trees
with the real model. State machines, windows and cadence are the cluster's own; messages take `--latency-ms`. Two runs give
the same figures, so that a change of policy shows by itself; whether the costs are true is for pipeline.py to say.
"""

import json
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cluster.cadence import Cadence
from cluster.draft_state import CloseSession, CommitTokens, DraftState, OpenSession, resend
from cluster.local import bundled
from cluster.target_state import TargetState
from cluster.wire import MAX_TOKEN_ID
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.decode import decode
from engine.drafters.model import Growing, ModelDrafter
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import Down, GenerationRequest, Growth, SamplingParams, Up
from engine.verify import walk

STREAM = 0  # there is one
TARGET, DRAFT, PROMPTS = bundled("code-target"), bundled("code-draft"), bundled("heldout.jsonl")
GROWING = Growing()
STEP_MS = "2:6.3,4:7.1,6:7.8,8:8.4,16:11.2,32:16.5"
console = Console(stderr=True)


@dataclass
class Costs:
    """Milliseconds of everything that takes time."""

    target: dict[int, float]  # a step by its rows; the next larger number counts
    draft: float  # a draft step with all that belongs to it
    overhead: float  # of the target, beside its forward pass
    latency: float  # of a message
    patience: float  # the longest wait after a miss

    def step(self, rows: int) -> float:
        """A target step of this many rows."""
        largest = max(self.target)
        return next((self.target[r] for r in sorted(self.target) if r >= rows), self.target[largest] * rows / largest)


@dataclass
class Figures:
    """What happened, as in pipeline.py."""

    steps: int = 0
    tokens: int = 0
    tried: int = 0
    accepted: int = 0
    verified: int = 0
    hits: int = 0
    empty: int = 0
    messages: int = 0  # of growth
    nodes: int = 0  # in them
    draft_steps: int = 0
    waited_ms: float = 0.0
    ms: float = 0.0

    def row(self) -> dict[str, float]:
        """The derived figures."""
        steps = max(1, self.steps)
        return {
            "tps": round(1000 * self.tokens / self.ms, 1),
            "tokens_per_step": round(self.tokens / steps, 3),
            "acceptance": round(self.accepted / max(1, self.tried), 3),
            "verified_per_step": round(self.verified / steps, 2),
            "hit_rate": round(self.hits / steps, 3),
            "empty_step_share": round(self.empty / steps, 3),
            "wait_share": round(self.waited_ms / self.ms, 3),
            "draft_steps_per_step": round(self.draft_steps / steps, 2),
            "growths_per_step": round(self.messages / steps, 2),
            "nodes_per_step": round(self.nodes / steps, 1),
        }


@dataclass
class Draft:
    """The draft replica's loop, its clock aside."""

    drafter: ModelDrafter
    costs: Costs
    figures: Figures
    state: DraftState = field(default_factory=DraftState)
    cadence: Cadence = field(default_factory=Cadence)
    inbox: deque[tuple[float, list[Down]]] = field(default_factory=deque)  # by time of arrival
    outbox: deque[tuple[float, list[Up]]] = field(default_factory=deque)
    free_at: float = 0.0
    urgent: bool = False
    keys: set[int] = field(default_factory=set)

    def run_until(self, now: float) -> None:
        """Takes all turns that begin by then."""
        while self.free_at <= now:
            self._listen()
            self._send(self.urgent)
            if self.drafter.grow():
                self.figures.draft_steps += 1
                self.free_at += self.costs.draft
                self.cadence.turned(self.costs.draft / 1000)
                self._send(self.urgent)
            else:
                self._send(True)
                self.free_at = max(self.free_at, self.inbox[0][0]) if self.inbox else math.nextafter(now, math.inf)

    def _listen(self) -> None:
        while self.inbox and self.inbox[0][0] <= self.free_at:
            for message in self.inbox.popleft()[1]:
                for command in self.state.received(STREAM, message, 0.0):
                    match command:
                        case OpenSession():
                            self.drafter.open(command.key, command.tokens, command.params, command.prompt)
                            self.keys.add(command.key)
                            self.cadence.opened(self.free_at / 1000)
                        case CommitTokens():
                            moved = self.drafter.commit(command.key, command.tokens)
                            self.cadence.committed(self.free_at / 1000)
                            self.urgent = command.resend
                            if command.resend and moved.children:
                                resend(self.drafter.tree(command.key))
                        case CloseSession():
                            self.drafter.close(command.key)
                            self.keys.discard(command.key)

    def _send(self, wanted: bool) -> None:
        if not wanted and not self.cadence.due(self.free_at / 1000):
            return
        growths: list[Up] = []
        for key in self.keys:
            growth = self.state.growth(key, self.drafter.tree(key))
            if growth is not None:
                growths.append(growth)
                self.figures.nodes += len(growth.tokens)
        if growths:
            self.figures.messages += 1
            self.outbox.append((self.free_at + self.costs.latency, growths))
            self.cadence.sent(self.free_at / 1000, self.urgent)
            self.urgent = False


def simulate(
    request: GenerationRequest,
    output: list[int],
    drafter: ModelDrafter,
    costs: Costs,
    window: GoodputWindow,
    lookup: int,
) -> Figures:
    """One request whose output is known."""
    figures = Figures()
    draft = Draft(drafter, costs, figures)
    target = TargetState(MAX_TOKEN_ID, lookup=lookup)
    target.draft_joined(STREAM)
    session = target.session_opened(request.prompt, request.params)
    now, done = 0.0, 0

    def exchange() -> None:
        for messages in target.take_messages().values():
            draft.inbox.append((now + costs.latency, messages))
        draft.run_until(now)
        while draft.outbox and draft.outbox[0][0] <= now:
            for message in draft.outbox.popleft()[1]:
                assert isinstance(message, Growth)
                target.received(STREAM, message)

    while done < len(output):
        exchange()
        missed_at = now
        while not target.hit(session) and done and now < missed_at + costs.patience:
            now += 0.1
            exchange()
        figures.waited_ms += now - missed_at
        tree = target.mirror(session)
        nodes = window.choose([tree])[0].tolist() if target.hit(session) else []
        now += costs.step(1 + len(nodes)) + costs.overhead
        exchange()
        tokens = _walk(target, session, set(nodes), output[done:])
        path = [tree.path(tokens[: depth + 1]) for depth in range(len(tokens) - 1)]
        if nodes:
            window.observe(tree, np.asarray(nodes, np.int32), path)
        end = path[-1] if path else 0
        figures.tried += len(path) + bool((tree.parent[nodes] == end).any())
        figures.steps += 1
        figures.tokens += len(tokens)
        figures.accepted += len(path)
        figures.verified += len(nodes)
        figures.empty += not nodes
        done += len(tokens)
        figures.hits += target.tokens_committed(session, tokens)
    target.session_closed(session)
    draft.free_at = now = now + costs.draft + costs.latency
    exchange()
    draft.run_until(now + 2 * costs.latency)
    figures.ms = now
    return figures


def _walk(target: TargetState, session: int, nodes: set[int], output: list[int]) -> list[int]:
    """What the target would commit; the output may end before its walk does."""
    tree = target.mirror(session)

    def chosen(node: int) -> int:
        depth = int(tree.depth[node])
        return output[depth] if depth < len(output) else -1

    return [token for token in walk(tree, nodes, chosen) if token >= 0]


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    count: Annotated[int, typer.Option(help="prompts, the first of which only warm up")] = 8,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 128,
    target_ms: Annotated[str, typer.Option(help="rows:milliseconds of a target step")] = STEP_MS,
    draft_ms: Annotated[float, typer.Option(help="milliseconds of a draft step, bookkeeping and all")] = 2.8,
    overhead_ms: Annotated[float, typer.Option(help="milliseconds of the target beside its forward pass")] = 0.9,
    latency_ms: Annotated[float, typer.Option(help="milliseconds of a message")] = 0.35,
    patience_ms: Annotated[float, typer.Option(help="milliseconds a miss may wait")] = 0.0,
    lookup: Annotated[int, typer.Option(help="tokens that the target looks up by itself")] = 8,
    rows: Annotated[int, typer.Option(help="nodes expanded per draft step")] = GROWING.rows,
    children: Annotated[int, typer.Option(help="children kept of each")] = GROWING.children,
) -> None:
    """Prints what the pipeline would do at T = 0 and T = 1."""
    torch.set_num_threads(1)
    table = {int(step_rows): float(ms) for step_rows, ms in (pair.split(":") for pair in target_ms.split(","))}
    costs = Costs(table, draft_ms, overhead_ms, latency_ms, patience_ms)
    tokenizer = load_tokenizer(target)
    ids = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in prompts.read_text().splitlines()[:count]]
    target_runner, draft_runner = ModelRunner(target), ModelRunner(draft)
    shown = Table("")
    columns: list[dict[str, float]] = []
    for temperature in (0.0, 1.0):
        shown.add_column(f"T = {temperature:g}")
        cost = CostModel(target_runner.called_with)
        for known, milliseconds in table.items():
            cost.start(known, milliseconds)
        window = GoodputWindow(Calibration(), cost)
        drafter = ModelDrafter(draft_runner, Growing(rows=rows, children=children))
        total = Figures()
        for index, prompt in enumerate(track(ids, f"T = {temperature:g}", console=console)):
            params = SamplingParams(temperature, seed=index, max_tokens=tokens, ignore_eos=True)
            request = GenerationRequest(str(index), prompt, params)
            output = _known_output(target_runner, request)
            figures = simulate(request, output, drafter, costs, window, lookup)
            if index:
                total = Figures(**{name: getattr(total, name) + getattr(figures, name) for name in vars(total)})
        columns.append(total.row())
    for name in columns[0]:
        shown.add_row(name, *(str(column[name]) for column in columns))
    Console().print(shown)


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
