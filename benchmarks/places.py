"""Where drafts run: in a replica on the other core, in the target's process, nowhere, or where the target finds it fastest;
"off": without lookups, too.

    python -m benchmarks.places --json FILE

A target for each of them, on the first core; in every round each has the same prompts, in an order that is
shuffled anew, as many at a time as there are streams. The first round doesn't count. Prompts are new in every round, as
long as that leaves one for each stream. Tokens per second of decoding, prompts apart (TargetStats.decoded, active_s).
Outputs are compared; in float32 those of two contenders may part at ties.
"""

import json
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.bench.own import TimedTarget, request_of
from benchmarks.bench.servers import KV_TOKENS
from benchmarks.bench.streams import Ask, Stream
from cluster.actors import TargetConfig
from cluster.best_place import PLACES, Place
from cluster.drafters import DraftConfig
from cluster.local import LocalCluster, start_ray
from cluster.placement import Placement
from cluster.target_stats import TargetStats
from engine.checkpoint import MODELS
from engine.text import load_tokenizer

CONTENDERS: dict[str, tuple[Place, ...]] = {**{place: (place,) for place in PLACES}, "auto": PLACES}
_ALONE = 12  # prompts in a round of one stream, at most; of more, three for each


@dataclass
class Row:
    """One contender, over the rounds that count."""

    contender: str
    streams: int
    temperature: float
    tokens: int = 0
    seconds: float = 0.0
    sequence_steps: int = 0
    places: dict[str, int] = field(default_factory=dict)  # steps
    rounds: list[float] = field(default_factory=list)  # tokens per second of each

    def add(self, before: TargetStats, after: TargetStats) -> None:
        """A round."""
        tokens, seconds = after.decoded - before.decoded, after.active_s - before.active_s
        self.tokens += tokens
        self.seconds += seconds
        self.sequence_steps += after.sequence_steps - before.sequence_steps
        for place, steps in after.places.items():
            self.places[place] = self.places.get(place, 0) + steps - before.places[place]
        self.rounds.append(round(tokens / seconds, 1))

    @property
    def tokens_per_s(self) -> float:
        """While at least one sequence decoded."""
        return self.tokens / self.seconds


def start(target: Path, draft: Path, places: Sequence[Place], streams: int) -> LocalCluster:
    """A target with these places, and a draft replica if it is one of them."""
    cores = sorted(os.sched_getaffinity(0))
    drafting = DraftConfig(draft, "float32")
    config = TargetConfig(
        target,
        "float32",
        kv_tokens=max(KV_TOKENS, 2048 * streams),
        max_batch=streams,
        flush_s=0.0,
        draft=drafting,
        places=tuple(places),
    )
    separate = "separate" in places
    where = [Placement(cores=(cores[0],))], [Placement(cores=(cores[-1],))] if separate else []
    return LocalCluster(config, drafting if separate else None, placements=where, target_actor=TimedTarget)


def run(clusters: dict[str, LocalCluster], asks: Sequence[Ask], number: int, rows: dict[str, Row]) -> None:
    """A round: everybody, in any order."""
    order = list(clusters)
    random.Random(number).shuffle(order)
    outputs: set[tuple[tuple[int, ...], ...]] = set()
    for name in order:
        actor: Any = clusters[name].targets[0]
        before: TargetStats = ray.get(actor.stats.remote())
        requests = [request_of(ask, f"{number}-{index}") for index, ask in enumerate(asks)]
        streams: list[Stream] = ray.get(actor.timed.remote(requests))
        outputs.add(tuple(stream.tokens for stream in streams))
        if number:
            rows[name].add(before, ray.get(actor.stats.remote()))
    if len(outputs) > 1:
        Console(stderr=True).print(f"round {number}: outputs differ (ties?)")


def round_size(streams: int, rounds: int, prompts: int) -> int:
    """Prompts in a round: few enough that none comes again, unless that were less than streams; outputs are remembered."""
    wanted, new = _ALONE if streams == 1 else 3 * streams, prompts // (rounds + 1)
    return min(wanted, new) if new >= streams else wanted


def table_of(rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table("streams", "T", "place", "tokens/s", "tokens/step", "of the best", "steps by place")
    for row in rows:
        same = [each for each in rows if (each.streams, each.temperature) == (row.streams, row.temperature)]
        best = max(each.tokens_per_s for each in same if each.contender != "auto")
        cells = f"{row.tokens_per_s:.0f}", f"{row.tokens / row.sequence_steps:.2f}", f"{row.tokens_per_s / best:.2f}"
        steps = ", ".join(f"{place} {number}" for place, number in row.places.items() if number)
        table.add_row(str(row.streams), f"{row.temperature:g}", row.contender, *cells, steps)
    return table


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = MODELS / "code-target",
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = MODELS / "code-draft",
    streams: Annotated[str, typer.Option(help="requests at a time")] = "1,16",
    temperatures: Annotated[str, typer.Option(help="0 is greedy")] = "0,1",
    rounds: Annotated[int, typer.Option(help="that count, one to warm up before")] = 4,
    tokens: Annotated[int, typer.Option(help="per prompt, at most")] = 128,
    file: Annotated[Path, typer.Option("--json", help="where the rows go")] = Path("build/places.json"),
) -> None:
    """Measures one contender after the other, in turns."""
    tokenizer = load_tokenizer(target)
    lines = (MODELS / "heldout.jsonl").read_text().splitlines()
    prompts = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in lines]
    found: list[Row] = []
    start_ray()
    for count in map(int, streams.split(",")):
        for temperature in map(float, temperatures.split(",")):
            rows = {name: Row(name, count, temperature) for name in CONTENDERS}
            with ExitStack() as stack:
                clusters = {
                    name: stack.enter_context(start(target, draft, places, count))
                    for name, places in CONTENDERS.items()
                }
                each = round_size(count, rounds, len(prompts))
                for number in range(rounds + 1):
                    numbers = range(number * each, (number + 1) * each)
                    asks = [Ask(prompts[n % len(prompts)], n, temperature, tokens) for n in numbers]
                    run(clusters, asks, number, rows)
            found += rows.values()
            Console().print(table_of(list(rows.values())))
    file.parent.mkdir(parents=True, exist_ok=True)
    values = [{**asdict(row), "tokens_per_s": round(row.tokens_per_s, 1)} for row in found]
    file.write_text(json.dumps(values, indent=1) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
