"""The picture of `make bench`: tokens/s of all contenders with one stream, then closed and open loops."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, SubFigure

from benchmarks.bench.streams import Row

_OURS = ("#8cc7d1", "#4fa7b8", "#1d5361", "#7fb5a0", "#2b7a5b", "#b5d99c")
_PEERS = ("#5a5a5a", "#aaaaaa", "#d9822b", "#e8c04a", "#b0576f", "#7a6fb0")
_BAR, _AROUND, _LOOP = 0.26, 1.1, 3.4  # inches: a bar, what surrounds bars, a line of loops
Line = tuple[str, str, list[list[Row]]]  # loop, title, rows of each plot


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a key, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """One for each contender: ours are of one family, and come last. A peer has the same one behind HTTP."""
    names = [str(name) for name in distinct(rows, "contender")]
    ours = [name for name in names if name.startswith("paceline")]
    peers = {name: name.removesuffix("-served") for name in names if name not in ours}
    kinds = sorted(set(peers.values()))
    return {name: _PEERS[kinds.index(kind) % len(_PEERS)] for name, kind in peers.items()} | {
        name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Lines of plots: one stream, a line for each accounting and temperature and a plot for each target; then loops.

    What was not measured has no plot.
    """
    held = [row for row in rows if row["tokens_per_s"] is not None]
    lines, colour = _lines(held), colours(held)
    heights = [_height(line) for line in lines] or [1.0]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)  # type: ignore[union-attr,call-arg]
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (loop, title, plots) in zip(parts, lines, strict=False):
        part.suptitle(title, fontsize="medium", fontweight="bold")
        if loop == "prompts":
            _bars(part, plots, colour)
        else:
            _curves(part, plots, loop, colour)
    figure.savefig(path, dpi=110)


def _lines(rows: Sequence[Row]) -> list[Line]:
    alone = [row for row in rows if row["loop"] == "prompts"]
    lines: list[Line] = []
    for accounting in distinct(alone, "accounting"):
        for temperature in distinct(alone, "temperature"):
            here = [row for row in alone if (row["accounting"], row["temperature"]) == (accounting, temperature)]
            title = f"one stream, T = {temperature:g}, {accounting}: tokens/s behind the prefill, median and quartiles"
            lines.append(("prompts", title, _apart(here, "target_params")))
    titles = {"closed": "tokens/s, prefill included", "open": "requests/s within the limits, by requests/s that came"}
    for loop, said in titles.items():
        here = [row for row in rows if row["loop"] == loop]
        if here:
            title = f"{loop} loops, {_size(here)}, {here[0]['accounting']}: {said}"
            lines.append((loop, title, _apart(here, "temperature")))
    return [line for line in lines if line[2]]


def _apart(rows: Sequence[Row], key: str) -> list[list[Row]]:
    return [[row for row in rows if row[key] == value] for value in distinct(rows, key)]


def _height(line: Line) -> float:
    loop, _, plots = line
    names = distinct((row for rows in plots for row in rows), "contender")
    return _AROUND + _BAR * len(names) if loop == "prompts" else _LOOP


def _size(rows: Sequence[Row]) -> str:
    return f"{rows[0]['target_params'] / 1e6:.0f}M parameters"


def _bars(part: SubFigure, plots: Sequence[Sequence[Row]], colour: dict[str, str]) -> None:
    """One bar for each contender, at the same height in all plots; its speed beside it."""
    found = distinct((row for rows in plots for row in rows), "contender")
    names = [name for name in colour if name in found]
    for axes, rows in zip(part.subplots(1, len(plots), squeeze=False, sharey=True)[0], plots, strict=True):
        places = [names.index(row["contender"]) for row in rows]
        speeds = [row["tokens_per_s"] for row in rows]
        ends = [max(row["tokens_per_s"], row["spread"][1]) for row in rows]
        low = [max(0.0, row["tokens_per_s"] - row["spread"][0]) for row in rows]
        high = [end - speed for end, speed in zip(ends, speeds, strict=True)]
        filled = [colour[row["contender"]] for row in rows]
        axes.barh(places, speeds, 0.8, xerr=[low, high], ecolor="#333333", color=filled)
        for place, end, speed in zip(places, ends, speeds, strict=True):
            axes.annotate(f"{speed:.0f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(0, 1.12 * max(ends))
        axes.set_title(_size(rows), fontsize="medium")
        axes.set_yticks(range(len(names)), names)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # shared by all of them


def _curves(part: SubFigure, plots: Sequence[Sequence[Row]], loop: str, colour: dict[str, str]) -> None:
    """A curve for each contender, by clients or by the rate of requests."""
    x, y = ("streams", "tokens_per_s") if loop == "closed" else ("rate", "goodput_requests_per_s")
    for axes, rows in zip(part.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        for name in (name for name in colour if name in distinct(rows, "contender")):
            points = sorted((row[x], row[y]) for row in rows if row["contender"] == name)
            axes.plot(*zip(*points, strict=True), marker="o", color=colour[name], label=name)
        if loop == "closed":
            axes.set_xscale("log")
            axes.set_xticks(sorted(distinct(rows, x)), [str(each) for each in sorted(distinct(rows, x))], minor=False)
            axes.minorticks_off()
        axes.set_title(f"T = {rows[0]['temperature']:g}", fontsize="medium")
        axes.set_xlabel("streams" if loop == "closed" else "requests/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
