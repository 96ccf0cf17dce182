"""Trains multi-token heads for a target that exists (see engine.drafters.heads); the target stays as it is.

Head i learns the target's own distribution of the token i + 2 places on, by KL (self-distillation: the target, one token
further along the same text for every head, is the teacher).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint import check_apart, check_checkpoint, checkpoint_name
from engine.cpu import has_fast_bf16
from engine.drafters.heads import TokenHeads
from engine.head import Head, output_head
from engine.local_choice import HEADS_FILE
from engine.resume import restore_state, save_state
from engine.text import load_tokenizer
from engine.train import batch_at, corpus_files, learning_rate, make_optimizer, read_texts, spread_windows, tokenize

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_TEST_WINDOWS = 32


@dataclass(frozen=True)
class HeadsConfig:
    """The recipe. Equal configurations on equal software give equal weights, interrupted or not."""

    target: Path
    out: Path
    work: Path = Path("build/heads")  # the state that makes a run resumable
    heads: int = 3
    steps: int = 1000
    batch_size: int = 4  # windows per step
    sequence_length: int = 256  # tokens per window
    learning_rate: float = 2e-3  # peak
    warmup_steps: int = 30
    seed: int = 0
    eval_every: int = 100
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def recipe(self) -> dict[str, int | float | str]:
        """What must be equal for a state to be continued."""
        names = ("heads", "steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps", "seed")
        return {name: getattr(self, name) for name in names} | {"target": checkpoint_name(self.target)}


def train_heads(config: HeadsConfig) -> dict[str, Any]:
    """Trains or resumes the heads and writes them to `config.out`; returns the held-out figures.

    Raises ValueError when the state belongs to another recipe, ModelError when the target can't be used or would be
    changed.
    """
    check_apart(config.out, config.target)
    check_checkpoint(config.target)
    tokenizer = load_tokenizer(config.target)
    training, held_out = (tokenize(tokenizer, read_texts(files)) for files in corpus_files())
    target: Any = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32, local_files_only=True)
    target = target.to(config.device).requires_grad_(False)
    output = output_head(target)
    tests = spread_windows(held_out, config.sequence_length + 1, _TEST_WINDOWS)
    heads = TokenHeads(config.heads, target.config.get_text_config().hidden_size).to(config.device)
    optimizer = make_optimizer(heads)
    parts = {"heads": heads, "optimizer": optimizer}
    step = restore_state(config.work, config.recipe(), parts, config.device)
    figures: dict[str, Any] = {}
    if step >= config.steps:  # it was finished before: perhaps for another folder
        figures = {"steps": step} | evaluate(target, output, heads, tests)
        export(heads, figures, config)
    with Progress(*_COLUMNS, TimeRemainingColumn()) as progress:
        bar = progress.add_task("training heads", total=config.steps, completed=step)
        while step < config.steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            divergences, _ = compare(target, output, heads, batch_at(step, training, config))
            divergences.sum().backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            shown = " ".join(f"{value:.2f}" for value in divergences.tolist())
            progress.update(bar, completed=step, description=f"training heads, kl {shown}")
            if step % config.eval_every == 0 or step == config.steps:
                figures = {"steps": step} | evaluate(target, output, heads, tests)
                progress.console.print(f"step {step}: {figures}")
                save_state(config.work, step, config.recipe(), parts)
                export(heads, figures, config)
    return figures


def compare(target: Any, output: Head, heads: TokenHeads, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each head's KL from the target in nats per token [heads], and how often both have the same likeliest token [heads]."""
    divergences, agreements = [], []
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=has_fast_bf16(batch.device.type)):
        with torch.no_grad():
            hidden = target.base_model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            teacher = output(hidden.flatten(0, 1)).float().log_softmax(-1).view(*hidden.shape[:2], -1)
        guesses = heads(hidden)
        for ahead, guess in enumerate(guesses, start=1):
            student = output(guess[:, :-ahead].flatten(0, 1)).float().log_softmax(-1)
            later = teacher[:, ahead:].flatten(0, 1)
            divergences.append(F.kl_div(student, later, reduction="batchmean", log_target=True))
            agreements.append((student.argmax(-1) == later.argmax(-1)).float().mean())
    return torch.stack(divergences), torch.stack(agreements)


@torch.no_grad()
def evaluate(target: Any, output: Head, heads: TokenHeads, tests: torch.Tensor) -> dict[str, list[float]]:
    """On held-out files, of each head: KL in nats per token, and the share of tokens at which it agrees with the target."""
    parts = [compare(target, output, heads, part.to(target.device)) for part in tests.split(4)]
    names = ("held_out_kl", "held_out_agreement")
    sums = [torch.stack(values).mean(0).tolist() for values in zip(*parts, strict=True)]
    return {name: [round(value, 4) for value in values] for name, values in zip(names, sums, strict=True)}


def export(heads: TokenHeads, figures: dict[str, Any], config: HeadsConfig) -> None:
    """Writes the heads in bfloat16, and the recipe with its figures."""
    config.out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in heads.state_dict().items()}
    save_file(weights, config.out / HEADS_FILE)
    told = config.recipe() | {"target": config.target.resolve().name} | figures  # not this machine's folders
    (config.out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
