"""What `paceline demo` runs: two actors, three prompts, three ways to decode them, and a recording for the picture."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from cluster.actors import TargetConfig
from cluster.drafters import DraftConfig
from cluster.local import LocalCluster
from cluster.placement import Placement, place
from cluster.sequential import SequentialActor, Timed
from cluster.target_stats import TargetStats
from cluster.trace import Span
from deployments import demo_view as view
from deployments.figures import Figures
from deployments.timeline import draw
from engine.runner import Dtype
from engine.text import load_tokenizer
from engine.types import GenerationRequest, InvalidRequest, SamplingParams

TEMPERATURES = (0.0, 1.0)
CHAINS = (2, 4)  # draft tokens per step of the sequential contender; the faster one counts
PROMPTS = (9, 126, 153)  # of the held-out ones: code, not tables
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demo runs with."""

    target: Path
    draft: Path
    dtype: Dtype
    tokens: int  # per prompt
    out: Path  # folder of the picture
    invariant: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a contender's output leaves the plain one."""

    contender: str
    request: GenerationRequest
    position: int  # in the output, of the first token that differs


@dataclass
class Results:
    """What the contenders did."""

    figures: dict[tuple[float, str], Figures] = field(default_factory=dict)  # by temperature and contender
    differences: list[Difference] = field(default_factory=list)

    def add(self, contender: str, request: GenerationRequest, figures: Figures) -> None:
        """Counts one generation."""
        key = request.params.temperature, contender
        self.figures[key] = self.figures[key] + figures if key in self.figures else figures

    def compare(self, contender: str, request: GenerationRequest, tokens: list[int], plain: list[int]) -> None:
        """Notes whether an output is the plain one."""
        if tokens != plain:
            pairs = enumerate(zip(tokens, plain, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(plain)))
            self.differences.append(Difference(contender, request, at))

    def best_chain(self, temperature: float) -> int:
        """The sequential chain that was faster."""
        return max(CHAINS, key=lambda k: self.figures[temperature, _chain_name(k)].tokens_per_second)

    def rows(self) -> list[view.Row]:
        """The lines of the table."""
        rows = []
        for temperature in TEMPERATURES:
            names = ("plain", _chain_name(self.best_chain(temperature)), "pipelined")
            rows += [view.Row(temperature, name, self.figures[temperature, name]) for name in names]
        return rows


@dataclass(frozen=True, slots=True)
class Contenders:
    """Everything that decodes: the two actors, and one more process on the target's core."""

    cluster: LocalCluster
    sequential: Any  # handle of a SequentialActor

    def pipelined(self, request: GenerationRequest) -> tuple[list[int], Figures]:
        """Tokens and figures of one request, as the cluster is now."""
        before = self._stats()
        tokens = [token for chunk in self.cluster.stream(request) for token in chunk.tokens]
        return tokens, Figures.between(before, self._stats())

    def plain(self, request: GenerationRequest) -> tuple[list[int], Figures]:
        """The same from the same target, without its draft."""
        ray.get(self.cluster.targets[0].set_speculation.remote(False))
        try:
            return self.pipelined(request)
        finally:
            ray.get(self.cluster.targets[0].set_speculation.remote(True))

    def in_turns(self, request: GenerationRequest, k: int) -> tuple[list[int], Figures]:
        """The same with k draft tokens, then one step of the target, in turns."""
        timed: Timed = ray.get(self.sequential.run.remote(request, k))
        made = timed.generation
        figures = Figures(timed.tokens, timed.seconds, timed.steps, made.tried, made.accepted, timed.drafting_s)
        return made.tokens, figures

    def margin(self, difference: Difference) -> float | None:
        """How close to a tie the plain choice was where an output left it: best score less the second best."""
        timed: Timed = ray.get(self.sequential.run.remote(difference.request, 0, margins=True))
        margins = timed.generation.margins
        return margins[difference.position] if difference.position < len(margins) else None

    def _stats(self) -> TargetStats:
        stats: TargetStats = ray.get(self.cluster.targets[0].stats.remote())
        return stats


def load_requests(config: DemoConfig, prompts: Path, context: int) -> list[GenerationRequest]:
    """The demo's prompts at each temperature; raises OSError or InvalidRequest when they can't be used."""
    texts = [json.loads(line) for line in prompts.read_text().splitlines()]
    tokenizer = load_tokenizer(config.target)
    chosen = [tuple(tokenizer(texts[index % len(texts)])["input_ids"]) for index in PROMPTS]
    longest = max(len(prompt) for prompt in chosen)
    if longest + config.tokens > context:
        raise InvalidRequest("tokens", f"behind {longest} prompt tokens it exceeds the model's context of {context}")
    return [
        GenerationRequest(
            f"prompt {i + 1}, T = {temperature:g}",
            prompt,
            SamplingParams(temperature, seed=i, max_tokens=config.tokens, ignore_eos=True),
        )
        for temperature in TEMPERATURES
        for i, prompt in enumerate(chosen)
    ]


