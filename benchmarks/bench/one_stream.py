"""One stream: every contender, prompt by prompt in turn, for one target and one way to count cores."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from rich.progress import Progress

from benchmarks.bench.checkpoints import Dtype
from benchmarks.bench.contenders import (
    ASSISTED,
    TRANSFORMERS,
    VLLM,
    VLLM_SPECULATIVE,
    Key,
    Notes,
    Own,
    Peers,
    Run,
    Setup,
    own,
)
from benchmarks.bench.equality import compare
from benchmarks.bench.own import CHAINS, FEW_CHAINS
from benchmarks.bench.streams import Ask, Row, Stream, cut, one_stream
from benchmarks.bench.worker import Worker, WorkerError

PROBED = 3  # prompts of a probe


@dataclass(frozen=True)
class Work:
    """What is measured, and how. Of each temperature's prompts the first `warm` don't count."""

    prompts: tuple[tuple[int, ...], ...]
    count: int  # of them, for each temperature
    tokens: int
    warm: int
    temperatures: tuple[float, ...]  # that are to be measured
    order: tuple[float, ...]  # of all, also those that an earlier run has measured
    chains: tuple[int, ...]  # of vLLM's methods; of one, nothing is probed
    served: bool  # through HTTP, too
    names: tuple[str, ...]  # contenders; empty for all
    ends: frozenset[int]
    decode: Callable[[Sequence[int]], str]

    def asks(self, temperature: float) -> list[Ask]:
        """Prompts that no other temperature has: nobody has read them before, nor written what follows."""
        first = self.count * self.order.index(temperature)
        return self.make(self.prompts[first : first + self.count], temperature)

    def probes(self, temperature: float) -> list[Ask]:
        """A few, for choices between settings, that nobody is measured with. The first one warms up."""
        return self.make(self.prompts[-PROBED:], temperature)

    def make(self, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[Ask]:
        """One for each prompt."""
        return [Ask(prompt, index, temperature, self.tokens) for index, prompt in enumerate(prompts)]

    def wants(self, name: str) -> bool:
        """Whether a contender takes part; a served one does where what it serves is named, too."""
        return not self.names or name in self.names or name.replace("-served", "") in self.names


@dataclass
class Best:
    """The K that was fastest in a probe, by method and temperature; those that did not start are not in it."""

    vllm: dict[tuple[str, float], int] = field(default_factory=dict)

    @classmethod
    def known(cls, rows: Sequence[Row], params: int, dtype: Dtype) -> "Best":
        """What an earlier run found for a target of so many parameters in this dtype, by the rows that it left."""
        own = [row for row in rows if (row["target_params"], row.get("dtype")) == (params, dtype)]
        chosen = [row for row in own if row["contender"] in VLLM_SPECULATIVE]
        return cls({(row["contender"], row["temperature"]): row["k"] for row in chosen})


def probe_vllm(setup: Setup, work: Work) -> Best:
    """Tries vLLM's methods with each K on a few prompts; those that can't be started are missing afterwards."""
    best = Best()
    methods = [name for name in VLLM_SPECULATIVE if work.wants(name)]
    for name in methods:
        rates: dict[tuple[int, float], float] = {}
        if len(work.chains) == 1:
            best.vllm |= {(name, temperature): work.chains[0] for temperature in work.temperatures}
            continue
        for k in work.chains:
            with Peers(setup) as peers:
                workers = peers.bring([(name, k)])
                if not workers:
                    break  # with another K it wouldn't start either
                try:
                    for temperature in work.temperatures:
                        rates[k, temperature] = probe_rate(workers[name, k].run, work.probes(temperature), work.ends)
                except WorkerError as error:
                    setup.notes.add(f"left out: {error}")
        for temperature in work.temperatures:
            tried = {k: rate for (k, t), rate in rates.items() if t == temperature}
            if tried:
                best.vllm[name, temperature] = max(tried, key=lambda k: tried[k])
                setup.notes.add(f"{name}, {setup.pair.params} parameters, T = {temperature:g}: tokens/s by K {tried}")
    return best


def probe_rate(run: Run, asks: Sequence[Ask], ends: frozenset[int]) -> float:
    """Median tokens/s of a few prompts."""
    streams = [cut(run([ask])[0], ends) for ask in asks]
    rates = [stream.decoding_tps or 0.0 for stream in streams]
    return round(statistics.median(rates[1:] or rates), 1)


def probe_ours(held: Own, asks: Sequence[Ask], ends: frozenset[int], chains: Sequence[tuple[int, int]]) -> Any:
    """The best of our sequential contender's chains."""
    return max(chains, key=lambda chain: probe_rate(held.sequential(*chain), asks, ends))


