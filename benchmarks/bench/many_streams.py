"""Several streams: servers behind HTTP, in closed loops of so many clients and in open loops of rising request rates."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from rich.progress import Progress

from benchmarks.bench import servers
from benchmarks.bench.contenders import (
    SERVED,
    TRANSFORMERS,
    VLLM,
    Key,
    Notes,
    Peers,
    Setup,
    vllm_servers,
)
from benchmarks.bench.http_client import Server, arrival_times, closed_loop, open_loop
from benchmarks.bench.one_stream import Best, Work
from benchmarks.bench.streams import OPEN, Ask, Limit, Row, Stream, cut, goodput, latencies, many_streams
from benchmarks.bench.worker import SETTLE_S

Round = tuple[float, list[Stream]]  # seconds, what came
Loop = Callable[[Sequence[Ask], int], Round]  # so many clients


@dataclass(frozen=True)
class Load:
    """What is asked of servers."""

    vllm: tuple[str, ...]  # its methods that are served
    streams: tuple[int, ...]
    rounds: int  # of a closed loop; one more warms up
    each: int  # requests of each client in a round
    rates: tuple[float, ...]  # of open loops, over what plain vLLM served in a closed loop; empty for none
    seconds: float  # of an open loop at one rate
    limit: Limit


def measure(
    setup: Setup, work: Work, load: Load, best: Best, share: Callable[[], float], progress: Progress
) -> Iterator[list[Row]]:
    """Rows of closed loops, then of open ones, temperature by temperature. share: as in one_stream.measure."""
    keys = {t: [key for key in peers(best, t) if work.wants(key[0]) and key[0] in load.vllm] for t in work.temperatures}
    every = list(dict.fromkeys(key for some in keys.values() for key in some))
    pair, place = setup.pair, setup.place
    share()  # of starting everybody
    with (
        servers.paceline(pair, place.cores, len(place.peers), setup.out) as ours,
        vllm_servers(setup, every, max(load.streams)) as theirs,
        Peers(setup) as others,
    ):
        batch = others.bring([(TRANSFORMERS, 0)] if work.wants(TRANSFORMERS) else [])
        for temperature in work.temperatures:
            found = {name: ours[model] for name, model in SERVED.items() if work.wants(name)}
            found |= {f"{key[0]}-served": theirs[key] for key in keys[temperature] if key in theirs}
            chosen = {f"{name}-served": {"k": k} for name, k in keys[temperature] if k}
            asks = endless(work.make(work.prompts, temperature))
            loops = {name: over_http(server) for name, server in found.items()}
            loops |= {name: static_batch(worker.run, work) for (name, _), worker in batch.items()}
            common: Row = {"target_params": pair.params, "temperature": temperature, "accounting": place.accounting}
            common |= {"dtype": pair.dtype}
            served: dict[str, float] = {}
            for streams in load.streams:
                title = f"{streams} streams, T = {temperature:g}"
                rounds = answered(take_turns(loops, asks, streams, load, share(), progress, title), setup.notes, title)
                yield [
                    {"contender": name, "streams": streams, **common, "loop": "closed"}
                    | many_streams(held)
                    | chosen.get(name, {})
                    for name, held in rounds.items()
                ]
                served |= {name: max(rate, served.get(name, 0.0)) for name, rate in requests_per_s(rounds).items()}
            if load.rates:
                yield from opened(found, asks, load, served, common, progress)


def peers(best: Best, temperature: float) -> list[Key]:
    """vLLM plain, and its methods with their best K."""
    return [(VLLM, 0), *((name, k) for (name, t), k in best.vllm.items() if t == temperature)]


def over_http(server: Server) -> Loop:
    """A closed loop."""
    return lambda asks, clients: asyncio.run(closed_loop(server, asks, clients))


def static_batch(run: Callable[[Sequence[Ask]], list[Stream]], work: Work) -> Loop:
    """transformers has no server: as many prompts as there are clients at a time, the next when all have ended."""

    def loop(asks: Sequence[Ask], clients: int) -> Round:
        started = time.monotonic()
        streams: list[Stream] = []
        for index in range(0, len(asks), clients):
            streams += run(asks[index : index + clients])
        return time.monotonic() - started, [cut(stream, work.ends) for stream in streams]

    return loop


def endless(asks: Sequence[Ask]) -> Iterator[Ask]:
    """Prompts come again when there is no other left, with another seed: drawn texts are not known already."""
    return (replace(asks[number % len(asks)], seed=number) for number in count())


def take_turns(
    loops: dict[str, Loop],
    asks: Iterator[Ask],
    streams: int,
    load: Load,
    deadline: float,
    progress: Progress,
    title: str,
) -> dict[str, list[Round]]:
    """Rounds of all of them in turn, the next asks in each; the first one warms up.

    Past the deadline no further one is begun.
    """
    rng = random.Random(streams)
    rounds: dict[str, list[Round]] = {name: [] for name in loops}
    task = progress.add_task(title, total=load.rounds + 1)
    for number in range(load.rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        asked = list(islice(asks, streams * load.each))
        for name in rng.sample(sorted(loops), len(loops)):
            rounds[name].append(loops[name](asked, streams))
            settle(name)
        progress.advance(task)
    return {name: held[1:] for name, held in rounds.items()}


def answered(rounds: dict[str, list[Round]], notes: Notes, title: str) -> dict[str, list[Round]]:
    """The rounds of those who answered anything. Requests that failed are noted: their tokens are missing in the rates."""
    answers: dict[str, list[Round]] = {}
    for name, held in rounds.items():
        streams = [stream for _, some in held for stream in some]
        failed = sum(not stream.arrivals for stream in streams)
        if failed:
            notes.add(f"{title}: {failed} of {len(streams)} requests to {name} failed")
        if failed < len(streams):
            answers[name] = held
    return answers


def settle(name: str) -> None:
    """vLLM's servers go on looking for work for a while: the next one waits until they sleep."""
    if name.startswith(VLLM):
        time.sleep(SETTLE_S)


def requests_per_s(rounds: dict[str, list[Round]]) -> dict[str, float]:
    """What each of them served."""
    return {
        name: sum(bool(stream.arrivals) for _, streams in held for stream in streams)
        / sum(seconds for seconds, _ in held)
        for name, held in rounds.items()
        if held
    }


def opened(
    everybody: dict[str, Server],
    asks: Iterator[Ask],
    load: Load,
    served: dict[str, float],
    common: Row,
    progress: Progress,
) -> Iterator[list[Row]]:
    """The same rates and asks for all: shares of what plain vLLM served at its best, or our plain server without it."""
    full = served.get(f"{VLLM}-served", served.get("paceline-served-plain", 1.0))
    task = progress.add_task(f"open loop, T = {common['temperature']:g}", total=len(load.rates) * len(everybody))
    for number, share in enumerate(load.rates):
        rate, found = round(share * full, 3), []
        times = list(arrival_times(rate, load.seconds, number))
        asked = list(islice(asks, len(times)))
        for name in random.Random(number).sample(sorted(everybody), len(everybody)):
            started = time.monotonic()
            streams = asyncio.run(open_loop(everybody[name], asked, times))
            seconds = max(load.seconds, time.monotonic() - started)
            settle(name)
            row = {"contender": name, "streams": OPEN, **common, "loop": "open", "rate": rate}
            tokens = sum(stream.count for stream in streams)
            row |= {"tokens_per_s": round(tokens / seconds, 1), "spread": None, "tokens": tokens}
            found.append(row | latencies(streams) | goodput(streams, seconds, load.limit))
            progress.advance(task)
        yield found
