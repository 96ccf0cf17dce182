"""`paceline simulate --preset ssd-70b`: a 70B target with a 1B draft, predicted, beside what others have published."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from cluster.draft_state import MOST_TOLD
from cluster.simulation.costs import Costs, Roofline
from cluster.simulation.fleet import Fleet
from cluster.simulation.plan import Plan, Values, compare, drawn
from cluster.simulation.script import Acceptance
from cluster.simulation.target import Limits
from engine.drafters.model import Growing

PLAIN_TPS, SEQUENTIAL_TPS = 54.7, 161.8  # SSD's: what the assumptions are fitted to
H100_GB_PER_S, H200_GB_PER_S = 3350.0, 4800.0
TARGET_B, DRAFT_B = 70.0, 1.0  # billions of parameters
GB_PER_STEP = 2 * TARGET_B  # in bfloat16
REACHED = GB_PER_STEP * PLAIN_TPS / (4 * H100_GB_PER_S)  # of the memory's bandwidth
TFLOPS = 989.0 / 2  # of one device in bfloat16: half of what is advertised
DRAFT_FIXED_MS = 0.3
OVERHEAD_MS, LATENCY_MS = 0.5, 0.1
CHAINS = tuple(range(1, 13))
WIDER = Growing(rows=16, lookup=0)


@dataclass(frozen=True, slots=True)
class Published:
    """A system as its authors describe it."""

    name: str
    devices: int  # of the target
    gb_per_s: float  # of each device
    plain: str
    sequential: str
    pipelined: str


PUBLISHED = (
    Published("SSD, 4 + 1 H100", 4, H100_GB_PER_S, f"{PLAIN_TPS}", f"{SEQUENTIAL_TPS}", "255.8"),
    Published("nano-PEARL, H200 (4 + 1 assumed)", 4, H200_GB_PER_S, "", "", "225-276"),
    Published("SwiftSpec, 8 Hopper (7 + 1 H100 assumed)", 7, H100_GB_PER_S, "", "", "348"),
)


def costs(system: Published) -> Costs:
    """Rooflines of the target's devices, and of one more for the draft."""
    target = Roofline(TARGET_B, system.devices * system.gb_per_s * REACHED, system.devices * TFLOPS)
    draft = Roofline(DRAFT_B, system.gb_per_s * REACHED, TFLOPS, DRAFT_FIXED_MS)
    return Costs(target.times(), draft.times(), OVERHEAD_MS, LATENCY_MS)


def sequential_tps(rate: float, given: Costs) -> float:
    """Tokens per second of the best chain where every guess is right at this rate, whatever came before."""
    return max(
        1000 * sum(rate**i for i in range(k + 1)) / (given.target_ms(1 + k) + k * given.draft_ms(1)) for k in CHAINS
    )


def fitted_rate(given: Costs, tps: float) -> float:
    """The acceptance rate that gives so many tokens per second sequentially."""
    low, high = 0.01, 0.99
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sequential_tps(middle, given) < tps else (low, middle)
    return low


def predict(requests: int, prompt: int, output: int, seed: int, limits: Limits) -> list[Values]:
    """For each published system what it says, and what the simulation says of one stream on the same devices."""
    acceptance = Acceptance(fitted_rate(costs(PUBLISHED[0]), SEQUENTIAL_TPS))
    rows = []
    for system in PUBLISHED:
        fleet = Fleet(costs(system), limits=limits, seed=seed)
        plan = Plan(fleet, drawn(acceptance, prompt, output, seed), requests, CHAINS[2::2])
        modes = compare(plan)
        wider = replace(fleet, growing=WIDER)
        modes["wider"] = compare(replace(plan, fleet=wider, chains=()))["pipelined"]
        published = {"plain": system.plain, "sequential": system.sequential, "pipelined": system.pipelined}
        rows.append({"system": system.name, "published": published, "predicted": modes})
    return rows


def preset_table(rows: Sequence[Values]) -> Table:
    """Tokens per second of one stream."""
    table = Table("tokens/s, one stream, 70B + 1B", "plain", "sequential", "pipelined", f"... with {WIDER.rows} rows")
    for row in rows:
        published, predicted = row["published"], row["predicted"]
        table.add_row(row["system"], *published.values(), "")
        cells = [f"{predicted[mode]['tps']:.0f}" for mode in (*published, "wider")]
        cells[1] += f" (k = {predicted['sequential']['k']})"
        table.add_row("    predicted", *cells, end_section=True)
    return table


def assumptions() -> str:
    """Everything that the prediction rests on."""
    given = costs(PUBLISHED[0])
    rate = fitted_rate(given, SEQUENTIAL_TPS)
    shares = ", ".join(f"{share:g}" for share in Acceptance().following)
    knee = TFLOPS * 4 / TARGET_B * given.target_ms(1) / 2
    points = (
        f"every target reaches the same share of {H100_GB_PER_S:g} GB/s (H100) or {H200_GB_PER_S:g} GB/s (H200), on any "
        "number of devices, and so does the draft; what nano-PEARL and SwiftSpec ran, on how many devices, is guessed",
        f"half of {2 * TFLOPS:g} TFLOPS is reached: a target step costs the same for up to {knee:.0f} rows; what attention "
        "reads of KV is left out",
        f"a draft step takes {given.draft_ms(1):.2f} ms on one H100: its weights, and {DRAFT_FIXED_MS} ms beside",
        f"a message takes {LATENCY_MS} ms, and a pipelined target's step {OVERHEAD_MS} ms beside its pass, others' none",
        f"where the first guess is wrong, the second to sixth are right at shares of {shares}; this and the spread of "
        "confidences are the bundled pair's at T = 1",
        "guesses are right independently of each other, as often as their confidences say; no text repeats itself",
        f"pipelined: trees as by default ({Growing().max_nodes} nodes, {MOST_TOLD} told), {Growing().rows} rows a draft "
        f"step by default, or {WIDER.rows}",
    )
    fitted = (
        f"Fitted: SSD's plain {PLAIN_TPS} tokens/s makes a target step of {1000 / PLAIN_TPS:.1f} ms, {REACHED:.0%} of what "
        f"four H100 could read ({GB_PER_STEP:g} GB in bfloat16); its sequential {SEQUENTIAL_TPS} makes an acceptance rate "
        f"of {rate:.3f}. Everything else is assumed, and was not published with the figures above:"
    )
    return "\n".join([fitted, *(f"- {point}" for point in points)])
