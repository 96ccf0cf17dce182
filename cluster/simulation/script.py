"""Requests whose outputs are known beforehand, with the draft's guess at every token; and a drafter that reads them off.

Where the guesses come from: recorded with real models (`benchmarks/simulate.py --record`), or drawn from a few numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.drafters.model import Growing, most_valuable, rows_beside, to_read
from engine.drafters.ngram import Earned, Lookup
from engine.tree import ROOT, Moved, TokenTree
from engine.types import FloatArray, GenerationRequest, IntArray, InvalidRequest, SamplingParams, require

_TOKENS = 2**30  # ids that are drawn from: no text repeats itself by chance
# Of the bundled pair at T = 1, by benchmarks/results/profile-2026-11-22.json.
FOLLOWING, SPREAD = (0.53, 0.23, 0.09, 0.045, 0.045), 0.35


@dataclass(frozen=True)
class Script:
    """One request and all that is known of it."""

    request: GenerationRequest
    output: tuple[int, ...]  # the target's tokens
    tokens: IntArray  # [output, children]: the draft's guesses at each of them, the likeliest first
    confidences: FloatArray  # [output, children]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How good a draft is, in a few numbers. Raises InvalidRequest.

    A guess's confidence is right as often as it says, and is independent of the guess before.
    """

    rate: float = 0.8  # of first guesses that are right: the acceptance rate of a chain
    following: tuple[float, ...] = FOLLOWING  # where the first is wrong: the second is right, the third...
    spread: float = SPREAD  # how far confidences lie apart: 0, all are `rate`; large, they are near 0 and 1

    def __post_init__(self) -> None:
        require(0 < self.rate < 1, "acceptance", "must be between 0 and 1")
        fits = all(share >= 0 for share in self.following) and sum(self.following) <= 1
        require(fits and bool(self.following), "following", "must be shares that add up to 1 at most")
        require(0 <= self.spread <= 100, "spread", "must be between 0 and 100")

    def draw(self, count: int, random: np.random.Generator) -> tuple[FloatArray, IntArray]:
        """For `count` tokens the guesses' confidences [count, children], and which guess is right, children if none."""
        first = np.full(count, self.rate)
        if self.spread > 0:
            first = random.beta(self.rate / self.spread, (1 - self.rate) / self.spread, count)
        shares = (1 - first)[:, None] * np.asarray(self.following)
        confidences = np.concatenate([first[:, None], shares], 1)
        right = (random.random((count, 1)) >= confidences.cumsum(1)).sum(1)
        return confidences.astype(np.float32), right.astype(np.int32)


def draw_scripts(acceptance: Acceptance, count: int, prompt: int, output: int, seed: int = 0) -> list[Script]:
    """Requests of random tokens, `prompt` and `output` of each; no text repeats itself."""
    random = np.random.default_rng(seed)
    scripts = []
    for index in range(count):
        text = random.integers(_TOKENS, size=prompt + output, dtype=np.int32)
        confidences, right = acceptance.draw(output, random)
        tokens = random.integers(_TOKENS, size=confidences.shape, dtype=np.int32)
        known = np.flatnonzero(right < tokens.shape[1])
        tokens[known, right[known]] = text[prompt:][known]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = GenerationRequest(str(index), tuple(text[:prompt].tolist()), params)
        scripts.append(Script(request, tuple(text[prompt:].tolist()), tokens, confidences))
    return scripts


def save_scripts(path: Path, scripts: Mapping[str, Sequence[Script]]) -> None:
    """Writes recorded requests, under a name for each set of them."""
    values = {name: [_plain(script) for script in group] for name, group in scripts.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, separators=(",", ":")) + "\n")


def load_scripts(path: Path, name: str) -> list[Script]:
    """What was recorded under this name. Raises OSError, and InvalidRequest for a file that holds something else."""
    try:
        return [_script(f"{name}-{index}", values) for index, values in enumerate(json.loads(path.read_text())[name])]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest("profile", f"{path} holds no recording of {name}") from error


def _plain(script: Script) -> dict[str, object]:
    return {
        "temperature": script.request.params.temperature,
        "prompt": script.request.prompt,
        "output": script.output,
        "tokens": script.tokens.tolist(),
        "confidences": [[round(value, 3) for value in row] for row in script.confidences.tolist()],
    }


