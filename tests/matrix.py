"""The first promise as a program: every drafter, window, batch, link and temperature gives the tokens of plain decoding.

`make exact` runs the full matrix: in one process, through target and draft replicas, also while requests are cancelled and
replicas killed, and through a server. The tests run a sample of it.

    python -m tests.matrix --prompts 24 --part engine --only batch=8
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain as chained
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from cluster.best_place import PLACES, Place
from cluster.draft import DraftReplica
from cluster.drafters import make_local
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.link import memory_link
from cluster.own_guesses import LocalDrafter
from cluster.target import TargetReplica
from engine.budget import Window
from engine.decode import Generation, Speculation
from engine.drafters.model import ModelDrafter
from engine.runner import Dtype, ModelRunner
from engine.text import load_tokenizer
from engine.types import GenerationRequest
from engine.windows import FixedChain
from tests.exact import (
    DRAFT,
    LOCALS,
    PROMPTS,
    SELF_SPECULATIONS,
    SPECULATIONS,
    TARGET,
    TEMPERATURES,
    TIE,
    TIES,
    Comparison,
    Difference,
    Result,
    Tokens,
    differences,
    faulty_ends,
    goodput,
    load_prompts,
    make_requests,
    run,
    serve,
    sharing,
    versus_transformers,
)
from tests.faults import STREAMS, faults_matrix
from tests.served import served_matrix

ROOT = Path(__file__).parent.parent
BATCHES = (1, 4, 8)
WINDOWS: dict[str, Callable[[], Window]] = {"chain": lambda: FixedChain(5), "tree": goodput}


@dataclass
class Plain:
    """What is asked at one temperature, and what plain decoding, one at a time, gives: the measure of all cases."""

    runner: ModelRunner
    requests: Sequence[GenerationRequest]

    @cached_property
    def outputs(self) -> list[list[int]]:
        """Decoded when they are first needed."""
        return [each.tokens for each in run(self.runner, self.requests, batch=1)]

    def differences(self, generations: Sequence[Generation]) -> list[Difference]:
        """Where others part from it."""
        return list(differences(generations, self.outputs))

    @property
    def tokens(self) -> int:
        """Of all outputs together."""
        return sum(map(len, self.outputs))


def engine_matrix(
    runner: ModelRunner, draft: ModelRunner, prompts: Sequence[Tokens], tokens: int
) -> Iterator[Comparison]:
    """In one process: transformers' greedy output, then every drafter, window and batch at every temperature."""
    yield Comparison("transformers' generate", partial(beside_transformers, runner, prompts, tokens))
    speculations: dict[str, Callable[[], Speculation | None]] = {
        "plain": lambda: None,
        **{name: partial(make, draft) for name, make in SPECULATIONS.items()},
        **{name: partial(make, runner) for name, make in SELF_SPECULATIONS.items()},
    }
    for temperature in TEMPERATURES:
        plain = Plain(runner, make_requests(prompts, temperature, tokens))
        for batch in BATCHES:
            for name, make in speculations.items():
                yield Comparison(f"T={temperature} batch={batch} {name}", partial(in_process, plain, make, batch))


def beside_transformers(runner: ModelRunner, prompts: Sequence[Tokens], tokens: int) -> Result:
    """Greedy outputs are transformers' own, up to ties."""
    found = versus_transformers(runner, prompts, tokens)
    wrong = [difference for difference in found if difference.margin is None or difference.margin >= TIE]
    return f"{len(prompts)} greedy outputs, {len(found) - len(wrong)} ties", wrong


def in_process(plain: Plain, make: Callable[[], Speculation | None], batch: int) -> Result:
    """One drafter and window, so many sequences at a time."""
    generations = run(plain.runner, plain.requests, make(), batch)
    per_step = plain.tokens / sum(generation.steps for generation in generations)
    return f"{per_step:.2f} tokens a step", plain.differences(generations)


def ties_matrix(
    prompts: Sequence[Tokens],
    tokens: int,
    dtypes: Sequence[Dtype] = tuple(TIES),
    temperatures: Sequence[float] = TEMPERATURES,
    names: Sequence[str] = ("plain", "ngram-3", "tree-31"),
) -> Iterator[Comparison]:
    """Outside invariant mode: where its outputs leave those of invariant mode, which must be at ties; they are counted."""
    draft = ModelRunner(DRAFT, dtype="float32", kv_tokens=8 * 1024)
    for dtype in dtypes:
        invariant = ModelRunner(TARGET, dtype=dtype, invariant=True, kv_tokens=2 * 1024)
        fast = ModelRunner(TARGET, dtype=dtype, kv_tokens=8 * 1024)
        for temperature in temperatures:
            plain = Plain(invariant, make_requests(prompts, temperature, tokens))
            for name in names:
                speculation = SPECULATIONS[name](draft) if name != "plain" else None
                yield Comparison(
                    f"{dtype} T={temperature} {name}", partial(up_to_ties, fast, plain, speculation, TIES[dtype])
                )


