"""How `paceline demo` looks: stages while it loads, coloured streams, the table, the verdict."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from deployments.figures import Figures
from engine.text import TextStream
from engine.types import GenerationRequest, Origin, TokenChunk

STYLES: dict[Origin, str] = {"draft": "cyan", "target": "yellow"}  # near the colours of the picture
_PROMPT_LINES = 3  # of the prompt's end that are shown


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    temperature: float
    contender: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an output left the plain one, and how close to a tie the plain choice was there."""

    contender: str
    request: str
    position: int
    margin: float | None


class Stages:
    """A context manager that is called with what is being waited for; what is done stays on screen with its time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._text = ""
        self._started = 0.0

    def __enter__(self) -> "Stages":
        self._status.start()
        return self

    def __call__(self, text: str) -> None:
        self._done()
        self._text, self._started = text, time.monotonic()
        self._status.update(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._done()
        self._status.stop()

    def _done(self) -> None:
        if self._text:
            self._console.print(f"  {self._text} [dim]{time.monotonic() - self._started:.1f} s[/dim]")


def print_header(console: Console, target: Path, draft: Path, tokens: int) -> None:
    """What runs."""
    console.print()
    console.print("[bold]Paceline[/bold]: a draft that guesses ahead, a target that decides, side by side")
    console.print(f"[dim]target {_model(target)}, draft {_model(draft)}, {tokens} tokens per prompt[/dim]")
    console.print()


def _model(path: Path) -> str:
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return f"{path.name} ({size / 1e6:.1f} MB)"


def print_legend(console: Console) -> None:
    """What the colours of the streams mean."""
    drafted = Text("accepted from the draft", STYLES["draft"])
    own = Text("the target's own", STYLES["target"])
    console.print()
    console.print(Text.assemble("Tokens in the colour of their origin: ", drafted, ", ", own, "."))


def stream(
    console: Console, request: GenerationRequest, tokenizer: PreTrainedTokenizerFast, chunks: Iterator[TokenChunk]
) -> list[int]:
    """Prints the end of the prompt, then the tokens as they come; returns them."""
    prompt = str(tokenizer.decode(list(request.prompt))).splitlines(keepends=True)[-_PROMPT_LINES:]
    console.print()
    console.print(Rule(request.request_id, align="left", style="dim"))
    console.out("".join(prompt), style="dim", end="", highlight=False)
    text = TextStream(tokenizer)
    tokens: list[int] = []
    drafted = 0
    for chunk in chunks:
        for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
            console.out(text.push(token), style=STYLES[origin], end="", highlight=False)
            drafted += origin == "draft"
        tokens += chunk.tokens
    console.print()
    console.print(f"[dim]{len(tokens)} tokens, {drafted} of them accepted from the draft[/dim]")
    return tokens


@contextmanager
def measuring(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; it yields the function that moves it on. It is drawn rarely: the cores have work to do."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(complete_style="cyan", finished_style="cyan"),
        MofNCompleteColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("measuring plain, sequential and pipelined", total=total)
        yield lambda: progress.advance(bar)


def print_table(console: Console, rows: list[Row]) -> None:
    """The contenders, by temperature."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("T", no_wrap=True)
    table.add_column("decoding", no_wrap=True)
    for name in ("tokens/s", "speed-up", "tokens/step", "acceptance", "hit rate", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    plain = {row.temperature: row.figures.tokens_per_second for row in rows if row.contender == "plain"}
    for row in rows:
        figures, first = row.figures, row.contender == "plain"
        table.add_row(
            f"{row.temperature:g}" if first else "",
            row.contender,
            f"{figures.tokens_per_second:.1f}",
            f"{figures.tokens_per_second / plain[row.temperature]:.2f}x",
            f"{figures.tokens_per_step:.2f}",
            _share(figures.acceptance),
            _share(figures.hit_rate),
            _share(figures.idle),
            style="bold" if row.contender == "pipelined" else None,
            end_section=row.contender == "pipelined",
        )
    console.print(table)
    console.print(_DEFINITIONS, style="dim")


_DEFINITIONS = """\
plain       the target alone
sequential  on the target's core, in turns: k draft tokens, then a target step
pipelined   target and draft on a core or GPU each, at the same time
tokens/s    while decoding, without the prompt; speed-up is against plain
acceptance  share of the draft tokens along the way that the target chose too
hit rate    share of steps after which the next one had draft tokens at once
idle        share of the time in which the target ran no step
"""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_verdict(console: Console, divergences: list[Divergence]) -> None:
    """Whether all outputs were equal; where not, how near a tie the target's choice was."""
    console.print(
        "outputs equal: " + ("[bold yellow]no[/bold yellow]" if divergences else "[bold green]yes[/bold green]")
    )
    for item in divergences:
        margin = "unknown" if item.margin is None else f"{item.margin:.4f}"
        console.print(f"  {item.contender}, {item.request}: differs from token {item.position} on, margin {margin}")
    if divergences:
        console.print("  [dim]Near ties fall with the number of tokens in a step; --invariant prevents it.[/dim]")


def print_files(console: Console, paths: list[Path]) -> None:
    """Where the picture is."""
    console.print("timelines of both actors: " + ", ".join(str(path) for path in paths))
