"""What a simulation is asked: which of the modes is the fastest, and how many drafts a fleet needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.simulation.fleet import Fleet, simulate
from cluster.simulation.script import Acceptance, Script, draw_scripts, load_scripts
from engine.types import require

ENOUGH = 0.95  # of the throughput with a draft for each target
Values = dict[str, Any]
Source = Callable[[int], list[Script]]  # so many requests


@dataclass(frozen=True)
class Plan:
    """What is simulated: a fleet (its mode apart), its requests, and the chains that sequential speculation tries."""

    fleet: Fleet
    source: Source
    requests: int  # per target
    chains: Sequence[int]


def drawn(acceptance: Acceptance, prompt: int, output: int, seed: int) -> Source:
    """Requests of random tokens."""
    return lambda count: draw_scripts(acceptance, count, prompt, output, seed)


def recorded(path: Path, temperature: str) -> Source:
    """Requests that were recorded with real models, again and again; no KV is shared between the times."""
    scripts = load_scripts(path, temperature)
    require(bool(scripts), "profile", f"{path} holds no recording of {temperature}")

    def repeat(count: int) -> list[Script]:
        found = [(index, scripts[index % len(scripts)]) for index in range(count)]
        return [replace(s, request=replace(s.request, request_id=str(i), salt=i.to_bytes(8))) for i, s in found]

    return repeat


def compare(plan: Plan) -> dict[str, Values]:
    """The figures of each mode; of sequential speculation those of the best chain, which `k` names."""
    scripts = plan.source(plan.requests * plan.fleet.targets)
    modes: dict[str, Values] = {"plain": _figures(replace(plan.fleet, mode="plain"), scripts)}
    chains = {k: _figures(replace(plan.fleet, mode="sequential", chain=k), scripts) for k in plan.chains}
    if chains:
        best = max(chains, key=lambda k: chains[k]["tps"])
        modes["sequential"] = {
            **chains[best],
            "k": best,
            "tps_by_k": {k: values["tps"] for k, values in chains.items()},
        }
    modes["pipelined"] = _figures(replace(plan.fleet, mode="pipelined"), scripts)
    return modes


def _figures(fleet: Fleet, scripts: Sequence[Script]) -> Values:
    return simulate(fleet, scripts).figures()


def drafts_needed(plan: Plan, targets: Sequence[int]) -> list[Values]:
    """For each number of targets the fewest drafts that keep ENOUGH of what a draft for each target would give."""
    rows = []
    for count in targets:
        scripts = plan.source(plan.requests * count)
        tps: dict[int, float] = {}
        for drafts in (count, *range(1, count)):
            tps[drafts] = simulate(replace(plan.fleet, mode="pipelined", targets=count, drafts=drafts), scripts).tps
            if drafts < count and tps[drafts] >= ENOUGH * tps[count]:
                break
        needed = min(drafts for drafts in tps if tps[drafts] >= ENOUGH * tps[count])
        kept = {drafts: round(value / tps[count], 3) for drafts, value in sorted(tps.items())}
        rows.append({"targets": count, "drafts": needed, "tps": round(tps[needed], 1), "kept": kept})
    return rows
