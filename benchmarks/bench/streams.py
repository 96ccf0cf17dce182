"""What came of a prompt, counted the same way for everybody; and the rows that are made of it.

A contender says when tokens came, counted from the moment it was asked. Everything else follows here, so nobody counts for
itself: what comes behind an end token is cut off, in the count and in the time; the end token itself counts.
"""

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
Accounting = Literal["same-target-core", "total-cores"]
OPEN = 0  # the number of streams in rows of an open loop: as many as come


@dataclass(frozen=True)
class Ask:
    """A prompt, and what to do with it."""

    prompt: tuple[int, ...]  # token ids
    seed: int
    temperature: float
    tokens: int  # at most: an end token ends it


@dataclass(frozen=True)
class Stream:
    """What came of a prompt. text: where token ids are not told (HTTP), else empty."""

    arrivals: tuple[tuple[float, int], ...]  # seconds since it was asked for, tokens that came then
    tokens: tuple[int, ...] = ()
    text: str = ""

    @property
    def count(self) -> int:
        """Tokens, all of them."""
        return sum(number for _, number in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Until the first tokens were there: the prefill, and what surrounds it."""
        return self.arrivals[0][0]

    @property
    def decoding_tps(self) -> float | None:
        """Tokens behind the first ones, per second behind them; none where all came at the same time."""
        if len(self.arrivals) < 2:
            return None
        first, last = self.arrivals[0], self.arrivals[-1]
        return (self.count - first[1]) / (last[0] - first[0])

    def gaps_ms(self) -> list[float]:
        """Between tokens: those that come together share the time since the ones before them."""
        found: list[float] = []
        for (before, _), (now, number) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [1000 * (now - before) / number] * number
        return found


def cut(stream: Stream, ends: Collection[int]) -> Stream:
    """Without what came behind the first end token. Without token ids nothing is cut: servers end there."""
    at = next((index for index, token in enumerate(stream.tokens) if token in ends), None)
    if at is None:
        return stream
    arrivals, left = [], at + 1
    for seconds, number in stream.arrivals:
        if left > 0:
            arrivals.append((seconds, min(number, left)))
        left -= number
    return Stream(tuple(arrivals), stream.tokens[: at + 1])


def by_text(pieces: Sequence[tuple[float, str]], total: int) -> Stream:
    """A stream of which only pieces of text and the number of all tokens are known: they are shared out by characters.

    The first piece is one token at least, however short its text: the first token came with it.
    """
    text = "".join(piece for _, piece in pieces)
    arrivals, characters, told = [], 0, 0
    for index, (seconds, piece) in enumerate(pieces):
        characters += len(piece)
        share = characters / len(text) if text else 1.0
        here = total if index == len(pieces) - 1 else min(total, max(1, round(total * share)))  # tokens so far
        if here > told:
            arrivals.append((seconds, here - told))
        told = here
    return Stream(tuple(arrivals), (), text)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest rank; none of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None


def latencies(streams: Iterable[Stream]) -> Row:
    """Times to the first token (median and p99) and between tokens, over all streams."""
    held = [stream for stream in streams if stream.arrivals]
    gaps = [gap for stream in held for gap in stream.gaps_ms()]
    first = [1000 * stream.ttft_s for stream in held]
    return {
        "ttft_ms": _rounded(percentile(first, 50)),
        "ttft_ms_p99": _rounded(percentile(first, 99)),
        "itl_ms_p50": _rounded(percentile(gaps, 50)),
        "itl_ms_p99": _rounded(percentile(gaps, 99)),
    }


def speeds(rates: Sequence[float]) -> Row:
    """The median of some rates in tokens/s, and their quartiles as the spread."""
    if not rates:
        return {"tokens_per_s": None, "spread": None}
    quartiles = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else list(rates) * 3
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "spread": [round(quartiles[0], 1), round(quartiles[2], 1)],
    }


def one_stream(streams: Sequence[Stream]) -> Row:
    """The figures of prompts that were decoded one after the other: prefill is not in tokens_per_s."""
    rates = [rate for stream in streams if (rate := stream.decoding_tps) is not None]
    return speeds(rates) | latencies(streams) | {"prompts": len(streams), "tokens": sum(each.count for each in streams)}


def many_streams(rounds: Sequence[tuple[float, Sequence[Stream]]]) -> Row:
    """The figures of rounds (seconds, streams) of several streams: prefill is in tokens_per_s."""
    rates = [sum(stream.count for stream in streams) / seconds for seconds, streams in rounds]
    everything = [stream for _, streams in rounds for stream in streams]
    counts = {"prompts": len(everything), "tokens": sum(stream.count for stream in everything)}
    return speeds(rates) | latencies(everything) | counts


@dataclass(frozen=True)
class Limit:
    """What a client will put up with."""

    ttft_ms: float = 1000.0
    itl_ms: float = 200.0  # the p99 of one stream

    def holds(self, stream: Stream) -> bool:
        """Whether a stream was within it. One that broke off was not."""
        if not stream.arrivals or 1000 * stream.ttft_s > self.ttft_ms:
            return False
        worst = percentile(stream.gaps_ms(), 99)
        return worst is None or worst <= self.itl_ms


def goodput(streams: Sequence[Stream], seconds: float, limit: Limit) -> Row:
    """Of an open loop: requests and tokens per second, of all requests and of those within the limit."""
    good = [stream for stream in streams if limit.holds(stream)]
    return {
        "requests": len(streams),
        "failed": sum(not stream.arrivals for stream in streams),
        "goodput_requests_per_s": round(len(good) / seconds, 3),
        "goodput_tokens_per_s": round(sum(stream.count for stream in good) / seconds, 1),
        "within_limit": round(len(good) / max(1, len(streams)), 3),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
