"""The picture of two actors at work: draft steps, target steps, commits and growth on one time axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from cluster.trace import Kind, Span

DRAFT, TARGET, ALONE, WAIT = "#56a3b5", "#d9822b", "#f0c38e", "#ffffff"
COMMIT, GROWTH, TEXT = "#a03d12", "#2f7f93", "#333333"
_DRAFT_Y, _TARGET_Y, _HALF = 1.0, 0.0, 0.15  # middle of each lane, half the height of its boxes
_STEPS = 10  # target steps that the excerpt should show
_SHORTEST_S, _LONGEST_S = 0.08, 0.15


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What both actors did in a stretch of time. Arrows may begin before it or end after it."""

    start: float  # seconds on the clock of the spans
    end: float
    target: Sequence[Span]  # of the whole recording, in order
    draft: Sequence[Span]

    def inside(self, spans: Sequence[Span], kind: Kind) -> Iterator[Span]:
        """The spans of a kind that overlap the excerpt."""
        return (span for span in spans if span.kind == kind and span.end > self.start and span.start < self.end)

    def busy(self, spans: Sequence[Span], kind: Kind) -> float:
        """Share of the excerpt in which spans of a kind ran."""
        return sum(min(s.end, self.end) - max(s.start, self.start) for s in self.inside(spans, kind)) / self.seconds

    def ms(self, seconds: float) -> float:
        """A moment as milliseconds since the excerpt began."""
        return 1000 * (seconds - self.start)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def middle(target: Sequence[Span], draft: Sequence[Span]) -> Excerpt:
    """About ten target steps from the middle of a recording; raises ValueError when it has fewer than two."""
    starts = [span.start for span in target if span.kind == "target step"]
    if len(starts) < 2:
        raise ValueError("the recording has no two target steps")
    period = median(after - before for before, after in pairwise(starts))
    seconds = min(max(_STEPS * period, _SHORTEST_S), _LONGEST_S)
    start = max(starts[0], (starts[0] + starts[-1] - seconds) / 2)
    return Excerpt(start, start + seconds, sorted(target, key=_begin), sorted(draft, key=_begin))


def draw(target: Sequence[Span], draft: Sequence[Span], stem: Path, title: str) -> list[Path]:
    """Writes the picture of the recording's middle to `stem` with .png and .svg behind it; returns both paths.

    Raises ValueError when the recording has fewer than two target steps.
    """
    excerpt = middle(target, draft)
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    axes = figure.add_subplot()
    _steps(axes, excerpt)
    _arrows(axes, excerpt)
    _frame(axes, excerpt, title)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=160)
    return paths


def commits(excerpt: Excerpt) -> Iterator[tuple[Span, Span]]:
    """(sent, applied) of every commit of one stream: the link keeps their order. Only the draft counts new tokens."""
    applied = iter([span for span in excerpt.draft if span.kind == "commit"])
    for sent in (span for span in excerpt.target if span.kind == "commit"):
        found = next((span for span in applied if span.start >= sent.start), None)
        if found is not None:
            yield sent, found


def growths(excerpt: Excerpt) -> Iterator[tuple[Span, Span]]:
    """(sent, read) of every growth: the target reads what has come whenever it looks, at the latest after a step."""
    reads = [span for span in excerpt.target if span.kind == "growth"]
    for sent in (span for span in excerpt.draft if span.kind == "growth"):
        read = next((span for span in reads if span.start >= sent.end), None)
        if read is not None:
            yield sent, read


def _begin(span: Span) -> float:
    return span.start


