"""Who takes part in the drafting benchmark: the tables of drafters and windows, plain decoding, and transformers.

A new drafter or window is one line in `DRAFTERS` or `WINDOWS`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from benchmarks.drafting_texts import Tokens
from cluster.warm import warm_up
from engine.automatic import MOST_STEPS, growing_in_turns
from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.choice import Weights
from engine.decode import Generation, Speculation, decode_steps, record
from engine.drafters import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.early_exit import EarlyExitDrafter
from engine.drafters.heads import HeadsDrafter, TokenHeads, load_heads
from engine.drafters.jacobi import JacobiDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.retrieval import Documents, RetrievalDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translate import OtherTokenizerDrafter
from engine.effort import EffortWindow
from engine.runner import Dtype, ModelRunner
from engine.types import GenerationRequest
from engine.windows import Bandit, ConfidenceThreshold, FixedChain, FixedTree, Heuristic

_TREE_NODES = 15
_MOST = 8  # tokens of a learning window's chain
_EARLY_PASSES = 3.0  # a pass of two thirds of the target's layers, against one of the draft
_TRANSLATED_DEPTH = 20  # its settled tokens hang in the tree too


@dataclass(frozen=True)
class Bench:
    """What drafters and windows are made from. What is slow to make is made once, when somebody takes part that needs it."""

    target: ModelRunner
    draft: ModelRunner
    tokenizer: PreTrainedTokenizerFast
    documents: tuple[Tokens, ...]  # of all prompts of the workload
    cost: CostModel  # of a target step
    draft_ms: float  # a draft step
    clock: Callable[[], float] = time.monotonic

    @cached_property
    def rounded(self) -> ModelRunner:
        """The draft with weights of eight bits."""
        return self._draft_with("int8")

    @cached_property
    def automatic(self) -> ModelRunner:
        """The draft as users have it who don't choose."""
        return self._draft_with("auto")

    @cached_property
    def automatic_ms(self) -> float:
        """A step of that, timed as it is for users."""
        cost = CostModel()
        warm_up(self.automatic, cost, clock=self.clock)
        return float(cost.table(1)[1])

    def _draft_with(self, weights: Weights) -> ModelRunner:
        dtype: Dtype = "bfloat16" if self.draft.dtype == torch.bfloat16 else "float32"
        return ModelRunner(self.draft.path, dtype=dtype, kv_tokens=self.draft.pool.capacity, weights=weights)

    @cached_property
    def heads(self) -> TokenHeads:
        """Of the target, from the folder beside it."""
        return load_heads(self.target.path.with_name(f"{self.target.path.name}-heads"), self.target)

    @cached_property
    def archive(self) -> Documents:
        """The documents, sorted."""
        return Documents(self.documents)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a drafter grows for a window, and how often before each target step."""

    growing: Growing
    draft_steps: int


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """make: a fresh drafter. windows: empty for all."""

    make: Callable[[Bench, Shape], Drafter]
    passes: float = 1.0  # what a draft step costs, in passes of the draft model
    reads_layers: bool = False  # of the target: an expanded checkpoint's added layers say nothing
    windows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowKind:
    """make: a fresh window, from the bench and the milliseconds of drafting before each step. own: of one drafter alone."""

    make: Callable[[Bench, float], Window]
    shape: Shape
    own: bool = False


def chain(length: int) -> Shape:
    """A chain takes a draft step a token."""
    return Shape(Growing(rows=1, children=1, lookup=0), length)


TREE = Shape(Growing(lookup=0), 3)
TURNS = Shape(growing_in_turns("cpu"), MOST_STEPS)


def _merged(bench: Bench, shape: Shape) -> Drafter:
    model = ModelDrafter(bench.draft, shape.growing)
    return MergedDrafter([model, SuffixDrafter(), RetrievalDrafter(bench.archive)])


def _cascade(bench: Bench, shape: Shape) -> Drafter:
    return CascadeDrafter(ModelDrafter(bench.draft, replace(shape.growing, overrule=True)), NgramDrafter())


def _translated(bench: Bench, shape: Shape) -> Drafter:
    """The bundled draft through text, as if its tokenizer were another."""
    inner = ModelDrafter(bench.draft, replace(shape.growing, max_depth=_TRANSLATED_DEPTH))
    return OtherTokenizerDrafter(inner, bench.tokenizer, bench.tokenizer)


DRAFTERS: dict[str, DrafterKind] = {
    "model": DrafterKind(lambda bench, shape: ModelDrafter(bench.draft, shape.growing)),
    "model-int8": DrafterKind(lambda bench, shape: ModelDrafter(bench.rounded, shape.growing)),
    "ngram": DrafterKind(lambda bench, shape: NgramDrafter(), passes=0),
    "suffix": DrafterKind(lambda bench, shape: SuffixDrafter(), passes=0),
    "retrieval": DrafterKind(lambda bench, shape: RetrievalDrafter(bench.archive), passes=0),
    "early-exit": DrafterKind(
        lambda bench, shape: EarlyExitDrafter(bench.target, growing=replace(shape.growing, max_nodes=64)),
        passes=_EARLY_PASSES,
        reads_layers=True,
    ),
    "heads": DrafterKind(lambda bench, shape: HeadsDrafter(bench.target, bench.heads), passes=0, reads_layers=True),
    "jacobi": DrafterKind(lambda bench, shape: JacobiDrafter(), passes=0),
    "merged": DrafterKind(_merged),
    "cascade": DrafterKind(_cascade),
    "other-tokenizer": DrafterKind(_translated),
    "auto": DrafterKind(lambda bench, shape: ModelDrafter(bench.automatic, shape.growing), windows=("effort",)),
}

WINDOWS: dict[str, WindowKind] = {
    "chain-3": WindowKind(lambda bench, drafting_ms: FixedChain(3), chain(3)),
    "chain-5": WindowKind(lambda bench, drafting_ms: FixedChain(5), chain(5)),
    "tree": WindowKind(lambda bench, drafting_ms: FixedTree(_TREE_NODES), TREE),
    "heuristic": WindowKind(lambda bench, drafting_ms: Heuristic(_MOST), chain(5)),
    "threshold": WindowKind(lambda bench, drafting_ms: ConfidenceThreshold(_MOST), chain(5)),
    "bandit": WindowKind(lambda bench, drafting_ms: Bandit(bench.cost, _MOST), chain(5)),
    "goodput": WindowKind(
        lambda bench, drafting_ms: GoodputWindow(Calibration(), bench.cost, overhead_ms=drafting_ms), TREE
    ),
    "effort": WindowKind(
        lambda bench, drafting_ms: EffortWindow(
            Calibration(), bench.cost.again(), bench.automatic_ms, TURNS.growing.each, clock=bench.clock
        ),
        TURNS,
        own=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt through one contender. The clock starts when the first tokens are there."""

    tokens: list[int]
    counted: int  # tokens that came while the clock ran
    steps: int  # in which they came
    seconds: float
    accepted: int = 0
    tried: int = 0  # draft tokens compared with the target's; 0: not known, or none


