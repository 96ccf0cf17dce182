"""Does a pipelined pair beat the best sequential one? One stream, all contenders interleaved in one run.

    python benchmarks/pipeline.py --json build/pipeline.json

Contenders, on the same checkpoints, prompts and token counts, in an order that is shuffled anew for each prompt:
  plain, sequential         one core: the target alone; target and draft taking turns, at each fixed k
  ... lookup                the same with what the draft looks up in the text, as pipelined drafts do
  ... two cores             the same with two threads on two cores
  pipelined                 target and draft as two actors, a core each
tokens/s count decoding only: prefill is excluded, and so are the first prompts (warm-up). The best sequential contender is
the fastest on the same target core, with lookup or without.
"""

import json
import logging
import math
import os
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cluster.actors import TargetConfig
from cluster.draft import DraftStats
from cluster.drafters import NODE_COST_ON_CPUS, DraftConfig
from cluster.local import LocalCluster
from cluster.placement import Placement
from cluster.sequential import SequentialProcess
from cluster.target_stats import TargetStats
from engine.checkpoint import MODELS
from engine.drafters.model import Growing
from engine.runner import Dtype
from engine.text import load_tokenizer
from engine.types import GenerationRequest, SamplingParams

CHAINS = (1, 2, 3, 4, 5, 6, 8)  # fixed k of the sequential contender; the best counts
TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
_FLUSH_S = 10.0  # as for the other contenders, the text is handed out when a request ends
GROWING = Growing()
console = Console(stderr=True)


@dataclass
class Totals:
    """What one contender did over all prompts."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: int = 0
    tried: int = 0
    rates: dict[str, float] = field(default_factory=dict)  # tokens/s of each request that was decoded

    def add(self, request: str, tokens: int, seconds: float, steps: int, accepted: int, tried: int) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += steps
        self.accepted += accepted
        self.tried += tried
        if tokens:  # none where the end of the prompt brought the end of the text
            self.rates[request] = tokens / seconds

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds

    def over(self, other: "Totals") -> tuple[float, float | None]:
        """How many times as fast it was as another contender, by the geometric mean over requests; its standard error."""
        logs = [math.log(rate / other.rates[request]) for request, rate in self.rates.items() if request in other.rates]
        mean = math.exp(statistics.fmean(logs))
        return mean, round(mean * statistics.stdev(logs) / math.sqrt(len(logs)), 3) if len(logs) > 1 else None


def run_sequential(
    contender: SequentialProcess, request: GenerationRequest, k: int, totals: Totals, lookup: int = 0
) -> list[int]:
    """One prompt through the one-process contender; its tokens."""
    timed = contender.run(request, k, lookup)
    g = timed.generation
    totals.add(request.request_id, timed.tokens, timed.seconds, timed.steps, g.accepted, g.tried)
    return g.tokens


def run_pipelined(cluster: LocalCluster, request: GenerationRequest, totals: Totals) -> tuple[list[int], TargetStats]:
    """One prompt through the two actors; its tokens, and the target's statistics for it alone."""
    before: TargetStats = ray.get(cluster.targets[0].stats.remote())
    tokens = [token for chunk in cluster.stream(request) for token in chunk.tokens]
    after: TargetStats = ray.get(cluster.targets[0].stats.remote())
    spent = difference(after, before)
    totals.add(request.request_id, spent.decoded, spent.active_s, spent.sequence_steps, spent.accepted, spent.tried)
    return tokens, spent


def difference(after: TargetStats, before: TargetStats) -> TargetStats:
    """Counters of what happened in between."""
    names = [name for name, value in vars(after).items() if not isinstance(value, dict)]
    return TargetStats(**{name: getattr(after, name) - getattr(before, name) for name in names})


