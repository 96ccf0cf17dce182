"""What benchmarks/pipeline.py measured as the costs of a simulation, and what it should have said."""

import json
from dataclasses import replace
from pathlib import Path

from cluster.simulation.costs import Costs, measured_times
from cluster.simulation.fleet import Fleet, simulate
from cluster.simulation.plan import Plan, Source, Values, compare
from engine.budget import CostModel
from engine.drafters.model import Growing
from engine.step import MAX_WINDOW
from engine.types import InvalidRequest, require

_DRAFT_OVERHEAD_MS = 0.1  # of a draft step, beside what benchmarks/pipeline.py measures of it: messages, the loop
_LINE = (1, 2, 4, 8, 16, 32, 64)  # rows that a measured line is drawn through
_PACE = (1e-3, 1e6)  # tokens/s, and milliseconds of a step
_NEEDED = {  # what a figure may be, at least and at most
    **dict.fromkeys(("plain_tps", "pipelined_tps", "target_step_ms", "draft_step_ms"), _PACE),
    **dict.fromkeys(("tokens_per_step", "verified_per_step"), (0, 1e6)),
    **dict.fromkeys(("acceptance", "hit_rate", "target_wait"), (0, 1)),
    "target_idle": (0, 0.999),
}
_PERHAPS = {"draft_rows_each": (0, 512), "draft_node_cost": (0, 1e6)}  # 0 where an older run has none
_CHAINS = {str(length) for length in range(1, MAX_WINDOW + 1)}


def measured_plan(values: Values, source: Source, fleet: Fleet, requests: int, draft_times: CostModel | None) -> Plan:
    """What benchmarks/pipeline.py measured of one temperature, as costs; prefill is left out, as it does.

    A target's step is a straight line through plain decoding's and the pipeline's. A draft's level in sequential speculation
    follows from its shortest chain. draft_times: of a draft step in the pipeline, where the measured one is not to be used.
    """
    plain = 1000 / values["plain_tps"]
    slope = max(0.0, (values["target_step_ms"] - plain) / max(values["verified_per_step"], 1.0))
    target = measured_times({rows: plain + slope * (rows - 1) for rows in _LINE})
    step_ms = values["target_step_ms"] / (1 - values["target_idle"])
    overhead_ms = max(0.0, step_ms * (values["target_idle"] - values["target_wait"]))  # both are rounded
    limits = replace(fleet.limits, prefills=False)
    growing = Growing(each=int(values.get("draft_rows_each", 0)), node_cost=float(values.get("draft_node_cost", 0)))
    shared = replace(fleet, limits=limits, growing=growing, lookup=8, targets=1, drafts=1, streams=1, rate=None)
    chains = {int(k): float(tps) for k, tps in values["sequential_tps_by_k"].items()}
    shortest = min(chains)
    free = Costs(target, measured_times({1: 1e-6}))
    chain = simulate(replace(shared, costs=free, mode="sequential", chain=shortest), source(requests)).stats
    spent = 1000 * (chain.decoded / chains[shortest] - chain.forward_s) / chain.steps
    level = max(spent / shortest, 0.01)
    rows = growing.each or growing.rows
    step = values["draft_step_ms"] if draft_times is None else float(draft_times.table(rows)[rows])
    step += _DRAFT_OVERHEAD_MS
    draft = measured_times({1: min(level, step), rows: step})
    costs = Costs(target, draft, overhead_ms, fleet.costs.latency_ms)
    return Plan(replace(shared, costs=costs), source, requests, sorted(chains))


def load_measured(path: Path) -> dict[str, Values]:
    """What benchmarks/pipeline.py wrote; raises OSError, InvalidRequest."""
    try:
        found: object = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found or not all(isinstance(values, dict) for values in found.values()):
        raise InvalidRequest("measured", f"{path} was not written by benchmarks/pipeline.py")
    for temperature, values in found.items():
        good = {name: _within(values.get(name), *bounds) for name, bounds in _NEEDED.items()}
        good |= {name: _within(values.get(name, 0), *bounds) for name, bounds in _PERHAPS.items()}
        good["sequential_tps_by_k"] = _chains(values.get("sequential_tps_by_k"))
        for name in good:
            require(good[name], "measured", f"{path}: {name} of {temperature} is missing or makes no sense")
    return found


def _chains(value: object) -> bool:
    if not isinstance(value, dict) or not value or not value.keys() <= _CHAINS:
        return False
    return all(_within(tps, *_PACE) for tps in value.values())


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def check(plan: Plan, values: Values) -> list[Values]:
    """Predicted and measured figures side by side; those of the shortest chain were fitted, and are left out."""
    modes = compare(plan)
    shortest, pipelined = min(plan.chains), modes["pipelined"]
    pairs = [
        (f"sequential tokens/s, k = {k}", modes["sequential"]["tps_by_k"][k], values["sequential_tps_by_k"][str(k)])
        for k in plan.chains
        if k != shortest
    ]
    pairs.append(("pipelined tokens/s", pipelined["tps"], values["pipelined_tps"]))
    names = ("tokens_per_step", "acceptance", "hit_rate", "target_step_ms", "target_wait")
    pairs += [(name.replace("_", " "), pipelined[name], values[name]) for name in names]
    return [
        {
            "figure": name,
            "predicted": mine,
            "measured": theirs,
            "error": round(mine / theirs - 1, 3) if theirs else None,
        }
        for name, mine, theirs in pairs
    ]
