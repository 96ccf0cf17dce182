"""Who takes part: transformers and vLLM as worker processes, Paceline as actors and as a server; and where they compute.

Accounting says which cores everybody has:
  same-target-core   the target on the first core, alone; a draft in a process of its own (Paceline's) on the second
  total-cores        both cores for everybody: two threads, or a core for the target and one for the draft
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import servers
from benchmarks.bench.checkpoints import Pair
from benchmarks.bench.http_client import Server, closed_loop
from benchmarks.bench.own import Pipelined, Turns
from benchmarks.bench.streams import Accounting, Ask, Stream
from benchmarks.bench.worker import Worker, WorkerError, idle_share
from benchmarks.server import ROOT
from cluster.placement import Placement

HERE = Path(__file__).parent
# Of vLLM's workers: without it, vLLM ends on a CPU at T > 0, or draws at temperatures of chance.
MENDED = "cluster.vllm_mended_worker.MendedWorker"
SERVED = {"paceline-served-plain": servers.PLAIN, "paceline-served": servers.DRAFTED}
VLLM, VLLM_SPECULATIVE = "vllm", ("vllm-ngram", "vllm-suffix", "vllm-draft-model")
TRANSFORMERS, ASSISTED = "transformers", "transformers-assisted"
CHAINS = (2, 3, 5, 8)  # draft tokens a step that are tried with vLLM's methods
_IDLE_SHARE = 0.1  # of a core: a worker that takes more while it waits disturbs the others
_KV_GB = "1"
# Threads that a first prompt starts may spin afterwards; and guesses, drawn or not, have been made once by then.
_FIRST = tuple(Ask((1, 2, 3) * 8, 0, temperature, 32) for temperature in (0.0, 1.0))
Key = tuple[str, int]  # name, draft tokens a step; 0 where there are none
Run = Callable[[Sequence[Ask]], list[Stream]]


@dataclass(frozen=True)
class Place:
    """The cores of a run: the first two that this process may use."""

    accounting: Accounting
    cores: tuple[int, ...]

    @property
    def peers(self) -> tuple[int, ...]:
        """What one process that does everything has."""
        return self.cores if self.accounting == "total-cores" else self.cores[:1]


@dataclass(frozen=True)
class Environments:
    """The interpreters of the peers' environments; a peer whose interpreter is missing is left out."""

    vllm: Path
    transformers: Path
    eager: bool  # vLLM without torch.compile


@dataclass
class Notes:
    """What isn't in the rows: who was left out and why, and the conditions."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Written at once."""
        if line not in self.lines:
            self.lines.append(line)
            self.path.write_text(json.dumps(self.lines, indent=1) + "\n")
            sys.stderr.write(f"note: {line}\n")

    def idle(self, name: str, share: float) -> None:
        """What a contender takes of a core while it waits: worth a note when it disturbs others."""
        if share > _IDLE_SHARE:
            self.add(f"{name} takes {share:.2f} of a core while it waits")


@dataclass(frozen=True)
class Setup:
    """One target on some cores. out: folder of logs."""

    pair: Pair
    place: Place
    environments: Environments
    notes: Notes
    out: Path


def speculation(name: str, k: int, draft: Path) -> dict[str, Any] | None:
    """vLLM's speculative configuration."""
    kinds: dict[str, dict[str, Any]] = {
        "vllm-ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
        "vllm-suffix": {"method": "suffix"},
        # Drafts drawn at the request's temperature, and verified by what they had: by default they are its likeliest.
        "vllm-draft-model": {"method": "draft_model", "model": str(draft), "draft_sample_method": "probabilistic"},
    }
    return {**kinds[name], "num_speculative_tokens": k} if name in kinds else None


def environment(place: Place) -> dict[str, str]:
    """Variables of a peer's process."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(place.peers)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "",  # nothing of ours
    }


def vllm_environment(place: Place, python: Path) -> dict[str, str]:
    """Variables of a process of vLLM's."""
    return environment(place) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.peers)),
        "VLLM_CPU_KVCACHE_SPACE": _KV_GB,
        # vLLM 0.32 can't load what it compiled ahead of time for a CPU, and compiles again on every start; without it,
        # the same compiler keeps its work by itself.
        "VLLM_USE_AOT_COMPILE": "0",
        # Its n-gram lookup: a thread of numba's for each core of the machine, on the cores that it has, waited for
        # each other, on a busy machine for seconds.
        "NUMBA_NUM_THREADS": str(len(place.peers)),
        "LD_PRELOAD": ":".join(map(str, preloaded(python))),
        # Of Intel's OpenMP, as vLLM sets them for workers in processes of their own.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "PYTHONPATH": str(ROOT),  # for MENDED; nothing else of ours
    }


def preloaded(python: Path) -> list[Path]:
    """What vLLM's documentation has preloaded on CPUs, as far as it is there: tcmalloc and Intel's OpenMP."""
    folder = python.absolute().parents[1]
    return [*folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), *folder.glob("lib/libiomp5.so")]