def _script(request_id: str, values: dict[str, list[int]]) -> Script:
    output = tuple(values["output"])
    params = SamplingParams(values["temperature"], max_tokens=len(output), ignore_eos=True)  # type: ignore[arg-type]
    request = GenerationRequest(request_id, tuple(values["prompt"]), params)
    guesses = np.asarray(values["tokens"], np.int32), np.asarray(values["confidences"], np.float32)
    if len({len(output), *(len(guess) for guess in guesses)}) > 1:
        raise ValueError("not a guess for every token")
    return Script(request, output, *guesses)


@dataclass
class _Session:
    script: Script
    tokens: list[int]
    tree: TokenTree
    lookup: Lookup
    pending: int  # committed tokens that a model would still have to compute
    drawn: np.random.Generator  # of wrong guesses

    def __post_init__(self) -> None:
        self.lookup.hang(self.tree)


class ScriptedDrafter:
    """Implements Drafter: grows trees as engine.drafters.model.ModelDrafter does, and guesses what the scripts say.

    Beside the right path it guesses wrong tokens, with the confidences of a place drawn at random.
    """

    def __init__(self, scripts: Sequence[Script], growing: Growing, seed: int = 0) -> None:
        """Children of a node: what a script has, at most what `growing` keeps. seed: of wrong guesses, in each session."""
        self._scripts = {script.request.prompt: script for script in scripts}
        self._growing = growing
        self._seed = seed
        self._earned = Earned()
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        tree = TokenTree(tokens[-1], self._growing.max_nodes, params.temperature == 0)
        lookup = Lookup(tokens, params.temperature == 0, self._earned, self._growing.lookup)
        script = self._scripts[tuple(tokens[:prompt])]
        drawn = np.random.default_rng(self._seed)
        self._sessions[session] = _Session(script, list(tokens), tree, lookup, len(tokens), drawn)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        held.tokens.extend(tokens)
        moved = held.tree.commit(tokens)
        if not held.tree.expanded[ROOT]:
            held.pending += len(tokens)
        held.lookup.commit(tokens)
        held.lookup.hang(held.tree)
        return Moved(moved.path_slots, moved.freed_slots, moved.hit, moved.children or int(held.tree.size > 1))

    def grow(self) -> list[int]:
        """See Drafter."""
        pending = {session: held.pending for session, held in self._sessions.items() if held.pending}
        read = to_read(pending, self._growing)
        unfinished = any(count < pending[session] for session, count in read.items())
        rows = rows_beside(len(self._sessions), len(read), unfinished, self._growing)
        trees = {session: held.tree for session, held in self._sessions.items() if held.tree.expanded[ROOT]}
        slots = {
            session: self._growing.max_expanded - int(tree.expanded[ROOT + 1 : tree.size].sum())
            for session, tree in trees.items()
        }
        picked = most_valuable(trees, slots, rows, self._growing)
        for session, count in read.items():
            held = self._sessions[session]
            held.pending -= count
            if not held.pending:
                self._expand(held, [ROOT])
        for session, nodes in picked.items():
            self._expand(self._sessions[session], nodes)
        return list(dict.fromkeys([*read, *picked]))

    def _expand(self, held: _Session, nodes: list[int]) -> None:
        script, known = held.script, len(held.script.output)
        places = held.drawn.integers(known, size=len(nodes))
        tokens = held.drawn.integers(_TOKENS, size=(len(nodes), script.tokens.shape[1]), dtype=np.int32)
        done = len(held.tokens) - len(script.request.prompt)
        right = [ROOT, *held.tree.along(script.output[done : done + self._growing.max_depth])]
        for row, node in enumerate(nodes):
            place = done + right.index(node) if node in right else known
            if place < known:
                places[row], tokens[row] = place, script.tokens[place]
        children = self._growing.children
        held.tree.expand(nodes, tokens[:, :children], script.confidences[places, :children])

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)

    def check(self) -> None:
        """See Drafter."""
        for held in self._sessions.values():
            held.tree.check()