def measure(
    cluster: LocalCluster,
    one: SequentialProcess,
    two: SequentialProcess,
    requests: list[GenerationRequest],
    warm: int,
    chains: tuple[int, ...],
) -> dict[str, Any]:
    """All contenders over all requests, each prompt in an order of its own; the JSON's entry for one temperature."""
    rng = random.Random(0)
    totals: dict[str, Totals] = defaultdict(Totals)
    spent: list[TargetStats] = []
    differing: list[str] = []
    in_one_process: dict[str, tuple[SequentialProcess, int, int]] = {
        "plain": (one, 0, 0),
        "plain two cores": (two, 0, 0),
    }
    for k in chains:
        in_one_process[f"sequential {k}"] = one, k, 0
        in_one_process[f"sequential lookup {k}"] = one, k, GROWING.lookup
        in_one_process[f"sequential two cores {k}"] = two, k, 0
    draft_before: DraftStats = ray.get(cluster.drafts[0].stats.remote())
    for index, request in enumerate(track(requests, f"T = {requests[0].params.temperature:g}", console=console)):
        if index == warm:
            totals.clear()
            spent.clear()
            draft_before = ray.get(cluster.drafts[0].stats.remote())
        outputs: dict[str, list[int]] = {}
        order = ["pipelined", *in_one_process]
        rng.shuffle(order)
        for name in order:
            if name == "pipelined":
                outputs[name], stats = run_pipelined(cluster, request, totals[name])
                spent.append(stats)
            else:
                process, k, lookup = in_one_process[name]
                outputs[name] = run_sequential(process, request, k, totals[name], lookup)
        differing += [f"{request.request_id} {n}" for n, tokens in outputs.items() if tokens != outputs["plain"]]
    draft_after: DraftStats = ray.get(cluster.drafts[0].stats.remote())
    return summary(totals, spent, differing, (draft_before, draft_after), chains)


def summary(
    totals: dict[str, Totals],
    spent: list[TargetStats],
    differing: list[str],
    draft: tuple[DraftStats, DraftStats],
    chains: tuple[int, ...],
) -> dict[str, Any]:
    """The figures of one temperature; definitions in docs/ARCHITECTURE.md."""
    pipelined = totals["pipelined"]
    steps = sum(stats.sequence_steps for stats in spent)
    active = sum(stats.active_s for stats in spent)
    forward = sum(stats.forward_s for stats in spent)
    best = max(chains, key=lambda k: totals[f"sequential {k}"].tps)
    best_lookup = max(chains, key=lambda k: totals[f"sequential lookup {k}"].tps)
    fastest = max((f"sequential {best}", f"sequential lookup {best_lookup}"), key=lambda name: totals[name].tps)
    best_two = max(chains, key=lambda k: totals[f"sequential two cores {k}"].tps)
    draft_steps = draft[1].steps - draft[0].steps
    each = list(pipelined.rates.values())
    rates = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    ratio, error = pipelined.over(totals[fastest])
    return {
        "plain_tps": round(totals["plain"].tps, 1),
        "sequential_tps": round(totals[f"sequential {best}"].tps, 1),
        "sequential_k": best,
        "sequential_tps_by_k": {k: round(totals[f"sequential {k}"].tps, 1) for k in chains},
        "sequential_lookup_tps": round(totals[f"sequential lookup {best_lookup}"].tps, 1),
        "sequential_lookup_k": best_lookup,
        "sequential_best": fastest,
        "plain_two_cores_tps": round(totals["plain two cores"].tps, 1),
        "sequential_two_cores_tps": round(totals[f"sequential two cores {best_two}"].tps, 1),
        "sequential_two_cores_k": best_two,
        "pipelined_tps": round(pipelined.tps, 1),
        "pipelined_tps_quartiles": [round(rate, 1) for rate in rates],
        "pipelined_over_sequential": round(ratio, 3),
        "pipelined_over_sequential_error": error,
        "tokens_per_step": round(pipelined.tokens / steps, 3),
        "acceptance": round(pipelined.accepted / max(1, pipelined.tried), 3),
        "hit_rate": round(sum(stats.hits for stats in spent) / steps, 3),
        "empty_step_share": round(sum(stats.empty for stats in spent) / steps, 3),
        "target_idle": round(1 - forward / active, 3),
        "target_wait": round(sum(stats.wait_s for stats in spent) / active, 3),
        "verified_per_step": round(sum(stats.verified for stats in spent) / steps, 2),
        "target_step_ms": round(1000 * forward / sum(stats.steps for stats in spent), 2),
        "draft_node_cost": NODE_COST_ON_CPUS,
        "draft_step_ms": round(1000 * (draft[1].busy_s - draft[0].busy_s) / max(1, draft_steps), 2),
        "all_equal": not differing,
        "differing": differing,
        "tokens": pipelined.tokens,
    }


