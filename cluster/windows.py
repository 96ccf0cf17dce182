"""The windows of a target's requests: one for all that name none, and one of each kind that some request has named."""

from collections.abc import Sequence
from dataclasses import replace

from engine.budget import GoodputWindow, Window
from engine.tree import TokenTree
from engine.types import IntArray
from engine.window_choice import NamedWindows

_OF_THE_LEAST = 0.7  # a single guess may be surer than others of its kind were


class Windows:
    """Chooses for a whole batch, each window for the requests that named it.

    A window sees the others' sequences as such that verify nothing: what is best for all of them together is only found
    where all have the same one. Who names a window shares it, and what it learned, with all who do.
    """

    def __init__(self, own: Window, named: NamedWindows, in_turns: Window | None = None) -> None:
        """own: of requests that name none. in_turns: in place of a goodput window where a draft takes turns."""
        self.own = own
        self._in_turns = in_turns
        self._taking_turns = False
        self._named = named
        self._made: dict[str, Window] = {}  # by name, once a request has named it
        self._nothing = TokenTree(0, 1)

    def replace(self, own: Window) -> None:
        """Another one for requests that name none; who names the one before gets that."""
        self.own, self._named = own, replace(self._named, own="")

    def takes_turns(self, on: bool) -> None:
        """Whether a draft shares the target's process from now on."""
        self._taking_turns = on

    def choose(self, names: Sequence[str], trees: Sequence[TokenTree], alone: int = 0) -> tuple[list[IntArray], float]:
        """The nodes of each tree to verify, by its request's window; and how many of all of them are expected to be right.

        alone: sequences that take part in the step and have no tree: windows that weigh costs count their rows. See
        engine.budget.Window. Windows that expect nothing count for nothing.
        """
        chosen: dict[int, IntArray] = {}  # by tree
        expected = 0.0
        keys = [self._key(name) for name in names]
        for key in dict.fromkeys(keys):
            mine = [index for index, other in enumerate(keys) if other == key]
            others = [self._nothing] * (len(trees) - len(mine) + alone)
            window = self._window(key)
            chosen.update(zip(mine, window.choose([*(trees[i] for i in mine), *others]), strict=False))
            choice = window.explain()
            expected += choice.accepted if choice is not None else 0.0
        return [chosen[index] for index in range(len(trees))], expected

    def least(self, sequences: int) -> float:
        """See `least_probable`."""
        return least_probable(self._window(""), sequences)

    def observe(self, name: str, tree: TokenTree, nodes: IntArray, path: Sequence[int]) -> None:
        """Tells the window of a request what came of its nodes: see engine.budget.Window."""
        self._window(self._key(name)).observe(tree, nodes, path)

    def _key(self, name: str) -> str:
        return "" if name == self._named.own else name

    def _window(self, key: str) -> Window:
        if not key:
            if self._taking_turns and self._in_turns is not None and isinstance(self.own, GoodputWindow):
                return self._in_turns
            return self.own
        if key not in self._made:
            self._made[key] = self._named.make(key)
        return self._made[key]


def least_probable(window: Window, sequences: int) -> float:
    """How often lookups have to be right to be of use to so many sequences; 0 for windows that don't weigh costs."""
    return _OF_THE_LEAST * window.least(sequences) if isinstance(window, GoodputWindow) else 0.0