def _steps(axes: Axes, excerpt: Excerpt) -> None:
    """The boxes of both lanes; on a target step the number of draft tokens that it verifies."""
    for span in excerpt.inside(excerpt.draft, "draft step"):
        _box(axes, excerpt, span, _DRAFT_Y, DRAFT)
    for span in excerpt.inside(excerpt.target, "wait"):
        _box(axes, excerpt, span, _TARGET_Y, WAIT, hatch="/////")
    for span in excerpt.inside(excerpt.target, "target step"):
        _box(axes, excerpt, span, _TARGET_Y, TARGET if span.amount > 1 else ALONE)
        at = excerpt.ms((span.start + span.end) / 2)
        if span.amount > 1 and 0 < at < 1000 * excerpt.seconds:
            axes.text(at, _TARGET_Y, str(span.amount - 1), ha="center", va="center", fontsize=9, color="white")


def _box(axes: Axes, excerpt: Excerpt, span: Span, y: float, color: str, hatch: str | None = None) -> None:
    corner = (excerpt.ms(span.start), y - _HALF)
    edge = GROWTH if color == DRAFT else COMMIT
    width = 1000 * (span.end - span.start)
    axes.add_patch(Rectangle(corner, width, 2 * _HALF, facecolor=color, edgecolor=edge, linewidth=0.6, hatch=hatch))


def _arrows(axes: Axes, excerpt: Excerpt) -> None:
    for sent, read in growths(excerpt):
        if sent.end < excerpt.end and read.start > excerpt.start:
            _arrow(axes, (excerpt.ms(sent.end), _DRAFT_Y - _HALF), (excerpt.ms(read.start), _TARGET_Y + _HALF), GROWTH)
    for sent, applied in commits(excerpt):
        if sent.start < excerpt.end and applied.end > excerpt.start:
            start, end = excerpt.ms(sent.start), excerpt.ms(applied.end)
            _arrow(axes, (start, _TARGET_Y + _HALF), (end, _DRAFT_Y - _HALF), COMMIT, width=1.6)
            if 0 < start < 990 * excerpt.seconds:  # the last one's label would not fit
                below = _TARGET_Y - _HALF - 0.1
                axes.text(start, below, f"+{applied.amount}", ha="center", va="center", fontsize=9, color=COMMIT)


def _arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float], color: str, width: float = 0.8) -> None:
    arrow = FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=width)
    arrow.shrinkA = arrow.shrinkB = 0
    axes.add_patch(arrow)


def _frame(axes: Axes, excerpt: Excerpt, title: str) -> None:
    axes.set_xlim(0, 1000 * excerpt.seconds)
    axes.set_ylim(_TARGET_Y - 2.4 * _HALF, _DRAFT_Y + 1.5 * _HALF)
    busy = excerpt.busy(excerpt.target, "target step"), excerpt.busy(excerpt.draft, "draft step")
    lanes = [f"target\nin a step {busy[0]:.0%}", f"draft\nin a step {busy[1]:.0%}"]
    axes.set_yticks([_TARGET_Y, _DRAFT_Y], lanes, fontsize=11, color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds, on one clock", color=TEXT)
    axes.set_title(title, loc="left", fontsize=13, color=TEXT)
    steps = len(list(excerpt.inside(excerpt.target, "target step")))
    tokens = sum(span.amount for span in excerpt.inside(excerpt.draft, "commit"))
    summary = f"{1000 * excerpt.seconds:.0f} ms: {steps} target steps, {tokens} tokens committed"
    axes.set_title(summary, loc="right", fontsize=10, color=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend() -> list[Patch | Line2D]:
    """A handle for everything the picture shows."""
    return [
        Patch(facecolor=DRAFT, edgecolor=GROWTH, label="draft step"),
        Line2D([], [], color=GROWTH, linewidth=0.8, marker="v", markersize=5, label="growth, until it is read"),
        Patch(facecolor=TARGET, edgecolor=COMMIT, label="target step, verifying n draft tokens"),
        Patch(facecolor=ALONE, edgecolor=COMMIT, label="target step alone"),
        Patch(facecolor=WAIT, edgecolor=COMMIT, hatch="/////", label="wait for growth"),
        Line2D([], [], color=COMMIT, linewidth=1.6, marker="^", markersize=5, label="commit of +n tokens"),
    ]
