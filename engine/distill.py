"""Distils a draft further from a target that exists: on the corpus, and on the text that the target itself writes.

What a draft has to guess when it works is the target's own text, sampled and greedy, not the corpus. Training on the
student's or teacher's own output instead of given text alone is what DistillSpec (Zhou et al. 2023,
https://arxiv.org/abs/2310.08461) found to raise acceptance most. It also compares what is minimized: the divergence
(KL) asks a small draft for all of the target's distribution, the total variation for what is accepted alone.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from engine.checkpoint import check_apart, checkpoint_name
from engine.cpu import has_fast_bf16
from engine.expand import expand
from engine.resume import restore_state, save_state
from engine.text import load_tokenizer
from engine.train import corpus_files, learning_rate, make_optimizer, read_texts, spread_windows, tokenize

_SHORTEST_PREFIX = 32  # tokens of the corpus before the target's own
Loss = Literal["kl", "tv"]
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@dataclass(frozen=True)
class DistillConfig:
    """The recipe. Equal configurations on equal software give equal weights, interrupted or not."""

    target: Path
    draft: Path  # where the draft starts from
    out: Path
    work: Path = Path("build/distill")  # the target's text and the state that makes a run resumable
    layers: int | None = None  # of the new draft; None: as many as it has
    steps: int = 4000
    batch_size: int = 8  # windows per step; every other one is the target's own text
    sequence_length: int = 256  # tokens per window
    own_windows: int = 4096  # windows of the target's own text, half of them sampled (T = 1), half greedy
    generation_batch: int = 64
    learning_rate: float = 2e-3  # peak
    warmup_steps: int = 100
    seed: int = 0
    loss: Loss = "kl"
    eval_every: int = 200
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def recipe(self) -> dict[str, int | float | str | None]:
        """What must be equal for a state to be continued."""
        names = (
            "layers",
            "steps",
            "batch_size",
            "sequence_length",
            "own_windows",
            "learning_rate",
            "warmup_steps",
            "seed",
            "loss",
        )
        checkpoints = {"target": checkpoint_name(self.target), "draft": checkpoint_name(self.draft)}
        return {name: getattr(self, name) for name in names} | checkpoints


def distill(config: DistillConfig) -> dict[str, float]:
    """Trains or resumes the draft and writes it to `config.out`; returns the held-out figures.

    Raises ValueError when the state belongs to another recipe, ModelError when a checkpoint can't be used or would be
    written over.
    """
    check_apart(config.out, config.target, config.draft)
    tokenizer = load_tokenizer(config.target)
    training, held_out = (tokenize(tokenizer, read_texts(files)) for files in corpus_files())
    target = load(config.target, config.device).requires_grad_(False)
    target.generation_config = GenerationConfig()  # the checkpoint's own (top_p...) would change what it writes
    with Progress(*_COLUMNS, TimeRemainingColumn()) as progress:
        own = own_text(target, training, config.own_windows, "own", config, progress)
        tests = {"held_out": spread_windows(held_out, config.sequence_length + 1, min(32, config.own_windows))}
        tests["own"] = own_text(target, held_out, min(64, config.own_windows), "own-held-out", config, progress)
        draft = load(first_draft(config), config.device)
        optimizer = make_optimizer(draft)
        parts = {"draft": draft, "optimizer": optimizer}
        step = restore_state(config.work, config.recipe(), parts, config.device)
        bar = progress.add_task("distilling", total=config.steps, completed=step)
        figures: dict[str, float] = {}
        if step >= config.steps:  # it was finished before: perhaps for another folder
            figures = {"steps": step} | evaluate(target, draft, tests)
            export(draft, tokenizer, figures, config)
        while step < config.steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss = LOSSES[config.loss](*foretold(target, draft, batch_at(step, training, own, config)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            progress.update(bar, completed=step, description=f"distilling, {config.loss} {loss.item():.3f}")
            if step % config.eval_every == 0 or step == config.steps:
                figures = {"steps": step} | evaluate(target, draft, tests)
                progress.console.print(f"step {step}: {figures}")
                save_state(config.work, step, config.recipe(), parts)
                export(draft, tokenizer, figures, config)
    return figures


def load(path: Path, device: str) -> Any:
    """The checkpoint in float32, to be trained or to be asked."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.to(device)


def first_draft(config: DistillConfig) -> Path:
    """The checkpoint to start from: the draft, or the draft with further layers that add nothing yet."""
    if config.layers is None:
        return config.draft
    deeper = config.work / "draft"
    expand(config.draft, config.layers, deeper)
    return deeper