def requests_of(prompts: list[tuple[int, ...]], temperature: float, tokens: int) -> list[GenerationRequest]:
    """One request for each prompt."""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=tokens) for i in range(len(prompts))]
    return [
        GenerationRequest(f"t{temperature:g}-{i}", prompt, p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]


def report(results: dict[str, Any]) -> None:
    """The main figures as a table."""
    names = (
        "plain_tps",
        "sequential_tps",
        "sequential_lookup_tps",
        "plain_two_cores_tps",
        "sequential_two_cores_tps",
        "sequential_best",
        "pipelined_tps",
    )
    ratio = ("pipelined_over_sequential", "pipelined_over_sequential_error")
    more = (*ratio, "tokens_per_step", "acceptance", "hit_rate", "empty_step_share", "target_idle")
    table = Table("", *(key for key in ("T0", "T1") if key in results))
    for name in (*names, *more, "target_step_ms", "draft_step_ms", "all_equal"):
        table.add_row(name, *(str(results[key][name]) for key in ("T0", "T1") if key in results))
    console.print(table)


def main(
    target: Annotated[Path, typer.Option(help="checkpoint of the target")] = TARGET,
    draft: Annotated[Path, typer.Option(help="checkpoint of the draft")] = DRAFT,
    prompts: Annotated[Path, typer.Option(help="one JSON string a line")] = PROMPTS,
    json_file: Annotated[Path, typer.Option("--json", help="where the figures go")] = Path("build/pipeline.json"),
    count: Annotated[int, typer.Option(help="prompts, warm-up included")] = 20,
    warm: Annotated[int, typer.Option(help="of them, the first ones that are not counted")] = 4,
    tokens: Annotated[int, typer.Option(help="tokens per prompt")] = 128,
    chains: Annotated[str, typer.Option(help="fixed k to try")] = ",".join(map(str, CHAINS)),
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    invariant: Annotated[bool, typer.Option(help="bits that don't depend on the batch")] = False,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster of one machine, if none is to be started")
    ] = None,
) -> None:
    """Measures plain, sequential and pipelined decoding at T = 0 and T = 1."""
    tokenizer = load_tokenizer(target)
    texts = [json.loads(line) for line in prompts.read_text().splitlines()[:count]]
    ids = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    kind: Dtype = dtype  # type: ignore[assignment]
    cores = sorted(os.sched_getaffinity(0))[:2]
    first, both = Placement(cores=(cores[0],)), Placement(cores=tuple(cores), threads=2)
    config = TargetConfig(target, kind, invariant=invariant, flush_s=_FLUSH_S, places=("separate",), earlier=0)
    tried = tuple(int(k) for k in chains.split(","))
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    results: dict[str, Any] = {}
    with (
        SequentialProcess(target, draft, kind, first, invariant) as one,
        SequentialProcess(target, draft, kind, both, invariant) as two,
        LocalCluster(config, DraftConfig(draft, kind, shared=0), progress=console.print) as cluster,
    ):
        for key, temperature in (("T0", 0.0), ("T1", 1.0)):
            results[key] = measure(cluster, one, two, requests_of(ids, temperature, tokens), warm, tried)
            results[key] |= {"dtype": dtype, "mode": "invariant" if invariant else "fast"}
    report(results)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {json_file}")


if __name__ == "__main__":
    typer.run(main)
