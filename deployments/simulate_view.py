"""The tables of `paceline simulate`."""

from collections.abc import Sequence

from rich.table import Table

from cluster.simulation.plan import Values

SHOWN = {
    "tps": "tokens/s, all streams",
    "tps_per_stream": "tokens/s, one stream",
    "tokens_per_step": "tokens per step",
    "verified_per_step": "verified per step",
    "acceptance": "acceptance",
    "hit_rate": "hit rate",
    "target_idle": "target idle",
    "draft_busy": "draft busy",
    "ttft_ms_p50": "time to first token (ms), median",
    "ttft_ms_p99": "... 99th percentile",
    "itl_ms_p50": "inter-token latency (ms), median",
    "itl_ms_p99": "... 99th percentile",
}
_SAYS_NOTHING = {
    "plain": ("verified_per_step", "acceptance", "hit_rate", "draft_busy"),
    "sequential": ("hit_rate", "draft_busy"),
}


def mode_table(modes: dict[str, Values]) -> Table:
    """A column for each mode."""
    titles = [f"{mode}, k = {values['k']}" if "k" in values else mode for mode, values in modes.items()]
    table = Table("", *titles)
    for name, title in SHOWN.items():
        table.add_row(title, *(_cell(mode, name, values[name]) for mode, values in modes.items()))
    return table


def _cell(mode: str, name: str, value: float | None) -> str:
    return "" if value is None or name in _SAYS_NOTHING.get(mode, ()) else f"{value:g}"


def fleet_table(rows: Sequence[Values]) -> Table:
    """How many drafts each number of targets needs."""
    table = Table("targets", "drafts needed", "tokens/s", "of the throughput with a draft for each target")
    for row in rows:
        kept = ", ".join(f"{drafts}: {share:.0%}" for drafts, share in row["kept"].items())
        table.add_row(str(row["targets"]), str(row["drafts"]), f"{row['tps']:g}", kept)
    return table


def check_table(name: str, rows: Sequence[Values]) -> Table:
    """Predicted beside measured."""
    table = Table(name, "predicted", "measured", "error")
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:+.1%}"
        table.add_row(row["figure"], f"{row['predicted']:g}", f"{row['measured']:g}", error)
    return table
