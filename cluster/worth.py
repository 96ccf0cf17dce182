"""Whether drafts make a target faster: measured, with them and without by turns, for each kind of batch."""

from dataclasses import dataclass, field

_FIRST = 96  # steps with drafts before the first look at how fast it is without
_LOOK = 32  # steps of a look
_SETTLING = 4  # first steps of either that don't count: windows and drafts find their way back
_READING = 256  # steps at most that drafts may take to read the texts again, before what they don't say counts
_LASTING = 64  # steps in a row of another kind of batch before it has a say
_SHORTEST, _LONGEST = 1024, 16384  # steps between looks, twice as many each time that nothing has changed
_MARGIN = 1.03  # without has to be so much faster: who comes back to drafts has its text read again
_KEPT = 0.99  # of what earlier steps weigh, each step

Kind = tuple[int, bool]  # of a batch: the logarithm of how many sequences, and whether all are greedy


def kind_of(sequences: int, greedy: bool) -> Kind:
    """What is measured together: whether drafts pay depends on how many sequences share a step, and on their sampling."""
    return sequences.bit_length(), greedy


@dataclass
class _Speed:
    """Tokens and seconds of recent steps."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = _KEPT * self.tokens + tokens
        self.seconds = _KEPT * self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Measured:
    """One kind of batch."""

    left: int = _FIRST  # steps before the next look begins, or this one ends
    between: int = _SHORTEST // 2
    without: bool = False  # is what was found faster
    looking: bool = False  # at the other
    speeds: dict[bool, _Speed] = field(default_factory=lambda: {False: _Speed(), True: _Speed()})  # by without

    @property
    def now_without(self) -> bool:
        return self.without != self.looking

    def turn(self) -> None:
        """A look begins or ends."""
        self.looking = not self.looking
        if self.looking:
            self.left = _LOOK
            self.speeds[self.now_without] = _Speed()
            return
        before, self.without = self.without, self.speeds[True].rate > _MARGIN * self.speeds[False].rate
        self.between = _SHORTEST if self.without != before else min(2 * self.between, _LONGEST)
        self.left = self.between


class Worth:
    """Says when drafts are to be left alone; hears of every step."""

    def __init__(self) -> None:
        self._measured: dict[Kind, _Measured] = {}
        self._kind: Kind | None = None  # that it goes by
        self._other: Kind | None = None  # that came instead
        self._lasted = 0  # steps in a row of that
        self._settling = self._reading = 0  # steps
        self._heard = False  # growth, since drafts were asked again

    @property
    def without(self) -> bool:
        """Whether drafts are to be left alone now, since it is faster without or to see whether it is."""
        return self._kind is not None and self._measured[self._kind].now_without

    def settle(self) -> None:
        """The next few steps don't count, nor do those before drafts that were asked again say something."""
        self._settling, self._reading, self._heard = _SETTLING, _READING, False

    def stepped(self, kind: Kind, tokens: int, seconds: float, heard: bool) -> None:
        """A step of such a batch committed so many tokens, and took so long with all that belongs to it.

        heard: growth came for it.
        """
        if not self._goes_by(kind):
            return
        measured = self._measured[kind]
        self._heard = self._heard or heard
        if self._settling:
            if measured.now_without or self._heard or not self._reading:
                self._settling -= 1
            else:
                self._reading -= 1
            return
        measured.speeds[measured.now_without].add(tokens, seconds)
        measured.left -= 1
        if measured.left == 0:
            measured.turn()
            self.settle()

    def _goes_by(self, kind: Kind) -> bool:
        """Whether a step counts; another kind does once it has lasted, since every change has texts read again."""
        if kind == self._kind:
            self._other = None
            return True
        if kind != self._other:
            self._other, self._lasted = kind, 0
        self._lasted += 1
        if self._kind is not None and self._lasted < _LASTING:
            return False
        self._kind, self._other = kind, None
        self._measured.setdefault(kind, _Measured())
        self.settle()
        return True