def up_to_ties(fast: ModelRunner, plain: Plain, speculation: Speculation | None, tie: float) -> Result:
    """How many outputs part, and those that do where the best scores are further apart than a tie."""
    found = plain.differences(run(fast, plain.requests, speculation, margins=True))
    wrong = [each for each in found if each.margin is None or each.margin >= tie]
    largest = max((each.margin for each in found if each.margin is not None), default=0.0)
    counted = f"{len(found)} of {len(plain.requests)} outputs part at a tie, the widest of {largest:.2g}"
    return f"{plain.tokens} tokens, {counted}", wrong


def pipeline_matrix(
    runner: ModelRunner, draft: ModelRunner, prompts: Sequence[Tokens], tokens: int
) -> Iterator[Comparison]:
    """Target and draft replicas on a gRPC link and on a faulty one, against plain decoding in one process."""
    for temperature in TEMPERATURES:
        plain = Plain(runner, make_requests(prompts, temperature, tokens))
        for link in ("grpc", "faulty"):
            for batch in (1, 8):
                for name, window in WINDOWS.items():
                    case = partial(two_replicas, plain, draft, link, batch, window)
                    yield Comparison(f"T={temperature} {link} batch={batch} {name}", case)


def two_replicas(plain: Plain, draft: ModelRunner, link: str, batch: int, window: Callable[[], Window]) -> Result:
    """A target and a draft, audited at the end."""
    target = TargetReplica(plain.runner, window(), max_batch=batch, lookup=8)
    drafting = DraftReplica(ModelDrafter(draft))
    server = DraftServer("127.0.0.1", 0, drafting.add_link)
    down, up = (connect(server.address, 10.0), None) if link == "grpc" else faulty_ends()
    if up is not None:
        drafting.add_link(up)
    target.add_link(down)
    generations = serve(target, plain.requests)
    assert target.wait_idle(60.0)
    target.check()
    target.close()
    server.stop()
    drafting.close()
    return f"{guessed(generations, plain)} from the draft", plain.differences(generations)


def local_matrix(
    runner: ModelRunner, draft: ModelRunner, prompts: Sequence[Tokens], tokens: int
) -> Iterator[Comparison]:
    """Target replicas that guess by themselves, alone and with a draft replica, against plain decoding in one process."""
    tokenizer = load_tokenizer(TARGET)
    for temperature in TEMPERATURES:
        plain = Plain(runner, make_requests(prompts, temperature, tokens))
        for name, config in LOCALS.items():
            make = partial(make_local, config, runner, tokenizer)
            for batch, drafts in ((1, 0), (8, 0), (8, 1)):
                case = partial(with_local_drafter, plain, draft if drafts else None, make, batch)
                yield Comparison(f"T={temperature} local {name} batch={batch} drafts={drafts}", case)
        for places in (("shared",), PLACES):
            for batch in (1, 8):
                case = partial(with_places, plain, draft, places, batch)
                yield Comparison(f"T={temperature} draft {' '.join(places)} batch={batch}", case)


def with_local_drafter(
    plain: Plain, draft: ModelRunner | None, make: Callable[[], LocalDrafter | None], batch: int
) -> Result:
    """A target with a drafter of its own, beside a draft or none."""
    target = TargetReplica(plain.runner, goodput(), max_batch=batch, lookup=8, local=make())
    return beside_draft(target, plain, draft)


def with_places(plain: Plain, draft: ModelRunner, places: Sequence[Place], batch: int) -> Result:
    """A target whose draft changes places, as it measures, or only shares its process."""
    shared = sharing(ModelRunner(DRAFT, dtype="float32", kv_tokens=8 * 1024))
    target = TargetReplica(plain.runner, goodput(), max_batch=batch, lookup=8, shared=shared, places=places)
    told, wrong = beside_draft(target, plain, draft if "separate" in places else None)
    shared.drafter.check()
    return f"{told}, steps {target.stats().places}", wrong


def beside_draft(target: TargetReplica, plain: Plain, draft: ModelRunner | None) -> Result:
    """A target, audited at the end, with a draft replica or none."""
    drafting = DraftReplica(ModelDrafter(draft)) if draft is not None else None
    if drafting is not None:
        down, up = memory_link()
        drafting.add_link(up)
        target.add_link(down)
    generations = serve(target, plain.requests)
    assert target.wait_idle(60.0)
    target.check()
    target.close()
    if drafting is not None:
        drafting.close()
    return f"{guessed(generations, plain)} guessed", plain.differences(generations)


def guessed(generations: Sequence[Generation], plain: Plain) -> str:
    """By a draft, or by the target's own drafter."""
    return f"{sum(generation.accepted for generation in generations) / plain.tokens:.0%} of the tokens"


class Results:
    """What was found to be equal, in a file: a matrix of hours can be run in pieces."""

    def __init__(self, folder: Path, conditions: Sequence[int]) -> None:
        """conditions: how many prompts and tokens. Of others, or of other code or models, there is another file."""
        self.path = folder / f"{digest(conditions)}.json"
        self.equal: dict[str, str] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, case: str, told: str) -> None:
        """Written at once, and whole."""
        self.equal[case] = told
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.equal, indent=1) + "\n")
        beside.replace(self.path)