def own_text(
    target: Any, data: torch.Tensor, count: int, name: str, config: DistillConfig, progress: Progress
) -> torch.Tensor:
    """`count` windows [count, sequence_length + 1]: prefixes from `data`, of random lengths, as the target continues them.

    Every other batch is sampled, the others are greedy. Kept in the work folder, for a run that was interrupted.
    """
    told = checkpoint_name(config.target), count, config.sequence_length, config.generation_batch, config.seed
    saved = config.work / f"{name}-{hashlib.blake2b(repr(told).encode(), digest_size=6).hexdigest()}.pt"
    if saved.exists():
        kept: torch.Tensor = torch.load(saved, weights_only=True)
        return kept.to(torch.int64)
    generator = torch.Generator().manual_seed(config.seed)
    torch.manual_seed(config.seed)
    length = config.sequence_length + 1
    progress.console.print(f"the target writes {count} windows of its own text ({name})")  # logs show no bars
    bar = progress.add_task("the target writes", total=count)
    windows: list[torch.Tensor] = []
    while sum(map(len, windows)) < count:
        rows = min(config.generation_batch, count // 2 or 1)
        prefix = int(torch.randint(_SHORTEST_PREFIX, length * 2 // 3, (1,), generator=generator))
        starts = torch.randint(0, len(data) - length, (rows,), generator=generator).tolist()
        prompts = torch.stack([data[start : start + prefix] for start in starts]).to(config.device)
        sampled = dict(do_sample=True, temperature=1.0, top_k=0) if len(windows) % 2 else dict(do_sample=False)
        texts = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_length=length,
            eos_token_id=None,
            pad_token_id=0,
            **sampled,
        )
        windows.append(texts.cpu())
        progress.update(bar, advance=rows)
    progress.remove_task(bar)
    text = torch.cat(windows)[:count]
    saved.parent.mkdir(parents=True, exist_ok=True)
    temporary = saved.with_suffix(".tmp")
    torch.save(text.to(torch.int32), temporary)
    temporary.replace(saved)
    return text


def batch_at(step: int, data: torch.Tensor, own: torch.Tensor, config: DistillConfig) -> torch.Tensor:
    """The step's windows [batch_size, sequence_length + 1]: a function of (seed, step), so a run can resume."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    half = config.batch_size // 2
    length = config.sequence_length + 1
    starts = torch.randint(0, len(data) - length, (config.batch_size - half,), generator=generator).tolist()
    given = torch.stack([data[start : start + length] for start in starts])
    written = own[torch.randint(0, len(own), (half,), generator=generator)]
    return torch.cat([given, written]).to(config.device)


def foretold(target: Any, draft: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What both make of `batch` [windows, tokens + 1]: log-probabilities of each token's successor, [n, vocabulary]."""
    inputs = batch[:, :-1]
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=has_fast_bf16(batch.device.type)):
        with torch.no_grad():
            teacher = target(input_ids=inputs, use_cache=False).logits.float()
        student = draft(input_ids=inputs, use_cache=False).logits.float()
    teacher, student = (F.log_softmax(logits, -1).flatten(0, 1) for logits in (teacher, student))
    return teacher, student


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """The student's KL from the teacher in nats per token, a scalar."""
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def total_variation(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """The share of the target's probability that the student doesn't give, a scalar.

    Where it is d, coupled samples at T = 1 are equal with a probability of (1 - d) / (1 + d) at least (Daliri et al. 2024).
    """
    return (teacher.exp() - student.exp()).abs().sum(-1).mean() / 2


LOSSES: dict[Loss, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"kl": kl, "tv": total_variation}


def equal_choices(teacher: torch.Tensor, student: torch.Tensor, noise: torch.Tensor | float = 0) -> torch.Tensor:
    """The share of rows where both choose the same token: the likeliest, or with Gumbel noise [n, vocabulary], a sample."""
    return ((teacher + noise).argmax(-1) == (student + noise).argmax(-1)).float().mean()


@torch.no_grad()
def evaluate(target: Any, draft: Any, tests: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per set of windows, by "<set>_<name>": losses, "agreement" (equal choices at T = 0) and "match" (those at T = 1)."""
    figures: dict[str, float] = {}
    for name, windows in tests.items():
        generator = torch.Generator(target.device).manual_seed(0)
        sums: Counter[str] = Counter()
        for part in windows.to(target.device).split(8):
            both = foretold(target, draft, part)
            noise = -torch.empty_like(both[0]).exponential_(generator=generator).log()
            parts: dict[str, torch.Tensor] = {kind: loss(*both) for kind, loss in LOSSES.items()}
            parts |= {"agreement": equal_choices(*both), "match": equal_choices(*both, noise)}
            sums.update({kind: float(value) * len(part) for kind, value in parts.items()})
        figures |= {f"{name}_{kind}": round(value / len(windows), 4) for kind, value in sums.items()}
    return figures


def export(draft: Any, tokenizer: PreTrainedTokenizerFast, figures: dict[str, float], config: DistillConfig) -> None:
    """Writes the draft as an ordinary bfloat16 safetensors checkpoint with its tokenizer and figures."""
    copy = type(draft)(draft.config)
    copy.load_state_dict(draft.state_dict())
    copy.to(torch.bfloat16).save_pretrained(config.out)
    tokenizer.save_pretrained(config.out)
    names = {"target": config.target.resolve().name, "draft": config.draft.resolve().name}  # not this machine's folders
    (config.out / "distillation.json").write_text(json.dumps(config.recipe() | names | figures, indent=1) + "\n")