def run_demo(config: DemoConfig, requests: list[GenerationRequest], console: Console) -> None:
    """The whole demo. Raises ray's errors."""
    transformers_logging.disable_progress_bar()
    view.print_header(console, config.target, config.draft, config.tokens)
    where, draft_where = _placements()
    target = TargetConfig(config.target, config.dtype, config.invariant, places=("separate",), earlier=0)
    draft = DraftConfig(
        config.draft, config.dtype, shared=0
    )  # or it would know what is measured from what was streamed
    with view.Stages(console) as stage:
        cluster = LocalCluster(target, draft, placements=([where], [draft_where]), progress=stage)
    with cluster:
        with view.Stages(console) as stage:
            stage("warming up")
            for request in (requests[0], requests[-1]):
                list(cluster.stream(_short(request)))
        shown, recording = _show(cluster, requests, load_tokenizer(config.target), console)
        with view.Stages(console) as stage:
            stage("loading the pair once more, to take turns on the target's core")
            contenders = Contenders(cluster, _sequential(config, where))
            for k in CHAINS:
                contenders.in_turns(_short(requests[-1]), k)
        with view.measuring(console, len(requests)) as advance:
            results = measure(contenders, requests, shown, advance)
        view.print_table(console, results.rows())
        view.print_verdict(console, [_explained(contenders, difference) for difference in results.differences])
    title = f"Draft and target at work on one stream (T = {requests[-1].params.temperature:g})"
    view.print_files(console, draw(*recording, config.out / "timeline", title))


def measure(
    contenders: Contenders, requests: list[GenerationRequest], shown: list[list[int]], advance: Callable[[], None]
) -> Results:
    """Runs all contenders, prompt by prompt, so that a slow moment of the machine meets them all alike."""
    results = Results()
    for request, tokens_shown in zip(requests, shown, strict=True):
        plain, figures = contenders.plain(request)
        results.add("plain", request, figures)
        results.compare("pipelined as shown", request, tokens_shown, plain)
        for k in CHAINS:
            tokens, figures = contenders.in_turns(request, k)
            results.add(_chain_name(k), request, figures)
            results.compare(_chain_name(k), request, tokens, plain)
        tokens, figures = contenders.pipelined(request)
        results.add("pipelined", request, figures)
        results.compare("pipelined", request, tokens, plain)
        advance()
    return results


def _show(
    cluster: LocalCluster, requests: list[GenerationRequest], tokenizer: PreTrainedTokenizerFast, console: Console
) -> tuple[list[list[int]], tuple[list[Span], list[Span]]]:
    """Streams all requests to the terminal: (their tokens, what target and draft recorded during the last one)."""
    view.print_legend(console)
    actors = [cluster.targets[0], cluster.drafts[0]]
    shown = []
    recording: tuple[list[Span], list[Span]] = [], []
    for request in requests:
        ray.get([actor.trace.remote(True) for actor in actors])
        shown.append(view.stream(console, request, tokenizer, cluster.stream(request)))
        target, draft = ray.get([actor.trace.remote(False) for actor in actors])
        recording = target, draft  # the last one stays
    return shown, recording


def _placements() -> tuple[Placement, Placement]:
    """Of target and draft. On a GPU the target takes half, for the sequential contender gets the other half."""
    (target,), (draft,) = place(1, 1, torch.cuda.device_count())
    return replace(target, gpus=target.gpus / 2), draft


def _sequential(config: DemoConfig, where: Placement) -> Any:
    """The actor in which target and draft take turns."""
    actor = ray.remote(SequentialActor).options(num_cpus=0, num_gpus=where.gpus)
    return actor.remote(config.target, config.draft, config.dtype, where, config.invariant)


def _explained(contenders: Contenders, difference: Difference) -> view.Divergence:
    request = difference.request
    return view.Divergence(difference.contender, request.request_id, difference.position, contenders.margin(difference))


def _short(request: GenerationRequest) -> GenerationRequest:
    """A warm-up for a request."""
    params = replace(request.params, max_tokens=min(_WARM_UP_TOKENS, request.params.max_tokens))
    return replace(request, request_id=f"warm-up for {request.request_id}", params=params)


def _chain_name(k: int) -> str:
    return f"sequential k={k}"
