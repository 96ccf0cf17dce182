"""One GPU, one process: plain and speculative decoding of a large target, beside transformers and the memory's speed.

    python -m benchmarks.gpu --json FILE

The target is the bundled one, expanded to the shape of an 8B model (`paceline expand`; without 8B's large vocabulary), and
so has the bundled draft's acceptance at 8B's cost. Target and draft take turns, as they do where one GPU is all there
is; two GPUs are for `benchmarks/pipeline.py`. Ours are compiled unless told otherwise. Every prompt goes through all
contenders in an order that is shuffled anew, at each temperature others. Prefill and the first prompt don't count. Several
streams have the same prompts in every round: nobody looks earlier outputs up there. The floor is what reading the weights
takes at the rate of reading an array.

Where there is no GPU it runs on the CPU: choose a small shape then.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig

from benchmarks.bench import transformers_worker
from benchmarks.bench.checkpoints import DRAFT, PROMPTS, TARGET, Dtype, parameters
from benchmarks.bench.streams import Ask, Row, Stream, cut, many_streams, one_stream
from cluster.placement import Placement
from cluster.sequential import SequentialActor
from cluster.warm import warm_up
from engine.attention import chain_rows
from engine.automatic import growing_in_turns
from engine.budget import CostModel
from engine.decode import Generation, Speculation, decode_steps, record
from engine.drafters.model import ModelDrafter
from engine.expand import expand
from engine.runner import ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams

DTYPE: Dtype = "bfloat16"
CHAINS = (2, 3, 5, 8)
PASS_ROWS = (1, 8, 32, 128)
CONTEXT = 200  # tokens before a pass that is timed
READ_BYTES = 1 << 30
Run = Callable[[Ask], Stream]
console = Console(stderr=True)


def seconds(device: str, call: Callable[[], object], repeats: int) -> float:
    """The median time of a call, until the device has done it."""
    times = []
    for number in range(repeats + 2):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def read_bytes(target: Path) -> int:
    """Of weights in a pass: of the embedding it reads a few rows, unless that is the output layer too."""
    config = AutoConfig.from_pretrained(target, local_files_only=True)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return torch.finfo(getattr(torch, DTYPE)).bits // 8 * (parameters(target) - int(embedding))


def passes(runner: ModelRunner, repeats: int) -> list[Row]:
    """Passes of several sizes as they are run, and the time that reading the weights alone would take."""
    numbers = torch.ones(READ_BYTES // 4, device=runner.device)
    rate, weights = READ_BYTES / seconds(runner.device, numbers.sum, repeats), read_bytes(runner.path)
    lease = runner.pool.lease(CONTEXT + max(PASS_ROWS))
    found = []
    try:
        runner.forward([chain_rows(lease, 0, [1] * CONTEXT)])
        for rows in PASS_ROWS:
            batch, params = [chain_rows(lease, CONTEXT, [1] * rows, 0)], [SamplingParams()] * rows
            taken = seconds(runner.device, partial(runner.best, batch, params, None, 1), repeats)
            found.append({"rows": rows, "ms": round(1000 * taken, 3), "over_floor": round(taken * rate / weights, 3)})
    finally:
        runner.pool.release(lease)
    console.print(f"{weights / 1e9:.2f} GB of weights at {rate / 1e9:.0f} GB/s: {1000 * weights / rate:.2f} ms")
    return [{"floor_ms": round(1000 * weights / rate, 3), "gb_per_s": round(rate / 1e9, 1), **row} for row in found]


def ours(actor: SequentialActor, k: int | None) -> Run:
    """k: see SequentialActor.run."""

    def run(ask: Ask) -> Stream:
        timed = actor.run(_request(ask, "0"), k)
        return Stream(timed.arrivals, tuple(timed.generation.tokens))

    return run


def theirs(target: Any, draft: Any) -> Run:
    """transformers, with a draft assisted generation."""

    def run(ask: Ask) -> Stream:
        asked = {
            "prompts": [list(ask.prompt)],
            "seeds": [ask.seed],
            "temperature": ask.temperature,
            "tokens": ask.tokens,
        }
        [stream] = transformers_worker.run(target, draft, asked)["streams"]
        return Stream(tuple(stream["arrivals"]), tuple(stream["tokens"]))

    return run


def without_earlier(actor: SequentialActor, compile: bool) -> Speculation:
    """The actor's automatic choice, but that its lookups know nothing of earlier outputs."""
    device = actor.target.device
    draft = ModelRunner(DRAFT, dtype=DTYPE, device=device, compile=compile, weights="auto")
    warm_up(draft, CostModel())
    return replace(actor.automatic, drafter=ModelDrafter(draft, replace(growing_in_turns(device), shared=0)))


def together(target: ModelRunner, asks: Sequence[Ask], speculation: Speculation | None) -> tuple[float, list[Stream]]:
    """All prompts at the same time, plain where nothing speculates: seconds, prefill included, and the streams."""
    requests = [_request(ask, str(index)) for index, ask in enumerate(asks)]
    generations = [Generation(request) for request in requests]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in asks]
    started = time.monotonic()
    for index, outcome in decode_steps(target, requests, speculation):
        record(generations[index], outcome)
        if outcome.tokens:
            arrivals[index].append((time.monotonic() - started, len(outcome.tokens)))
    streams = [Stream(tuple(at), tuple(made.tokens)) for at, made in zip(arrivals, generations, strict=True)]
    return time.monotonic() - started, streams