class Peers:
    """The peers' worker processes for one target. A context manager that ends them."""

    def __init__(self, setup: Setup) -> None:
        self._pair, self._place, self._environments = setup.pair, setup.place, setup.environments
        self._notes, self._out = setup.notes, setup.out
        self._workers: dict[Key, Worker] = {}

    def bring(self, wanted: Sequence[Key]) -> dict[Key, Worker]:
        """The workers of these contenders; others are ended. Those that don't start are left out, with a note."""
        for key in [key for key in self._workers if key not in wanted]:
            self._workers.pop(key).close()
        missing = [key for key in wanted if key not in self._workers and self._available(key[0])]
        while missing:  # two at a time: more would only be in each other's way
            self._start(missing[:2])
            missing = missing[2:]
        return {key: self._workers[key] for key in wanted if key in self._workers}

    def _start(self, keys: Sequence[Key]) -> None:
        started = {key: self._worker(key) for key in keys}
        for key, worker in started.items():
            try:
                worker.wait_ready()
                for ask in _FIRST:
                    worker.run([ask])
            except WorkerError as error:
                worker.close()
                self._notes.add(f"left out: {error}")
            else:
                self._workers[key] = worker

    def _available(self, name: str) -> bool:
        python, target = (
            (self._environments.transformers, "transformers")
            if name.startswith(TRANSFORMERS)
            else (self._environments.vllm, "vllm")
        )
        if not python.exists():
            self._notes.add(f"left out: {name}, there is no {python} ('make {target}' sets it up)")
        return python.exists()

    def _worker(self, key: Key) -> Worker:
        name, k = key
        if name.startswith(TRANSFORMERS):
            draft = str(self._pair.draft) if name == ASSISTED else None
            options: dict[str, Any] = {"target": str(self._pair.target), "draft": draft, "cores": self._place.peers}
            options["dtype"] = self._pair.dtype
            script, python = HERE / "transformers_worker.py", self._environments.transformers
            variables = environment(self._place)
        else:
            config = speculation(name, k, self._pair.draft)
            options = {"target": str(self._pair.target), "speculation": config, "context": servers.CONTEXT}
            options |= {"dtype": self._pair.dtype, "streams": 1, "eager": self._environments.eager}
            options |= {"extension": MENDED, "cores": self._place.peers}
            script, python = HERE / "vllm_engine_worker.py", self._environments.vllm
            variables = vllm_environment(self._place, python) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = f"{name}-{k}-{self._pair.params}-{self._pair.dtype}-{self._place.accounting}"
        return Worker(log, [str(python), str(script), json.dumps(options)], variables, self._out)

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self.bring(())


@dataclass(frozen=True)
class Own:
    """Paceline's contenders, loaded. sequential(k, lookup) is one of them for each; automatic: what users get, in turns."""

    plain: Run
    automatic: Run
    sequential: Callable[[int, int], Run]
    pipelined: Run
    served: dict[str, Run]


@contextmanager
def own(setup: Setup, with_server: bool) -> Iterator[Own]:
    """Loads them. Ends them."""
    pair, place, out = setup.pair, setup.place, setup.out
    where = Placement(cores=place.peers, threads=len(place.peers))
    with ExitStack() as stack:
        served: dict[str, Run] = {}
        if with_server:
            try:
                found = stack.enter_context(
                    servers.paceline(pair, place.cores, len(place.peers), out, servers.KV_TOKENS)
                )
                served = {name: over_http(found[model]) for name, model in SERVED.items()}
            except SystemExit as error:
                setup.notes.add(f"left out: paceline serve, {str(error)[-300:]}")
        pipelined = Pipelined(pair, place.cores)
        stack.callback(pipelined.close)
        turns = Turns(pair, where)
        stack.callback(turns.close)
        turns.wait_ready()

        def sequential(k: int | None, lookup: int) -> Run:
            return lambda asks: turns.run(asks, k, lookup)

        yield Own(sequential(0, 0), sequential(None, 0), sequential, pipelined.run, served)


def over_http(server: Server) -> Run:
    """All prompts at the same time."""
    return lambda asks: asyncio.run(closed_loop(server, asks, len(asks)))[1]


@contextmanager
def vllm_servers(setup: Setup, keys: Sequence[Key], streams: int) -> Iterator[dict[Key, Server]]:
    """`vllm serve` for each of these, two starting at a time; those that don't start are left out, with a note."""
    pair, env, notes = setup.pair, setup.environments, setup.notes
    if keys and not env.vllm.exists():
        notes.add(f"left out: vllm serve, there is no {env.vllm} ('make vllm' sets it up)")
        keys = ()
    with ExitStack() as stack:
        ready: dict[Key, Server] = {}
        for some in (keys[i : i + 2] for i in range(0, len(keys), 2)):
            starting = []
            for name, k in some:
                config, held = speculation(name, k, pair.draft), stack.enter_context(ExitStack())
                more = ("--speculative-config", json.dumps(config)) if config else ()
                arguments = ("--worker-extension-cls", MENDED, *more)
                options = servers.VllmOptions(env.vllm, pair, arguments, streams, env.eager)
                variables, served = vllm_environment(setup.place, env.vllm), f"{name}-{k}-served"
                started = held.enter_context(servers.vllm(served, options, variables, setup.out))
                starting.append(((name, k), held, started))
            for key, held, (server, process) in starting:
                try:
                    servers.wait_ready(server, process)
                    ready[key] = server
                    asyncio.run(closed_loop(server, _FIRST, 1))
                    notes.idle(server.model, idle_share(process.pid))
                except TimeoutError as error:
                    notes.add(f"left out: {error}")
                    held.close()
        yield ready
