"""Ways to draft by name, requests for the bundled pair, and comparisons of outputs: what exactness is tested with.

`tests.matrix` puts them together.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from cluster.draft import DraftReplica
from cluster.drafters import LocalConfig
from cluster.link import Link, memory_link
from cluster.own_guesses import LocalDrafter
from cluster.target import TargetReplica
from engine.automatic import taking_turns
from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.checkpoint import MODELS
from engine.decode import Generation, Speculation, decode
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.early_exit import EarlyExitDrafter
from engine.drafters.heads import HeadsDrafter, load_heads
from engine.drafters.jacobi import JacobiDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.retrieval import Documents, RetrievalDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translate import OtherTokenizerDrafter
from engine.runner import Dtype, ModelRunner
from engine.text import load_tokenizer
from engine.tree import Moved, TokenTree
from engine.types import Down, GenerationRequest, SamplingParams, TokenChunk, Up
from engine.windows import Bandit, ConfidenceThreshold, FixedChain, FixedTree, Heuristic
from tests.cluster_fixtures import PATIENCE_S, faulty, until

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"
HEADS = MODELS / "code-target-heads"
TEMPERATURES = (0.0, 0.7, 1.0)
# A smaller distance between the two best scores is a tie, where other shapes of a pass may choose otherwise. Logits in
# bfloat16 are multiples of 1/8 from 16 on, and rounded all along the way.
TIES: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.5}
TIE = TIES["float32"]

Tokens = tuple[int, ...]
Make = Callable[[ModelRunner], Speculation]  # from a draft, or from the target itself


@dataclass
class NonsenseDrafter:
    """Implements Drafter badly: unknown ids, and confidences that are no probabilities, anywhere in the tree."""

    vocab_size: int
    nodes: int = 12
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    trees: dict[int, TokenTree] = field(default_factory=dict)

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        self.trees[session] = TokenTree(tokens[-1], 64)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        return self.trees[session].commit(tokens)

    def grow(self) -> list[int]:
        unknown = [self.vocab_size, self.vocab_size + 7, 2**31 - 1, -1, -(2**31)]
        confidences = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.5, 1.0, 7.0]
        for tree in self.trees.values():
            for _ in range(self.nodes):
                known = self.rng.integers(self.vocab_size) if self.rng.random() < 0.7 else self.rng.choice(unknown)
                tree.add(int(self.rng.integers(tree.size)), int(known), float(self.rng.choice(confidences)))
        return list(self.trees)

    def tree(self, session: int) -> TokenTree:
        return self.trees[session]

    def close(self, session: int) -> None:
        self.trees.pop(session, None)

    def check(self) -> None:
        for tree in self.trees.values():
            tree.check()


def costs() -> CostModel:
    cost = CostModel()
    for rows, milliseconds in ((1, 10.0), (8, 11.0), (16, 12.0), (32, 16.0)):
        cost.start(rows, milliseconds)
    return cost


def goodput() -> Window:
    return GoodputWindow(Calibration(), costs())


def chain(length: int) -> Make:
    return lambda draft: Speculation(ModelDrafter(draft, Growing(children=1)), FixedChain(length), length)


def tree(size: int, draft_steps: int = 3) -> Make:
    return lambda draft: Speculation(ModelDrafter(draft), FixedTree(size), draft_steps)


def automatic(draft: ModelRunner) -> Speculation:
    return taking_turns(draft, costs(), 1.0)


def sharing(draft: ModelRunner) -> LocalDrafter:
    """The automatic one, for a target replica's own process; by its clock nothing takes time, so nothing varies."""
    speculation = taking_turns(draft, costs(), 1.0, clock=lambda: 0.0)
    return LocalDrafter(speculation.drafter, speculation.draft_steps, speculation.effort)


def ngram(length: int) -> Make:
    return lambda draft: Speculation(NgramDrafter(), FixedChain(length), 1)


def retrieval(window: Window) -> Make:
    """Documents: the bundled prompts, as those that a deployment has for its subject."""
    return lambda draft: Speculation(RetrievalDrafter(Documents(load_prompts(20))), window, 1)


def jacobi(window: Callable[[], Window]) -> Make:
    def make(draft: ModelRunner) -> Speculation:
        drafter = JacobiDrafter()
        return Speculation(drafter, window(), 1)

    return make


def merged(window: Window, draft_steps: int = 3) -> Make:
    return lambda draft: Speculation(
        MergedDrafter([ModelDrafter(draft, Growing(lookup=0)), NgramDrafter(), NonsenseDrafter(draft.vocab_size, 2)]),
        window,
        draft_steps,
    )


