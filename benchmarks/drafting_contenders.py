"""Who takes part in the drafting benchmark: the tables of drafters and windows, plain decoding, and transformers.

A new drafter or window is one line in `DRAFTERS` or `WINDOWS`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from benchmarks.drafting_texts import Tokens
from engine.budget import Calibration, CostModel, GoodputWindow, Window
from engine.decode import Generation, Speculation, decode_steps, record
from engine.drafters import Drafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.runner import ModelRunner
from engine.types import GenerationRequest
from engine.windows import FixedChain, FixedTree

_LOOKUP = Growing().lookup  # tokens, what users get
_TREE_NODES = 15


@dataclass(frozen=True)
class Bench:
    """What drafters and windows are made from."""

    target: ModelRunner
    draft: ModelRunner
    tokenizer: PreTrainedTokenizerFast
    documents: tuple[Tokens, ...]  # of all prompts of the workload
    cost: CostModel  # of a target step
    draft_ms: float  # a draft step


@dataclass(frozen=True, slots=True)
class Shape:
    """How a drafter grows for a window, and how often before each target step."""

    growing: Growing
    draft_steps: int


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """make: a fresh drafter. passes: each draft step costs a pass of the draft model. windows: empty for all."""

    make: Callable[[Bench, Shape], Drafter]
    passes: bool = True
    reads_layers: bool = False  # of the target: an expanded checkpoint's added layers say nothing
    windows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowKind:
    """make: a fresh window, from the bench and the milliseconds of drafting before each step."""

    make: Callable[[Bench, float], Window]
    shape: Shape


def chain(length: int) -> Shape:
    """A chain takes a draft step a token."""
    return Shape(Growing(rows=1, children=1, lookup=0), length)


TREE = Shape(Growing(lookup=0), 3)

DRAFTERS: dict[str, DrafterKind] = {
    "model": DrafterKind(lambda bench, shape: ModelDrafter(bench.draft, shape.growing)),
    "ngram": DrafterKind(lambda bench, shape: NgramDrafter(), passes=False),
    "auto": DrafterKind(
        lambda bench, shape: ModelDrafter(bench.draft, replace(shape.growing, lookup=_LOOKUP)), windows=("goodput",)
    ),
}

WINDOWS: dict[str, WindowKind] = {
    "chain-3": WindowKind(lambda bench, drafting_ms: FixedChain(3), chain(3)),
    "chain-5": WindowKind(lambda bench, drafting_ms: FixedChain(5), chain(5)),
    "tree": WindowKind(lambda bench, drafting_ms: FixedTree(_TREE_NODES), TREE),
    "goodput": WindowKind(
        lambda bench, drafting_ms: GoodputWindow(Calibration(), bench.cost, overhead_ms=drafting_ms), TREE
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

    def run(self, request: GenerationRequest) -> Sample:
        """See Contender."""
        generation = Generation(request)
        first, started = 0, 0.0
        for _, outcome in decode_steps(self.target, [request], self.speculation):
            record(generation, outcome)
            if generation.tokens and not first:
                first, started = len(generation.tokens), time.monotonic()
        seconds = time.monotonic() - started
        counted, steps = len(generation.tokens) - first, generation.steps - 1
        return Sample(generation.tokens, counted, steps, seconds, generation.accepted, generation.tried)


def make_contender(drafter: str, window: str, bench: Bench) -> Ours:
    """A fresh drafter behind a fresh window."""
    kind, frame = DRAFTERS[drafter], WINDOWS[window]
    drafting_ms = frame.shape.draft_steps * bench.draft_ms * kind.passes
    made = frame.make(bench, drafting_ms)
    return Ours(bench.target, Speculation(kind.make(bench, frame.shape), made, frame.shape.draft_steps))


class _Clock(BaseStreamer):
    """When transformers hands out tokens, and how many: the prompt, then once a step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.monotonic())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class TransformersAssisted:
    """transformers' assisted generation on the same checkpoints: up to 20 draft tokens while the draft is sure enough.

    Its threshold adapts itself where scikit-learn is installed, and stays at 0.4 elsewhere, as transformers has it.
    """

    def __init__(self, target: Path, draft: Path, dtype: torch.dtype) -> None:
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
        ids, clock = torch.tensor([request.prompt]), _Clock()
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
