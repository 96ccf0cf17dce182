"""What decoding cost and what speculation did for it: one set of figures for every way to decode."""

from dataclasses import dataclass
from typing import TypeVar

from cluster.target_stats import TargetStats

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one or more generations, which add up. Rates that mean nothing for a way to decode are None."""

    tokens: int  # but for those that came with the end of a prompt
    seconds: float  # of decoding; prefill is excluded
    steps: int  # of the target, that decoded
    tried: int  # draft tokens compared with the target's along the walk
    accepted: int
    idle_s: float | None = None  # of `seconds`, those outside the target's steps
    hits: int | None = None  # steps at whose end the mirror held a child below the new root

    @classmethod
    def between(cls, before: TargetStats, after: TargetStats) -> "Figures":
        """What a target did between two looks at its statistics."""
        seconds = after.active_s - before.active_s
        tried = after.tried - before.tried
        return cls(
            tokens=after.decoded - before.decoded,
            seconds=seconds,
            steps=after.sequence_steps - before.sequence_steps,
            tried=tried,
            accepted=after.accepted - before.accepted,
            idle_s=seconds - (after.forward_s - before.forward_s),
            hits=after.hits - before.hits if tried else None,
        )

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
            tried=self.tried + other.tried,
            accepted=self.accepted + other.accepted,
            idle_s=_sum(self.idle_s, other.idle_s),
            hits=_sum(self.hits, other.hits),
        )

    @property
    def tokens_per_second(self) -> float:
        """While decoding."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: accepted draft tokens and the target's own, per step."""
        return self.tokens / max(1, self.steps)

    @property
    def acceptance(self) -> float | None:
        """Share of the draft tokens along the walk that the target chose too; None without draft tokens."""
        return self.accepted / self.tried if self.tried else None

    @property
    def hit_rate(self) -> float | None:
        """Share of steps after which the next one could start with draft tokens at once; None without a mirror."""
        return self.hits / max(1, self.steps) if self.hits is not None else None

    @property
    def idle(self) -> float | None:
        """Share of the time in which the target ran no step; None where that is not known."""
        return self.idle_s / self.seconds if self.idle_s is not None and self.seconds > 0 else None


def _sum(a: _Number | None, b: _Number | None) -> _Number | None:
    """The sum of what is known."""
    return a if b is None else b if a is None else a + b