def cascade(window: Window, draft_steps: int = 3) -> Make:
    """n-grams -> draft -> target, and nonsense below all of them."""

    def make(draft: ModelRunner) -> Speculation:
        guesses = MergedDrafter([NgramDrafter(), NonsenseDrafter(draft.vocab_size, 2)])
        middle = ModelDrafter(draft, Growing(lookup=0, overrule=True))
        return Speculation(CascadeDrafter(middle, guesses), window, draft_steps)

    return make


def learning(window: Callable[[], Window]) -> Make:
    return lambda draft: Speculation(ModelDrafter(draft), window(), 5)


def translated(draft: ModelRunner) -> Speculation:
    """As if the draft had another tokenizer."""
    tokenizer = load_tokenizer(DRAFT)
    inner = ModelDrafter(draft, Growing(lookup=0, max_depth=20))
    return Speculation(OtherTokenizerDrafter(inner, tokenizer, tokenizer), FixedTree(15), 4)


def rounded(draft: ModelRunner) -> Speculation:
    """The same draft with 8-bit weights."""
    runner = ModelRunner(draft.path, kv_tokens=draft.pool.capacity, weights="int8")
    return Speculation(ModelDrafter(runner), FixedTree(15), 3)


def nonsense(window: Window) -> Make:
    return lambda draft: Speculation(NonsenseDrafter(draft.vocab_size), window, 1)


SPECULATIONS: dict[str, Make] = {
    "chain-1": chain(1),
    "chain-5": chain(5),
    "chain-15": chain(15),
    "tree-7": tree(7),
    "tree-31": tree(31),
    "tree-goodput": lambda draft: Speculation(ModelDrafter(draft), goodput(), 3),
    "auto": automatic,
    "heuristic": learning(lambda: Heuristic(16)),
    "threshold": learning(lambda: ConfidenceThreshold(16)),
    "bandit": learning(lambda: Bandit(costs(), 16)),
    "ngram-3": ngram(3),
    "ngram-12": ngram(12),
    "ngram-goodput": lambda draft: Speculation(NgramDrafter(), goodput(), 1),
    "suffix-chain": lambda draft: Speculation(SuffixDrafter(), FixedChain(12), 1),
    "suffix-tree": lambda draft: Speculation(SuffixDrafter(), FixedTree(24), 1),
    "retrieval-chain": retrieval(FixedChain(12)),
    "retrieval-tree": retrieval(FixedTree(24)),
    "jacobi-chain": jacobi(lambda: FixedChain(8)),
    "jacobi-tree": jacobi(lambda: FixedTree(24)),
    "merged-15": merged(FixedTree(15)),
    "merged-goodput": merged(goodput()),
    "cascade-15": cascade(FixedTree(15)),
    "cascade-goodput": cascade(goodput()),
    "translated-15": translated,
    "int8-15": rounded,
    "nonsense-chain": nonsense(FixedChain(4)),
    "nonsense-tree": nonsense(FixedTree(7)),
    "nonsense-goodput": nonsense(goodput()),
}

SELF_SPECULATIONS: dict[str, Make] = {  # by what the target itself knows
    "early-exit-chain": lambda target: Speculation(EarlyExitDrafter(target, 4), FixedChain(4), 4),
    "early-exit-goodput": lambda target: Speculation(EarlyExitDrafter(target, 4), goodput(), 3),
    "heads-tree": lambda target: Speculation(HeadsDrafter(target, load_heads(HEADS, target)), FixedTree(12), 1),
    "heads-goodput": lambda target: Speculation(HeadsDrafter(target, load_heads(HEADS, target)), goodput(), 1),
}


LOCALS = {  # drafters in the target's own process
    "heads": LocalConfig("heads", heads=HEADS),
    "early-exit": LocalConfig("early-exit"),
    "jacobi": LocalConfig("jacobi"),
    "suffix": LocalConfig("suffix"),
    "ngram": LocalConfig("ngram"),
    "retrieval": LocalConfig("retrieval", documents=PROMPTS),
}


def load_prompts(count: int) -> list[Tokens]:
    """The first prompts of the bundled held-out ones."""
    tokenizer = load_tokenizer(TARGET)
    lines = PROMPTS.read_text().splitlines()[:count]
    return [tuple(tokenizer(json.loads(line))["input_ids"]) for line in lines]


def make_requests(prompts: Sequence[Tokens], temperature: float, tokens: int) -> list[GenerationRequest]:
    """One request a prompt, each with another seed, every other one filtered; the end token is a token like others."""
    requests = []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
        if seed % 2:
            params = replace(params, top_p=0.95, top_k=50, min_p=0.02)
        requests.append(GenerationRequest(str(seed), prompt, params))
    return requests


