"""The picture of `make bench`: tokens/s of all contenders, by target and by number of streams."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bench.streams import Row

_OURS = ("#2f7f93", "#4fa7b8", "#1d5361", "#8cc7d1", "#67909a")
_PEERS = ("#d9822b", "#e8ab6a", "#b0576f", "#c98a9b", "#8c7b5a", "#b8a98c", "#7a6fb0", "#bbbbbb", "#5a5a5a")


def distinct(rows: Iterable[Row], key: str) -> list[Row]:
    """The values of a key, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """One for each contender: ours are of one family."""
    names = [str(name) for name in distinct(rows, "contender")]
    ours = [name for name in names if name.startswith("paceline")]
    peers = [name for name in names if name not in ours]
    return {name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)} | {
        name: _PEERS[i % len(_PEERS)] for i, name in enumerate(peers)
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """A line of plots for each temperature: one stream by target for each accounting, closed loops, open loops.

    What was not measured has no plot.
    """
    held = [row for row in rows if row["tokens_per_s"] is not None]
    temperatures, colour = distinct(held, "temperature"), colours(rows)
    alone = distinct((row for row in held if row["loop"] == "prompts"), "accounting")
    loops = [loop for loop in ("closed", "open") if any(row["loop"] == loop for row in held)]
    columns = len(alone) + len(loops)
    figure = Figure(figsize=(5.5 * max(1, columns), 4.2 * max(1, len(temperatures))), layout="constrained")
    grid = figure.subplots(max(1, len(temperatures)), max(1, columns), squeeze=False)
    for line, temperature in zip(grid, temperatures, strict=False):
        here = [row for row in held if row["temperature"] == temperature]
        for axes, accounting in zip(line, alone, strict=False):
            _bars(axes, [row for row in here if (row["loop"], row["accounting"]) == ("prompts", accounting)], colour)
            axes.set_title(f"one stream, T = {temperature:g}, {accounting}")
        for axes, loop in zip(line[len(alone) :], loops, strict=True):
            _loop(axes, [row for row in here if row["loop"] == loop], loop, colour)
            axes.set_title(f"{loop} loop, T = {temperature:g}")
    figure.savefig(path, dpi=110)


def _loop(axes: Axes, rows: Sequence[Row], loop: str, colour: dict[str, str]) -> None:
    if loop == "closed":
        _lines(axes, rows, "streams", "tokens_per_s", colour)
        axes.set(xlabel="streams", ylabel="tokens/s", xscale="log")
    else:
        _lines(axes, rows, "rate", "goodput_requests_per_s", colour)
        axes.set(xlabel="requests/s", ylabel="requests/s within the limit")


def _bars(axes: Axes, rows: Sequence[Row], colour: dict[str, str]) -> None:
    """Groups of bars, one a target, with quartiles; in each, one a contender."""
    sizes, names = distinct(rows, "target_params"), [str(name) for name in distinct(rows, "contender")]
    width = 0.85 / max(1, len(names))
    for index, name in enumerate(names):
        found = [(sizes.index(row["target_params"]), row) for row in rows if row["contender"] == name]
        places = [group + (index + 0.5) * width - 0.425 for group, _ in found]
        heights = [row["tokens_per_s"] for _, row in found]
        low = [max(0.0, row["tokens_per_s"] - row["spread"][0]) for _, row in found]
        high = [max(0.0, row["spread"][1] - row["tokens_per_s"]) for _, row in found]
        axes.bar(places, heights, width, yerr=[low, high], ecolor="#555555", color=colour[name], label=name)
    axes.set_xticks(range(len(sizes)), [f"{int(size) / 1e6:.0f}M" for size in sizes])  # type: ignore[call-overload]
    axes.set_ylabel("tokens/s, prefill apart")
    if names:
        axes.legend(frameon=False, fontsize="x-small")


def _lines(axes: Axes, rows: Sequence[Row], x: str, y: str, colour: dict[str, str]) -> None:
    names = [str(name) for name in distinct(rows, "contender")]
    for name in names:
        points = sorted((row[x], row[y]) for row in rows if row["contender"] == name)
        axes.plot([a for a, _ in points], [b for _, b in points], marker="o", color=colour[name], label=name)
    axes.grid(alpha=0.3)
    if names:
        axes.legend(frameon=False, fontsize="x-small")
