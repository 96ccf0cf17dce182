"""Windows by name, as configurations and requests write them: "goodput", "tree:15", "off"."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.step import MAX_WINDOW
from engine.types import require
from engine.windows import Bandit, ConfidenceThreshold, FixedChain, FixedTree, Heuristic

WindowName = Literal["goodput", "chain", "tree", "heuristic", "threshold", "bandit"]
OFF = "off"  # a request that verifies nothing: the target decodes it alone
_SIZED: dict[str, WindowName] = {"chain": "chain", "tree": "tree"}
_PLAIN: dict[str, WindowName] = {
    "goodput": "goodput",
    "heuristic": "heuristic",
    "threshold": "threshold",
    "bandit": "bandit",
}
_FORMS = f"must be {', '.join(_PLAIN)}, {OFF}, chain:N or tree:N, N from 1 to {MAX_WINDOW}"


def make_window(name: WindowName, size: int, cost: CostModel) -> Window:
    """The window of this name."""
    makers: dict[str, Callable[[], Window]] = {
        "goodput": lambda: GoodputWindow(Calibration(), cost, max_nodes=size),
        "chain": lambda: FixedChain(size),
        "tree": lambda: FixedTree(size),
        "heuristic": lambda: Heuristic(size),
        "threshold": lambda: ConfidenceThreshold(size),
        "bandit": lambda: Bandit(cost, size),
    }
    return makers[name]()


def check_window(text: str) -> None:
    """Raises InvalidRequest unless a request can name this window; it may also name none."""
    require(not text or text == OFF or text in _PLAIN or _sized(text) is not None, "window", _FORMS)


def _sized(text: str) -> tuple[WindowName, int] | None:
    """The parts of "chain:N" and "tree:N"; none of anything else."""
    name, _, size = text.partition(":")
    fits = name in _SIZED and len(size) <= 2 and size.isascii() and size.isdigit() and 1 <= int(size) <= MAX_WINDOW
    return (_SIZED[name], int(size)) if fits else None


@dataclass(frozen=True, slots=True)
class NamedWindows:
    """Makes the windows that requests name; `own` is the name of the one that the replica has anyway."""

    cost: CostModel = field(default_factory=CostModel)
    most: int = 31  # draft tokens per step of those whose size is not in their name
    own: str = ""

    def make(self, text: str) -> Window:
        """A window as a request names it; raises InvalidRequest."""
        check_window(text)
        name, size = _sized(text) or (_PLAIN[text], self.most)
        return make_window(name, size, self.cost)
