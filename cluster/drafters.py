"""Drafters from a configuration, a draft replica's and those local to a target: what they are made of; their warm-up."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cluster.own_guesses import LocalDrafter
from cluster.placement import Placement
from cluster.remote_drafter import RemoteDrafter
from cluster.warm import warm_up, warm_up_drafter, warm_up_loops, warm_up_turns
from engine.automatic import MOST_STEPS, SHARED, growing_in_turns
from engine.budget import Calibration, CostModel
from engine.checkpoint import ModelError
from engine.choice import DrafterName, Weights, check_choice
from engine.drafters import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.early_exit import EarlyExitDrafter
from engine.drafters.heads import HeadsDrafter, load_heads
from engine.drafters.jacobi import JacobiDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.retrieval import Documents, RetrievalDrafter, load_documents
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translate import OtherTokenizerDrafter
from engine.effort import EffortWindow
from engine.local_choice import LocalName, check_local
from engine.runner import Dtype, ModelRunner
from engine.sampling import candidates
from engine.text import find_tokenizer

_EARLY_EXIT_STEPS = 3  # before each step of the target; others guess all at once
_LOOKUP_FOR_CHAINS = 20  # tokens: as long as a chain may well be
_LEAST_FOR_CHAINS = 0.02  # confidence of a child; less likely ones would only fill the tree, which has to be deep
NODE_COST_ON_CPUS = 0.1  # of a draft step with one node: what each further one adds, where rows take time
_DEEPER = 8  # that a model with another tokenizer grows, for the end of the text that it may still cut otherwise


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """How a draft replica runs. Which drafters use a model or documents: see engine.choice."""

    model: Path | None
    dtype: Dtype = "auto"
    kv_tokens: int = 65536
    host: str | None = "127.0.0.1"  # None: the node's, as Ray knows it
    ports: tuple[int, int] = (0, 0)  # first and last, of which it takes a free one; 0: any
    growing: Growing = field(default_factory=Growing)
    compile: bool = False  # the model, by torch.compile
    served_as: str = ""  # its model's name in metrics; none: the checkpoint's, or the drafter's
    weights: Weights = "auto"  # see engine.choice
    drafter: DrafterName = "auto"
    documents: Path | None = None  # a text file, or a folder of them
    tokenizer: Path | None = None  # folder with the target's; none: the model's own, which the target shares
    shared: int = SHARED  # tokens of earlier outputs that all sessions may draft from
    chains: bool = False  # its targets verify one chain of tokens a step, as vLLM does, and no trees
    inner: str | None = None  # "host:port" of the draft service that drafts for a cascade's model; none: lookup does

    @property
    def name(self) -> str:
        """Of the model that it is served as, or else of the drafter."""
        drafter = "suffix" if self.drafter == "auto" else self.drafter
        return self.served_as or (self.model.name if self.model is not None else drafter)


def make_drafter(config: DraftConfig, placement: Placement) -> Drafter:
    """The drafter that a configuration names, ready to run; raises ModelError."""
    return _make_timed(config, placement)[0]


def _make_timed(config: DraftConfig, placement: Placement) -> tuple[Drafter, float]:
    """The same, and the milliseconds of a step."""
    check_choice(config.drafter, config.model, config.documents, config.inner)
    warm_up_loops()
    drafter = _make(config, placement)
    return drafter, warm_up_drafter(drafter)


def make_shared(config: DraftConfig, placement: Placement, cost: CostModel, most: int) -> LocalDrafter:
    """The same drafter in the target's own process, taking turns with it; raises ModelError.

    It looks nothing up: the target does. cost: of the target's steps, which goes on learning. most: nodes verified in one.
    """
    growing = replace(growing_in_turns(placement.device), lookup=0)
    drafter, draft_ms = _make_timed(replace(config, growing=growing, shared=0), placement)
    tried, window = (EffortWindow(Calibration(), cost, draft_ms, growing.each or growing.rows, most) for _ in range(2))
    warm_up_turns(drafter, tried)
    return LocalDrafter(drafter, MOST_STEPS, window, growing.doubtful)


def _make(config: DraftConfig, placement: Placement) -> Drafter:
    parts: list[Drafter] = []
    if config.drafter in ("suffix", "merged"):
        parts.append(SuffixDrafter(shared=config.shared))
    if config.documents is not None:
        parts.append(RetrievalDrafter(Documents(load_documents(config.documents, _tokenizer(config)))))
    if config.model is not None:
        parts.append(_with_model(config, config.model, placement))
    if not parts:
        parts.append(SuffixDrafter(shared=config.shared) if config.drafter == "auto" else NgramDrafter())
    return MergedDrafter(parts) if len(parts) > 1 else parts[0]


def _with_model(config: DraftConfig, model: Path, placement: Placement) -> Drafter:
    """A model, alone, with lookup beside it or with lookup inside it; in the target's tokens, whatever its own are."""
    runner = ModelRunner(
        model,
        kv_tokens=config.kv_tokens,
        dtype=config.dtype,
        device=placement.device,
        compile=config.compile,
        weights=config.weights,
    )
    own = find_tokenizer(model)
    targets = _others(config.tokenizer, own)
    growing = _for_chains(config.growing) if config.chains else config.growing
    warm_up(runner, repeats=2, count=candidates(growing.children, runner.vocab_size))
    length = growing.max_depth
    cascade = config.drafter == "cascade"
    automatic = config.drafter == "auto" and targets is None
    growing = replace(
        growing,
        lookup=growing.lookup if automatic else 0,
        shared=config.shared if automatic else 0,
        max_depth=length if targets is None else length + _DEEPER,
        node_cost=growing.node_cost if placement.gpus else growing.node_cost or NODE_COST_ON_CPUS,
        overrule=cascade or growing.overrule,
    )
    drafter: Drafter = ModelDrafter(runner, growing, own, patient=False)
    if cascade:
        drafter = CascadeDrafter(drafter, _inner(config, runner))
    if own is not None and targets is not None:
        drafter = OtherTokenizerDrafter(drafter, own, targets, length)
    return drafter


