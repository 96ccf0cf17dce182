"""The whole loop in one process: plain, sequential and tree speculation. The oracle of every distributed test."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from engine.budget import Window
from engine.drafters import Drafter, Learner, ReadsStates
from engine.effort import EffortWindow, draft_steps
from engine.grammar import Vocabulary
from engine.kv import PoolExhausted
from engine.runner import ModelRunner
from engine.step import Outcome, Plan, Sequence, Stepper, tried, useful
from engine.tree import TokenTree
from engine.types import FinishReason, GenerationRequest, TokenLogprobs

_NOTHING = TokenTree(0, 1)  # of a sequence that takes part in a step without a drafter


@dataclass
class Generation:
    """The output of one request, with what speculation did for it."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # target steps that committed something
    tried: int = 0  # draft tokens compared with the target's along the walk
    accepted: int = 0
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if the request asks for them
    error: str | None = None  # set with the finish reason "error"

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: accepted tokens plus the target's own, per step."""
        return len(self.tokens) / max(1, self.steps)


@dataclass(frozen=True)
class Speculation:
    """Sequential speculation: `draft_steps` draft steps, then one target step over the nodes that `window` chooses.

    A window that knows what a draft step is worth is asked before each: `draft_steps` is then the most.
    """

    drafter: Drafter
    window: Window
    draft_steps: int

    @property
    def learner(self) -> Learner | None:
        """The drafter, if it learns from what the target chose behind every verified node."""
        return self.drafter if isinstance(self.drafter, Learner) else None

    @property
    def reader(self) -> ReadsStates | None:
        """The drafter, if it reads the target's states."""
        return self.drafter if isinstance(self.drafter, ReadsStates) else None

    @property
    def effort(self) -> EffortWindow | None:
        """The window, if it knows what a draft step is worth."""
        return self.window if isinstance(self.window, EffortWindow) else None


def decode(
    runner: ModelRunner,
    requests: Seq[GenerationRequest],
    speculation: Speculation | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    margins: bool = False,
) -> list[Generation]:
    """Generates all requests together in one batch; without `speculation` this is plain decoding.

    Requests that the drafter has no room for are decoded without it.
    Raises InvalidRequest, PoolExhausted or StepError; whatever is raised, all KV is free again.
    """
    generations = [Generation(request) for request in requests]
    for index, outcome in decode_steps(runner, requests, speculation, tokenizer, margins):
        record(generations[index], outcome)
    return generations


def record(generation: Generation, outcome: Outcome) -> None:
    """Adds one step's outcome."""
    generation.tokens.extend(outcome.tokens)
    generation.margins.extend(outcome.margins)
    generation.logprobs.extend(outcome.logprobs)
    generation.steps += bool(outcome.tokens)
    generation.accepted += outcome.accepted
    generation.tried += outcome.tried
    generation.finish_reason = outcome.sequence.finish_reason
    generation.error = outcome.sequence.error


def decode_steps(
    runner: ModelRunner,
    requests: Seq[GenerationRequest],
    speculation: Speculation | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    margins: bool = False,
) -> Iterator[tuple[int, Outcome]]:
    """Yields (index of the request, outcome) after every step, as `decode` does; see there."""
    reader = speculation.reader if speculation is not None else None
    stepper = Stepper(runner, margins=margins, states=reader is not None)
    vocabulary = Vocabulary(tokenizer, runner.vocab_size) if tokenizer is not None else None
    sequences: list[Sequence] = []
    try:
        for request in requests:
            sequences.append(Sequence(request, runner, vocabulary))
        yield from _loop(stepper, sequences, speculation)
    finally:
        for index, sequence in enumerate(sequences):
            runner.pool.release(sequence.lease)
            if speculation is not None:
                speculation.drafter.close(index)


def _loop(
    stepper: Stepper, sequences: list[Sequence], speculation: Speculation | None
) -> Iterator[tuple[int, Outcome]]:
    learner = speculation.learner if speculation is not None else None
    reader = speculation.reader if speculation is not None else None
    effort = speculation.effort if speculation is not None else None
    running = {index: sequence for index, sequence in enumerate(sequences) if sequence.finish_reason is None}
    drafted = {index for index, sequence in running.items() if speculation and _opened(speculation, index, sequence)}
    for index, sequence in enumerate(sequences):
        if sequence.finish_reason is not None:  # the resumed output ended already
            yield index, Outcome(sequence, [], 0, 0, [], [])
    while running:
        plans = _plan(running, speculation, drafted)
        outcomes = stepper.step(plans)
        if effort is not None and drafted:
            effort.ended(plans, outcomes)
        for index, plan, outcome in zip(list(running), plans, outcomes, strict=True):
            if speculation is not None and outcome.tokens and index in drafted:
                if plan.tree is not None and plan.nodes is not None:
                    seen = tried(plan.tree, plan.nodes, outcome.accepted, len(outcome.tokens))
                    speculation.window.observe(plan.tree, seen, outcome.path)
                    if learner is not None:
                        learner.learn(index, plan.tree, plan.nodes, outcome.choices)
                if reader is not None and outcome.state is not None:
                    reader.see(index, outcome.state)
                if not _committed(speculation, index, outcome.tokens):
                    drafted.discard(index)
            yield index, outcome
            if outcome.sequence.finish_reason is not None:
                del running[index]
                drafted.discard(index)
                if speculation is not None:
                    speculation.drafter.close(index)


def _opened(speculation: Speculation, index: int, sequence: Sequence) -> bool:
    """Whether the drafter had room for a session."""
    try:
        speculation.drafter.open(index, sequence.tokens, sequence.request.params, len(sequence.request.prompt))
    except PoolExhausted:
        speculation.drafter.close(index)
        return False
    return True


def _committed(speculation: Speculation, index: int, tokens: list[int]) -> bool:
    """Whether the drafter still had room; else its session is closed."""
    try:
        speculation.drafter.commit(index, tokens)
    except PoolExhausted:
        speculation.drafter.close(index)
        return False
    return True


def _plan(running: dict[int, Sequence], speculation: Speculation | None, drafted: set[int]) -> list[Plan]:
    """Grows the trees of the decoding sequences and chooses their windows; nothing to choose without speculation.

    drafted: those that the drafter has a session for.
    """
    decoding = [index for index, sequence in running.items() if index in drafted and not sequence.prefilling]
    if speculation is None or not decoding:
        return [Plan(sequence) for sequence in running.values()]
    draft_steps(speculation.drafter, decoding, speculation.draft_steps, speculation.effort)
    trees = {index: speculation.drafter.tree(index) for index in decoding}
    alone = [_NOTHING] * (sum(not sequence.prefilling for sequence in running.values()) - len(decoding))
    nodes = dict(zip(decoding, speculation.window.choose([*trees.values(), *alone]), strict=False))
    for index in decoding:
        nodes[index] = useful(running[index], trees[index], nodes[index])
    return [Plan(sequence, trees.get(index), nodes.get(index)) for index, sequence in running.items()]