def audit(runner: ModelRunner, speculation: Speculation | None) -> None:
    """Raises AssertionError when decoding has left anything behind."""
    runner.pool.check()
    assert runner.pool.used_pages == 0, "the target holds pages"
    if speculation is not None:
        speculation.drafter.check()


def run(
    runner: ModelRunner,
    requests: Sequence[GenerationRequest],
    speculation: Speculation | None = None,
    batch: int = 8,
    margins: bool = False,
) -> list[Generation]:
    """Decodes `batch` requests at a time, with an audit after each batch."""
    generations = []
    for start in range(0, len(requests), batch):
        generations += decode(runner, requests[start : start + batch], speculation, margins=margins)
        audit(runner, speculation)
    return generations


@dataclass(frozen=True)
class Difference:
    """Where two outputs part. `margin`: of the first output's choice there, if it was computed with margins."""

    request: str
    position: int
    margin: float | None


def differences(generations: Sequence[Generation], expected: Sequence[Sequence[int]]) -> Iterator[Difference]:
    """Yields the first difference of each output that is not as expected."""
    for generation, tokens in zip(generations, expected, strict=True):
        if generation.tokens != list(tokens):
            pairs = enumerate(zip(generation.tokens, tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(generation.tokens), len(tokens)))
            margin = generation.margins[at] if at < len(generation.margins) else None
            yield Difference(generation.request.request_id, at, margin)


Result = tuple[str, list[Difference]]  # what there is to tell, and where outputs were wrong


@dataclass(frozen=True)
class Comparison:
    """Outputs to compare, not made yet; its name is the same in every run."""

    name: str
    run: Callable[[], Result]


@torch.inference_mode()
def transformers_greedy(path: Path, prompts: Sequence[Tokens], tokens: int) -> list[list[int]]:
    """What transformers' own generate gives for each prompt, in float32, end token included."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def versus_transformers(runner: ModelRunner, prompts: Sequence[Tokens], tokens: int) -> list[Difference]:
    """Plain greedy decoding against transformers' generate with the same checkpoint."""
    expected = transformers_greedy(runner.path, prompts, tokens)
    params = SamplingParams(max_tokens=tokens)
    requests = [GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    return list(differences(run(runner, requests, margins=True), expected))


Ends = tuple[Link[Down, Up], Link[Up, Down]]


def faulty_ends() -> Ends:
    """A link that drops, doubles, delays and invents messages at both ends."""
    near, far = memory_link()
    return faulty(near, 1), faulty(far, 2)


@contextmanager
def linked(replica: TargetReplica, draft: ModelRunner) -> Iterator[DraftReplica]:
    """A draft replica with this model, in this process, and a link between the two."""
    drafting = DraftReplica(ModelDrafter(draft))
    near, far = memory_link()
    drafting.add_link(far)
    replica.add_link(near)
    try:
        until(lambda: replica.stats().drafts == 1, "the draft is linked")
        yield drafting
    finally:
        drafting.close()


def serve(target: TargetReplica, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """What a replica streams for requests that are all submitted at once."""
    generations = [Generation(request) for request in requests]
    ended = threading.Semaphore(0)

    def sink_of(generation: Generation) -> Callable[[TokenChunk], None]:
        def sink(chunk: TokenChunk) -> None:
            generation.tokens += chunk.tokens
            generation.accepted += chunk.origins.count("draft")
            if chunk.finish_reason is not None:
                ended.release()

        return sink

    for request, generation in zip(requests, generations, strict=True):
        target.submit(request, sink_of(generation))
    for _ in requests:
        assert ended.acquire(timeout=PATIENCE_S), "a stream did not end"
    return generations


def serve_until(
    target: TargetReplica,
    requests: Sequence[GenerationRequest],
    plain: Sequence[Sequence[int]],
    done: Callable[[list[Generation]], bool],
    what: str,
) -> list[Generation]:
    """What it streams once this happened: the draft's first word may come after a short request's last.

    Raises AssertionError where an output isn't `plain`, or it never happens.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        generations = serve(target, requests)
        assert not list(differences(generations, plain))
        if done(generations):
            return generations
        assert time.monotonic() < deadline, f"served in vain: {what}"


def serve_until_accepted(
    target: TargetReplica, requests: Sequence[GenerationRequest], plain: Sequence[Sequence[int]]
) -> list[Generation]:
    """What it streams once a draft token is accepted. Raises AssertionError as `serve_until` does."""
    return serve_until(
        target, requests, plain, lambda served: any(each.accepted for each in served), "a draft token is accepted"
    )
