"""What Serve costs: 32 streams read through the Serve application's HTTP, and from a target actor directly.

    python -m benchmarks.serving --json build/serving.json

Both have a target of the same options in a process of its own, with a draft of its own if one is asked for; they take turns
in one run, in the same Ray. The target is the bundled one, expanded until a step of 32 sequences takes long enough
(`paceline expand`: more layers, the same outputs). Its thread has the first core to itself as far as pinning can do that, a
draft's the second; everything else goes where there is room: Ray, Serve's controller and proxy, the ingress, and the
client, which is this process. It reads sockets as they come and looks at the text only afterwards; from an actor it reads a
reference a chunk, as the ingress does. tokens/s count everything, from the first request sent to the last stream's end.
"""

import asyncio
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray import serve
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port
from cluster.local import LocalCluster, start_ray
from cluster.placement import Placement
from cluster.target_stats import TargetStats
from deployments.app import draft_config, target_config
from deployments.config import ModelOptions, ServeConfig
from deployments.config_load import parse_config
from deployments.serve import APPLICATION, deploy, prepare, withdraw
from engine.checkpoint import MODELS
from engine.expand import expand
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
_WRITTEN = re.compile(rb'"completion_tokens":(\d+)')
console = Console(stderr=True)

Read = Callable[[GenerationRequest], Awaitable[int]]  # the whole stream; how many tokens it had


@dataclass(frozen=True, slots=True)
class Row:
    """One round of all streams."""

    contender: str
    tokens_per_s: float
    seconds: float
    tokens: int
    step_ms: float  # mean of the forward passes
    tokens_per_step: float  # of one sequence


def make_config(target: Path, draft: Path | None, flush_s: float, http_port: int) -> ServeConfig:
    """What is served; the actors beside it are made of the same."""
    cores = sorted(os.sched_getaffinity(0))
    model: dict[str, Any] = {
        "name": "bench",
        "target": {"checkpoint": str(target), "flush_s": flush_s, "replicas": {"cores": cores[:1]}},
    }
    if draft is None:
        model["target"]["lookup"] = 0  # both then take the same steps
    if draft is not None:
        own = {"placement": "separate", "host": "127.0.0.1", "replicas": {"cores": cores[1:2]}}
        model["draft"] = {"checkpoint": str(draft), **own}
    return parse_config({"models": [model], "http": {"port": http_port}, "grpc": {"port": None}})


def start_actors(model: ModelOptions) -> LocalCluster:
    """The contender without Serve."""
    draft = draft_config(model, model.draft) if model.draft is not None else None
    resources = [model.target.replicas, *([model.draft.replicas] if model.draft is not None else [])]
    first, *others = [Placement(each.cores, each.threads) for each in resources]
    return LocalCluster(
        target_config(model.name, model.target, drafted=draft is not None), draft, placements=([first], others)
    )


def from_actor(actor: Any) -> Read:
    """Reads as the ingress does: a reference a chunk."""

    async def read(request: GenerationRequest) -> int:
        tokens = 0
        async for reference in actor.generate.options(num_returns="streaming").remote(request):
            tokens += len((await reference).tokens)
        return tokens

    return read