def measure(
    setup: Setup, work: Work, best: Best, share: Callable[[], float], progress: Progress
) -> Iterator[list[Row]]:
    """The rows of one temperature after the other.

    share(): until when the next part may take, on the monotonic clock. Starting everybody is one.
    """
    share()
    with own(setup, work.served) as held, Peers(setup) as peers:
        for temperature in work.temperatures:
            asks = work.asks(temperature)
            workers = peers.bring(wanted(work, best, temperature))
            deadline = share()
            reference = workers.get((TRANSFORMERS, 0))
            chain = probe_ours(
                held, work.probes(temperature), work.ends, CHAINS if len(work.chains) > 1 else FEW_CHAINS
            )
            runs, settings = contenders(held, workers, work, chain)
            title = f"{setup.pair.params / 1e6:.0f}M, {setup.place.accounting}, T = {temperature:g}"
            samples = take_turns(setup.notes, runs, asks, work, deadline, progress, title)
            compared = (
                same_as(reference, samples, asks[work.warm :], work, setup.pair.dtype) if temperature == 0 else {}
            )
            common: Row = {"target_params": setup.pair.params, "streams": 1, "temperature": temperature}
            common |= {"accounting": setup.place.accounting, "loop": "prompts", "dtype": setup.pair.dtype}
            yield [
                {"contender": name, **common}
                | one_stream(held_streams)
                | compared.get(name, {})
                | settings.get(name, {})
                for name, held_streams in samples.items()
            ]


def wanted(work: Work, best: Best, temperature: float) -> list[Key]:
    """The peers of a temperature, each with its best K."""
    keys = [(name, 0) for name in (TRANSFORMERS, ASSISTED, VLLM)]
    keys += [(name, best.vllm[name, temperature]) for name in VLLM_SPECULATIVE if (name, temperature) in best.vllm]
    return [key for key in keys if work.wants(key[0])]


def contenders(
    held: Own, workers: dict[Key, Worker], work: Work, chain: tuple[int, int]
) -> tuple[dict[str, Run], dict[str, Row]]:
    """All that take part, by name; and what rows say of their settings."""
    runs: dict[str, Run] = {name: worker.run for (name, _), worker in workers.items()}
    settings: dict[str, Row] = {name: {"k": k} for (name, k) in workers if k}
    runs |= {"paceline-plain": held.plain, "paceline-sequential": held.sequential(*chain)}
    settings["paceline-sequential"] = {"k": chain[0], "lookup": chain[1]}
    runs |= {"paceline-auto": held.automatic, "paceline-pipelined": held.pipelined, **held.served}
    return {name: run for name, run in runs.items() if work.wants(name)}, settings


def take_turns(
    notes: Notes,
    runs: dict[str, Run],
    asks: Sequence[Ask],
    work: Work,
    deadline: float,
    progress: Progress,
    title: str,
) -> dict[str, list[Stream]]:
    """Every prompt through all of them, in an order of its own; past the deadline no further prompt is begun.

    Who ends on the way is left out, with a note.
    """
    rng = random.Random(0)
    samples: dict[str, list[Stream]] = {name: [] for name in runs}
    task = progress.add_task(title, total=len(asks))
    for index, ask in enumerate(asks):
        if index > work.warm and time.monotonic() > deadline:
            break
        for name in rng.sample(sorted(runs), len(runs)):
            try:
                samples[name].append(cut(runs[name]([ask])[0], work.ends))
            except (WorkerError, RayError, BrokenExecutor) as error:
                notes.add(f"left out: {name}, {str(error)[-300:]}")
                del runs[name], samples[name]
        progress.advance(task)
    return {name: streams[work.warm :] for name, streams in samples.items()}


def same_as(
    reference: Worker | None, samples: dict[str, list[Stream]], asks: Sequence[Ask], work: Work, dtype: Dtype
) -> dict[str, Row]:
    """How many outputs of each contender are those of transformers; nothing without it."""
    if reference is None or TRANSFORMERS not in samples:
        return {}
    outputs = [list(stream.tokens) for stream in samples[TRANSFORMERS]]
    pairs = zip(asks, outputs, strict=False)
    margins = [reference.ask({"prompt": list(ask.prompt), "output": output})["margins"] for ask, output in pairs]
    return {
        name: compare(streams, outputs, lambda index, at: float(margins[index][at]), work.decode, dtype)
        for name, streams in samples.items()
    }