def digest(conditions: Sequence[int]) -> str:
    """Of what is compared, and how."""
    code = [path for folder in ("engine", "cluster", "deployments", "tests") for path in (ROOT / folder).rglob("*.py")]
    files = sorted([*code, *(ROOT / "models").rglob("*.safetensors"), PROMPTS])
    held = hashlib.sha256(repr(conditions).encode())
    for path in files:
        held.update(path.read_bytes())
    return held.hexdigest()[:16]


class Matrix:
    """The cases of one part, or of all of them ("all"), in one process."""

    def __init__(self, part: str, prompts: int, tokens: int, count: int) -> None:
        """Loads both models. prompts: how many, tokens: for each, count: of prompts through a server."""
        torch.set_num_threads(1)
        self._runner = runner = ModelRunner(TARGET, dtype="float32", invariant=True, kv_tokens=8 * 1024)
        self._draft = draft = ModelRunner(DRAFT, dtype="float32", kv_tokens=8 * 1024)
        texts = load_prompts(prompts)
        together: dict[str, Callable[[], Iterator[Comparison]]] = {
            "engine": lambda: engine_matrix(runner, draft, texts, tokens),
            "ties": lambda: ties_matrix(texts, tokens),
            "pipeline": lambda: chained(
                pipeline_matrix(runner, draft, texts, tokens), local_matrix(runner, draft, texts, tokens)
            ),
        }
        self._alone: dict[str, Callable[[], Iterator[Comparison]]] = {
            "faults": lambda: faults_matrix(runner, texts[:STREAMS], tokens),
            "served": lambda: served_matrix(runner, load_prompts(count), tokens),
        }
        self._part = part
        self.together = {case.name: case for name, make in together.items() if part in (name, "all") for case in make()}

    def alone(self) -> Iterator[Comparison]:
        """Cases that start processes of their own, so that nothing else is to run beside them, one after the other."""
        for name, make in self._alone.items():
            if self._part in (name, "all"):
                yield from make()

    def run(self, case: Comparison) -> Result:
        """Behind it nobody holds pages."""
        result = case.run()
        assert self._runner.pool.used_pages == self._draft.pool.used_pages == 0, f"{case.name}: pages are held"
        return result


_matrix: Matrix | None = None  # of a process that runs cases for another


def _prepare(conditions: tuple[str, int, int, int]) -> None:
    global _matrix
    _matrix = Matrix(*conditions)


def _run(name: str) -> Result:
    assert _matrix is not None
    return _matrix.run(_matrix.together[name])


def in_processes(
    names: Sequence[str], conditions: tuple[str, int, int, int], jobs: int
) -> Iterator[tuple[str, Result]]:
    """Results of cases that need one core each, in the order in which they come."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (conditions,)) as pool:
        running = {pool.submit(_run, name): name for name in names}
        for future in as_completed(running):
            yield running[future], future.result()


def main() -> int:
    """Exits with 1 when an output is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tests.matrix"
    )
    parser.add_argument("--prompts", type=int, default=200, help="how many of the bundled prompts (200)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate for each (32)")
    parser.add_argument("--count", type=int, default=100, help="how many of them through a server (100)")
    parser.add_argument(
        "--part", choices=["engine", "ties", "pipeline", "faults", "served", "all"], default="all", help="what to run"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name, as 'T=0.7 '")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that run cases, one core each (as many as there are cores)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("build/exact"),
        metavar="DIR",
        help="keeps what was equal; the same command leaves it out, unless the code has changed (build/exact)",
    )
    arguments = parser.parse_args()
    conditions = (arguments.prompts, arguments.tokens, arguments.count)
    results, matrix = Results(arguments.results, conditions), Matrix(arguments.part, *conditions)
    wrong: list[str] = []

    def is_left(name: str) -> bool:
        return arguments.only in name and name not in results.equal

    def tell(name: str, result: Result) -> None:
        told, found = result
        progress.print(f"{name}, {told}: " + (f"WRONG {found}" if found else "equal"), soft_wrap=True)
        progress.advance(task)
        if found:
            wrong.append(name)
        else:
            results.add(name, told)

    left = [name for name in matrix.together if is_left(name)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:", TimeRemainingColumn())
    with Progress(*columns) as progress:
        if results.equal:
            progress.print(f"equal before, and left out: {len(results.equal)} ({results.path})", soft_wrap=True)
        task = progress.add_task("cases", total=len(left))
        if arguments.jobs > 1:
            for name, result in in_processes(left, (arguments.part, *conditions), arguments.jobs):
                tell(name, result)
        else:
            for name in left:
                tell(name, matrix.run(matrix.together[name]))
        for number, case in enumerate(filter(lambda case: is_left(case.name), matrix.alone()), len(left) + 1):
            progress.update(task, total=number)  # how many there are is only known as they come
            tell(case.name, matrix.run(case))
        progress.print(f"WRONG: {', '.join(wrong)}" if wrong else "all equal", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