class Contender(Protocol):
    """Something that generates."""

    def run(self, request: GenerationRequest) -> Sample:
        """One request, from its prompt to its last token."""


@dataclass(frozen=True)
class Ours:
    """engine.decode, plain without a speculation."""

    target: ModelRunner
    speculation: Speculation | None = None
    clock: Callable[[], float] = time.monotonic

    def run(self, request: GenerationRequest) -> Sample:
        """See Contender."""
        generation = Generation(request)
        first, started = 0, 0.0
        for _, outcome in decode_steps(self.target, [request], self.speculation):
            record(generation, outcome)
            if generation.tokens and not first:
                first, started = len(generation.tokens), self.clock()
        seconds = self.clock() - started
        counted, steps = len(generation.tokens) - first, generation.steps - 1
        return Sample(generation.tokens, counted, steps, seconds, generation.accepted, generation.tried)


def make_contender(drafter: str, window: str, bench: Bench) -> Ours:
    """A fresh drafter behind a fresh window."""
    kind, frame = DRAFTERS[drafter], WINDOWS[window]
    drafting_ms = frame.shape.draft_steps * bench.draft_ms * kind.passes
    made = frame.make(bench, drafting_ms)
    return Ours(bench.target, Speculation(kind.make(bench, frame.shape), made, frame.shape.draft_steps), bench.clock)


class _Clock(BaseStreamer):
    """When transformers hands out tokens, and how many: the prompt, then once a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self._clock())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class TransformersAssisted:
    """transformers' assisted generation on the same checkpoints: up to 20 draft tokens while the draft is sure enough.

    Its threshold adapts itself where scikit-learn is installed, and stays at 0.4 elsewhere, as transformers has it.
    """

    def __init__(self, target: Path, draft: Path, dtype: torch.dtype, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._target, self._draft = (self._load(path, dtype) for path in (target, draft))
        settings = self._draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 20, "constant"
        settings.assistant_confidence_threshold = 0.4

    @staticmethod
    def _load(path: Path, dtype: torch.dtype) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        model.generation_config.eos_token_id = None  # as our requests: so many tokens, whatever they are
        return model

    @torch.inference_mode()
    def run(self, request: GenerationRequest) -> Sample:
        """See Contender."""
        params = request.params
        ids, clock = torch.tensor([request.prompt]), _Clock(self._clock)
        sampling = {"temperature": params.temperature, "top_k": 0} if params.temperature else {}
        with torch.random.fork_rng():
            torch.manual_seed(params.seed)
            made = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self._draft,
                do_sample=params.temperature > 0,
                max_new_tokens=params.max_tokens,
                pad_token_id=0,
                streamer=clock,
                **sampling,
            )
        sizes = clock.sizes[2:]  # after the prompt and the first tokens
        return Sample(made[0, len(request.prompt) :].tolist(), sum(sizes), len(sizes), clock.times[-1] - clock.times[1])


def expanded(checkpoint: Path) -> bool:
    """Whether layers were added to it that add nothing (engine.expand): some matrix of it is all zeros."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if any(tensor.dim() == 2 and not tensor.any() for tensor in map(file.get_tensor, file.keys())):
                return True
    return False
