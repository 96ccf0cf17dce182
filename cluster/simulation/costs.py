"""What everything costs in milliseconds: given, measured, or estimated from a machine's figures."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.budget import CostModel
from engine.types import InvalidRequest, require

_MOST_ROWS = 8192  # that an estimate has points for; beyond, a step takes time in proportion
_BYTES = 2.0  # of a parameter in bfloat16
_LEAST_MS, _MOST_MS = 1e-6, 1e6  # that anything takes
_MOST_GIVEN = 10**6  # rows of a point


@dataclass(frozen=True)
class Costs:
    """Of one target replica, one draft replica and the link between them. Raises InvalidRequest."""

    target: CostModel  # a step by its rows
    draft: CostModel  # a draft step by its rows, with all that belongs to it
    overhead_ms: float = 0.0  # of a target's step, beside its forward pass
    latency_ms: float = 0.0  # of a message, one way

    def __post_init__(self) -> None:
        for name, milliseconds in (("overhead_ms", self.overhead_ms), ("latency_ms", self.latency_ms)):
            require(0 <= milliseconds <= _MOST_MS, name, f"must be between 0 and {_MOST_MS:g}")

    def target_ms(self, rows: int) -> float:
        """A target's forward pass of this many rows."""
        return float(self.target.table(rows)[rows])

    def draft_ms(self, rows: int) -> float:
        """A draft step of this many rows."""
        return float(self.draft.table(rows)[rows])


def measured_times(points: dict[int, float], bucket: Callable[[int], int] = lambda rows: rows) -> CostModel:
    """Steps of these milliseconds by their rows, interpolated as engine.budget does it.

    bucket: the number of rows that a model is really called with.
    """
    times = CostModel(bucket)
    for rows, milliseconds in points.items():
        times.start(rows, milliseconds)
    return times


@dataclass(frozen=True, slots=True)
class Roofline:
    """A forward pass as reading all weights once, or computing with them, whichever takes longer.

    Attention's own reading of KV is left out: small against the weights for short contexts and few streams.
    """

    billions: float  # of parameters
    gb_per_s: float  # of memory, what is really reached, all devices together
    tflops: float  # that are really reached, all devices together
    fixed_ms: float = 0.0  # of launches and communication

    def milliseconds(self, rows: int) -> float:
        """A pass of this many rows."""
        reading = _BYTES * self.billions / self.gb_per_s * 1e3
        computing = 2 * self.billions * rows / self.tflops
        return self.fixed_ms + max(reading, computing)

    def times(self) -> CostModel:
        """The same by rows."""
        rows = [2**power for power in range(int(math.log2(_MOST_ROWS)) + 1)]
        return measured_times({count: self.milliseconds(count) for count in rows})


def parse_times(text: str, name: str) -> CostModel:
    """Times as an option gives them: `1:18.3,64:19`, a single number, or `roofline:BILLIONS,GB/S,TFLOPS[,FIXED MS]`.

    Raises InvalidRequest that names the option.
    """
    form, _, rest = text.partition(":")
    if form == "roofline":
        numbers = [_positive(part, name) for part in rest.split(",")]
        require(len(numbers) in (3, 4), name, "a roofline is BILLIONS,GB/S,TFLOPS and perhaps FIXED MS")
        roofline = Roofline(*numbers)
        for rows in (1, _MOST_ROWS):
            _check_time(roofline.milliseconds(rows), name)
        return roofline.times()
    points = parse_points(text, name)
    if set(points) == {1}:  # a step takes as long whatever its rows
        points[_MOST_ROWS] = points[1]
    return measured_times(points)


def parse_points(text: str, name: str) -> dict[int, float]:
    """`ROWS:MS,...` as milliseconds by rows; raises InvalidRequest that names the option."""
    pairs = [part.rpartition(":") for part in text.split(",")]
    points = {_rows(rows or "1", name): _positive(milliseconds, name) for rows, _, milliseconds in pairs}
    for milliseconds in points.values():
        _check_time(milliseconds, name)
    return points


def _rows(text: str, name: str) -> int:
    number = _positive(text, name)
    whole = number.is_integer() and number <= _MOST_GIVEN
    require(whole, name, f"rows must be whole numbers between 1 and {_MOST_GIVEN}")
    return int(number)


def _check_time(milliseconds: float, name: str) -> None:
    sane = _LEAST_MS <= milliseconds <= _MOST_MS
    require(sane, name, f"times must be between {_LEAST_MS:g} and {_MOST_MS:g} milliseconds")


def _positive(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InvalidRequest(name, f"{text!r} is no number; see --help for its forms") from None
    require(math.isfinite(number) and number > 0, name, "all numbers must be positive")
    return number