def _request(ask: Ask, name: str) -> GenerationRequest:
    return GenerationRequest(name, ask.prompt, SamplingParams(ask.temperature, seed=ask.seed, max_tokens=ask.tokens))


def take_turns(contenders: dict[str, Run], asks: Sequence[Ask], ends: frozenset[int]) -> dict[str, list[Stream]]:
    """Every prompt through all of them; the first is for warming up."""
    rng = random.Random(0)
    streams: dict[str, list[Stream]] = {name: [] for name in contenders}
    for ask in track(asks, f"T = {asks[0].temperature:g}, one stream", console=console):
        for name in rng.sample(sorted(contenders), len(contenders)):
            streams[name].append(cut(contenders[name](ask), ends))
    return {name: held[1:] for name, held in streams.items()}


def main(
    layers: Annotated[int, typer.Option(help="of the target")] = 32,
    hidden_size: Annotated[int, typer.Option(help="of the target, a multiple of the bundled one's")] = 4224,
    intermediate_size: Annotated[int, typer.Option(help="of the target, a multiple likewise")] = 14336,
    count: Annotated[int, typer.Option(min=2, help="prompts of one stream, one of them to warm up")] = 11,
    tokens: Annotated[int, typer.Option(min=16, help="per prompt")] = 128,
    streams: Annotated[str, typer.Option(help="numbers of streams at the same time to try besides")] = "4,16,64",
    repeats: Annotated[int, typer.Option(help="of each pass, and of each number of streams")] = 3,
    compile: Annotated[bool, typer.Option(help="our target and draft by torch.compile")] = True,
    folder: Annotated[Path, typer.Option(help="where the expanded target is kept")] = Path("build/bench/models"),
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/gpu.json"),
) -> None:
    """Measures."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = folder / f"code-target-{layers}-{hidden_size}-{intermediate_size}"
    if not (target / "config.json").exists():
        with console.status("expanding the target"):
            expand(TARGET, layers, target, hidden_size, intermediate_size)
    with console.status("loading and warming up"):
        actor = SequentialActor(target, DRAFT, DTYPE, Placement(gpus=float(device == "cuda")), compile=compile)
        fresh = without_earlier(actor, compile)
        models = [transformers_worker.load(str(path), DTYPE).to(device) for path in (target, DRAFT)]
        transformers_worker.assists(models[1])
        transformers.logging.set_verbosity_error()
    tokenizer = load_tokenizer(TARGET)
    prompts = [tuple(tokenizer(json.loads(line))["input_ids"]) for line in PROMPTS.read_text().splitlines()]
    ends = frozenset({tokenizer.eos_token_id})
    name = torch.cuda.get_device_name() if device == "cuda" else device
    with torch.inference_mode():
        made: dict[str, Any] = {
            "device": name,
            "dtype": DTYPE,
            "compile": compile,
            "passes": passes(actor.target, 10 * repeats),
        }
    rows: list[Row] = []
    for place, temperature in enumerate((0.0, 1.0)):
        common = {"target_params": parameters(target), "temperature": temperature, "accounting": "total-cores"}
        own = prompts[place * count :] + prompts[: place * count]
        asks = [Ask(prompt, seed, temperature, tokens) for seed, prompt in enumerate(own)]
        contenders = {"transformers": theirs(models[0], None), "transformers-assisted": theirs(*models)}
        contenders |= {"paceline-plain": ours(actor, 0), "paceline-auto": ours(actor, None)}
        contenders |= {f"paceline-sequential-{k}": ours(actor, k) for k in CHAINS}
        for contender, held in take_turns(contenders, asks[:count], ends).items():
            rows.append({"contender": contender, "streams": 1, **common, **one_stream(held)})
        for number in map(int, filter(None, streams.split(","))):
            for contender, speculation in (("paceline-plain", None), ("paceline-auto", fresh)):
                title = f"T = {temperature:g}, {contender}, {number} streams"
                turns = track(range(repeats + 1), title, console=console)
                rounds = [together(actor.target, asks[:number], speculation) for _ in turns]
                rows.append({"contender": contender, "streams": number, **common, **many_streams(rounds[1:])})
        json_file.parent.mkdir(parents=True, exist_ok=True)  # what is there is kept, should the rest fail
        json_file.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")
    table = Table("T", "streams", "contender", "tokens/s", "of plain", box=None, title=name)
    for row in rows:
        plain = next(
            each["tokens_per_s"]
            for each in rows
            if each["contender"] == "paceline-plain"
            and all(each[key] == row[key] for key in ("streams", "temperature"))
        )
        rate = row["tokens_per_s"]  # None where all tokens came at once
        shown = ("-", "-") if rate is None or plain is None else (f"{rate:.1f}", f"{rate / plain:.2f}")
        table.add_row(f"{row['temperature']:g}", str(row["streams"]), row["contender"], *shown)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