def over_http(port: int) -> Read:
    """Reads as a light client does: bytes first."""

    async def read(request: GenerationRequest) -> int:
        params = request.params
        fields = {"prompt": list(request.prompt), "temperature": params.temperature, "seed": params.seed}
        limits = {"max_tokens": params.max_tokens, "ignore_eos": True}
        body = {**fields, **limits, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
        answer = await reader.read(-1)
        writer.close()
        if not (found := _WRITTEN.search(answer)):
            raise SystemExit(f"no usage in the answer: {answer[-500:]!r}")
        return int(found[1])

    return read


def run_round(
    contender: str, read: Read, stats: Callable[[], TargetStats], requests: list[GenerationRequest], number: int
) -> Row:
    """All streams at the same time."""
    mine = [replace(request, request_id=f"{number}-{request.request_id}") for request in requests]

    async def read_all() -> int:
        return sum(await asyncio.gather(*(read(request) for request in mine)))

    before = stats()
    started = time.monotonic()
    tokens = asyncio.run(read_all())
    seconds = time.monotonic() - started
    after = stats()
    if tokens != sum(request.params.max_tokens for request in requests):
        raise SystemExit(f"{contender}: {tokens} tokens came")
    step_ms = 1000 * (after.forward_s - before.forward_s) / (after.steps - before.steps)
    per_step = (after.decoded - before.decoded) / (after.sequence_steps - before.sequence_steps)
    return Row(contender, round(tokens / seconds, 1), round(seconds, 2), tokens, round(step_ms, 1), round(per_step, 3))


def measure(config: ServeConfig, requests: list[GenerationRequest], rounds: int) -> list[Row]:
    """The contenders in turn. What their windows and prefix caches learn from a first round is not counted."""
    (model,) = config.models
    start_ray()
    deploy(prepare(config, lambda text: None), lambda text: None)
    handle: Any = serve.get_deployment_handle(model.target_deployment, APPLICATION)
    with start_actors(model) as cluster:
        actor = cluster.targets[0]
        contenders: dict[str, tuple[Read, Callable[[], TargetStats]]] = {
            "actors": (from_actor(actor), lambda: ray.get(actor.stats.remote())),
            "http": (over_http(config.http.port), lambda: handle.stats.remote().result()),
        }
        while model.draft is not None and not contenders["http"][1]().drafts:
            time.sleep(0.1)
        rows = []
        for number in range(rounds + 1):
            for name, (read, stats) in contenders.items():
                row = run_round(name, read, stats, requests, number)
                console.print(f"round {number} {row}")
                rows += [row] if number else []
    withdraw(config)
    ray.shutdown()
    return rows


def summary(rows: list[Row]) -> dict[str, Any]:
    """Medians of the rounds, and their ratio."""
    medians = {
        name: statistics.median(row.tokens_per_s for row in rows if row.contender == name)
        for name in ("actors", "http")
    }
    steps = {
        name: round(statistics.median(row.step_ms for row in rows if row.contender == name), 1) for name in medians
    }
    return {
        "actors_tps": medians["actors"],
        "http_tps": medians["http"],
        "http_over_actors": round(medians["http"] / medians["actors"], 3),
        "step_ms": steps,
    }


def report(results: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table("round", *results["rows"][0])
    for number, row in enumerate(results["rows"]):
        table.add_row(str(number // 2 + 1), *(str(value) for value in row.values()))
    console.print(table)
    console.print_json(data=results["summary"])


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/serving.json"),
    layers: Annotated[int, typer.Option(help="of the target, expanded")] = 12,
    draft: Annotated[bool, typer.Option(help="with a draft on the second core, too")] = False,
    streams: Annotated[int, typer.Option(help="at the same time")] = 32,
    tokens: Annotated[int, typer.Option(help="of each")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    flush: Annotated[float, typer.Option(help="seconds that tokens are gathered for one chunk")] = 0.05,
    rounds: Annotated[int, typer.Option(help="of each, a warm-up apart")] = 3,
) -> None:
    """Measures tokens/s through HTTP and from the actors."""
    tokenizer = load_tokenizer(TARGET)
    requests = []
    for index, line in enumerate(PROMPTS.read_text().splitlines()[:streams]):
        params = SamplingParams(temperature, seed=index, max_tokens=tokens, ignore_eos=True)
        requests.append(GenerationRequest(str(index), tuple(tokenizer(json.loads(line))["input_ids"]), params))
    with tempfile.TemporaryDirectory() as folder:
        expand(TARGET, layers, Path(folder))
        config = make_config(Path(folder), DRAFT if draft else None, flush, free_port())
        rows = measure(config, requests, rounds)
    settings = {"layers": layers, "draft": draft, "streams": streams, "tokens": tokens, "flush_s": flush}
    results = {
        "settings": {**settings, "temperature": temperature},
        "summary": summary(rows),
        "rows": [asdict(row) for row in rows],
    }
    report(results)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {json_file}")


if __name__ == "__main__":
    typer.run(main)
