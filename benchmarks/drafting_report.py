"""What the drafting benchmark makes of its rows: the printed table, the one in the documentation, the picture."""

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from engine.types import require

Row = dict[str, Any]

PLAIN, PEER, AUTO = "plain", "transformers-assisted", "auto"
START, END = "<!-- table -->", "<!-- /table -->"
_SPLITS = 200  # of the prompts into halves
_NEAR_BEST, _NO_LOSS = 0.95, 0.98  # of the best hand-picked row's speed; of plain's
_COLOURS = (  # one for each drafter, the peer's is grey
    *("#2f7f93", "#d9822b", "#7a6fb0", "#5a9e6f", "#b0576f", "#8c7b5a"),
    *("#4f6d9e", "#a0a04a", "#c9a0c9", "#3d3d3d", "#7fc4c4", "#e0b080"),
)
_COLUMNS = (
    *("workload", "temperature", "drafter", "window", "tokens_per_step", "acceptance"),
    *("tokens_per_s", "over_plain", "over_plain_quartiles", "over_transformers", "equal"),
)


def full_table(rows: Sequence[Row]) -> Table:
    """Every row."""
    table = Table(*(name.replace("_", " ").replace("temperature", "T") for name in _COLUMNS))
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in _COLUMNS))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{part:.2f}" for part in value)
    return "" if value is None else str(value)


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a key, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def best(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The fastest of the rows that have these values."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return max(found, key=lambda row: float(row["over_plain"]), default=None)


def markdown(rows: Sequence[Row]) -> str:
    """For each temperature: each drafter with its best window, then each window with its best drafter."""
    parts = []
    for temperature in distinct(rows, "temperature"):
        here = [row for row in rows if row["temperature"] == temperature]
        count, tokens = here[0]["prompts"], here[0]["max_tokens"]
        parts.append(
            f"**T = {temperature:g}** ({count} prompts of {tokens} tokens a workload). Tokens/s over plain, median of the"
            " prompts; in brackets tokens per step and the best window, or the best drafter.\n"
        )
        parts.append(_grid(here, "drafter", "window"))
        windows = [row for row in here if row["drafter"] not in (PLAIN, PEER, AUTO)]
        parts.append(_grid(windows, "window", "drafter"))
    return "\n".join(parts)


def _grid(rows: Sequence[Row], key: str, other: str) -> str:
    workloads = distinct(rows, "workload")
    lines = [f"| {key} | {' | '.join(workloads)} |", "|---" * (len(workloads) + 1) + "|"]
    for name in distinct(rows, key):
        found = [best(rows, workload=workload, **{key: name}) for workload in workloads]
        cells = [
            f"{row['over_plain']:.2f} ({row['tokens_per_step']:.2f}, {row[other]})" if row else "" for row in found
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def update(path: Path, rows: Sequence[Row]) -> None:
    """Writes the table between the markers of a page. Raises InvalidRequest when they are missing."""
    before, start, rest = path.read_text().partition(START)
    _, end, after = rest.partition(END)
    require(bool(start and end), "update", f"{path} needs a line {START} and a line {END}")
    path.write_text(f"{before}{START}\n\n{markdown(rows)}\n{END}{after}")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s over plain of each drafter with its best window: a group a workload, a plot a temperature."""
    temperatures, workloads = distinct(rows, "temperature"), distinct(rows, "workload")
    drafters = [name for name in distinct(rows, "drafter") if name != PLAIN]
    width = 0.8 / max(1, len(drafters))
    figure = Figure(figsize=(10, 3.6 * len(temperatures)), layout="constrained")
    for axes, temperature in zip(figure.subplots(len(temperatures), squeeze=False)[:, 0], temperatures, strict=True):
        for index, drafter in enumerate(drafters):
            tops = [best(rows, temperature=temperature, workload=name, drafter=drafter) for name in workloads]
            x = [group + (index + 0.5) * width - 0.4 for group in range(len(workloads))]
            y = [row["over_plain"] if row else 0.0 for row in tops]
            reach = [row["over_plain_quartiles"] if row else [0.0, 0.0] for row in tops]
            errors = [
                [max(0.0, top - low) for top, (low, _) in zip(y, reach, strict=True)],
                [max(0.0, high - top) for top, (_, high) in zip(y, reach, strict=True)],
            ]
            colour = "#bbbbbb" if drafter == PEER else _COLOURS[index % len(_COLOURS)]
            axes.bar(x, y, width, yerr=errors, ecolor="#555555", color=colour, label=drafter)
        axes.axhline(1.0, color="#555555", linewidth=1)
        axes.set_xticks(range(len(workloads)), workloads)
        axes.set(title=f"T = {temperature:g}, best window of each drafter", ylabel="tokens/s over plain")
        axes.legend(frameon=False, ncols=2, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def automatic(rows: Sequence[Row]) -> list[str]:
    """Whether the automatic choice is near the best hand-picked row, and never slower than plain: a line a workload."""
    lines = []
    for temperature in distinct(rows, "temperature"):
        for workload in distinct(rows, "workload"):
            here = [row for row in rows if row["workload"] == workload and row["temperature"] == temperature]
            auto = best(here, drafter=AUTO)
            picked = [row for row in here if row["drafter"] not in (PLAIN, PEER, AUTO)]
            if auto is not None and picked:
                lines.append(_verdict(auto, picked))
    return lines


def pooled(runs: Sequence[Sequence[Row]]) -> list[str]:
    """The same over several runs of different prompts, by geometric means over all prompts, for rows that all runs have."""
    lines = []
    everything = [row for rows in runs for row in rows]
    for temperature in distinct(everything, "temperature"):
        for workload in distinct(everything, "workload"):
            each = _speeds(runs, temperature, workload)
            auto = next((logs for (drafter, _), logs in each.items() if drafter == AUTO), None)
            picked = {name: logs for name, logs in each.items() if name[0] not in (PLAIN, PEER, AUTO)}
            if auto is None or not picked:
                lines.append(f"left out: {workload}, T = {temperature:g}, which not all files have")
                continue
            top = max(picked, key=lambda name: statistics.fmean(picked[name]))
            gains = [ours - other for ours, other in zip(auto, picked[top], strict=True)]
            share, over_plain = math.exp(statistics.fmean(gains)), math.exp(statistics.fmean(auto))
            good = share >= _NEAR_BEST and over_plain >= _NO_LOSS
            lines.append(
                f"{'ok' if good else 'SHORT'}: {workload}, T = {temperature:g}, {len(auto)} prompts: auto is"
                f" {over_plain:.2f} of plain, {share:.2f} of the best ({', '.join(top)}), standard error"
                f" {_standard_error(gains):.2f}"
            )
    return lines


def _speeds(runs: Sequence[Sequence[Row]], temperature: float, workload: str) -> dict[tuple[str, str], list[float]]:
    """Logarithms of each drafter's and window's speeds over plain, for every prompt of every run."""
    by_name = [
        {
            (row["drafter"], row["window"]): row["over_plain_each"]
            for row in rows
            if row["workload"] == workload and row["temperature"] == temperature
        }
        for rows in runs
    ]
    common = [name for name in by_name[0] if all(name in found for found in by_name)]
    return {name: [math.log(speed) for found in by_name for speed in found[name]] for name in common}


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _verdict(auto: Row, picked: Sequence[Row]) -> str:
    top = max(picked, key=lambda row: float(row["over_plain"]))
    share = auto["over_plain"] / top["over_plain"]
    good = share >= _NEAR_BEST and auto["over_plain"] >= _NO_LOSS
    line = (
        f"{'ok' if good else 'SHORT'}: {auto['workload']}, T = {auto['temperature']:g}: auto is {auto['over_plain']:.2f} of"
        f" plain, {share:.2f} of the best ({top['drafter']}, {top['window']})"
    )
    if auto["prompts"] < 2 or any("over_plain_each" not in row for row in (auto, *picked)):
        return line
    low, middle, high = statistics.quantiles(_split_shares(auto, picked), n=4, method="inclusive")
    return f"{line}; picked on half of the prompts, held against it on the others: {middle:.2f} ({low:.2f}-{high:.2f})"


def _split_shares(auto: Row, picked: Sequence[Row]) -> list[float]:
    """Auto over the best of the others, which one half of the prompts picks and the other half measures, in many splits.

    The best of many noisy rows is partly a lucky one: on prompts that didn't pick it there is no luck left.
    """
    rng, count = random.Random(0), auto["prompts"]
    shares = []
    for _ in range(_SPLITS):
        order = rng.sample(range(count), count)
        picking, measuring = order[: count // 2], order[count // 2 :]
        top = max(picked, key=lambda row: _middle(row, picking))
        shares.append(_middle(auto, measuring) / _middle(top, measuring))
    return shares


def _middle(row: Row, prompts: Sequence[int]) -> float:
    """The median over some prompts of a row's speed over plain."""
    each: list[float] = row["over_plain_each"]
    return statistics.median(each[index] for index in prompts)