def _for_chains(growing: Growing) -> Growing:
    """Narrower trees: a step may end anywhere along a chain, and what follows each such end has to be there already."""
    least, lookup = max(growing.least, _LEAST_FOR_CHAINS), max(growing.lookup, _LOOKUP_FOR_CHAINS)
    return replace(growing, least=least, lookup=lookup)


def _inner(config: DraftConfig, runner: ModelRunner) -> Drafter:
    """What drafts for a cascade's model: lookup, or another draft service, which may be a cascade itself."""
    if config.inner is None:
        return NgramDrafter()
    remote = RemoteDrafter(runner.vocab_size)
    remote.keep_linked(config.inner)
    return remote


def _tokenizer(config: DraftConfig) -> PreTrainedTokenizerFast:
    """The target's, which documents are read with."""
    folder = config.tokenizer or config.model
    found = find_tokenizer(folder) if folder is not None else None
    if found is None:
        raise ModelError(f"documents are read with the target's tokenizer: {folder or 'nowhere'} has no tokenizer.json")
    return found


def _others(folder: Path | None, own: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast | None:
    """The target's tokenizer where it is another than the model's own; none where either isn't known."""
    targets = find_tokenizer(folder) if folder is not None and own is not None else None
    return targets if targets is not None and own is not None and not same_tokens(own, targets) else None


def same_tokens(first: PreTrainedTokenizerFast, second: PreTrainedTokenizerFast) -> bool:
    """Whether ids stand for the same text; special tokens aside, which variants of one model name as they like."""
    vocabularies = [each.backend_tokenizer.get_vocab(with_added_tokens=False) for each in (first, second)]
    return bool(vocabularies[0] == vocabularies[1])


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The drafter in a target's own process. What each of them needs: see engine.local_choice."""

    drafter: LocalName | None = None
    heads: Path | None = None  # folder of what `paceline heads` trained
    documents: Path | None = None  # a text file, or a folder of them
    shared: int = SHARED  # tokens of earlier outputs that all sessions may draft from


def make_local(config: LocalConfig, target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> LocalDrafter | None:
    """The drafter that a target's configuration names, if any, ready to run; raises ModelError."""
    check_local(config.drafter, config.heads, config.documents)
    if config.drafter is None:
        return None
    drafter = _local(config, config.drafter, target, tokenizer)
    warm_up_drafter(drafter)
    return LocalDrafter(drafter, _EARLY_EXIT_STEPS if config.drafter == "early-exit" else 1)


def _local(config: LocalConfig, name: LocalName, target: ModelRunner, tokenizer: PreTrainedTokenizerFast) -> Drafter:
    if name == "heads" and config.heads is not None:
        return HeadsDrafter(target, load_heads(config.heads, target))
    if name == "retrieval" and config.documents is not None:
        return RetrievalDrafter(Documents(load_documents(config.documents, tokenizer)))
    makers: dict[LocalName, Callable[[], Drafter]] = {
        "early-exit": lambda: EarlyExitDrafter(target, tokenizer=tokenizer, patient=False),
        "jacobi": JacobiDrafter,
        "suffix": lambda: SuffixDrafter(shared=config.shared),
        "ngram": NgramDrafter,
    }
    return makers[name]()
