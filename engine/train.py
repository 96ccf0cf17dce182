"""Trains the bundled pair: a target from scratch and a draft distilled from it, in one loop.

The corpus is what every machine with Python has: the standard library's own source. One file in twenty is held out,
chosen by a hash of its path; held-out files are the prompts of the demo, the tests and the benchmarks.
"""

import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.checkpoint import ModelError
from engine.cpu import has_fast_bf16
from engine.resume import restore_state, save_state

END = "<|endoftext|>"
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_ONE_IN = 20


class Schedule(Protocol):
    """What the learning rate is a function of."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...


class Batches(Protocol):
    """What the windows of a step are a function of."""

    @property
    def batch_size(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True)
class TrainingConfig:
    """The recipe. Equal configurations on equal software give equal weights, interrupted or not."""

    out: Path = Path("models")
    work: Path = Path("build/train")  # the state that makes a run resumable
    steps: int = 2400
    batch_size: int = 8  # sequences per step
    sequence_length: int = 256  # tokens per sequence
    learning_rate: float = 3e-3  # peak, of the target; the draft learns at the same rate
    warmup_steps: int = 60
    vocab_size: int = 4096
    seed: int = 0
    eval_every: int = 100
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


TARGET_SHAPE = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6)
DRAFT_SHAPE = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=3)
KEY_VALUE_HEADS = dict(target=2, draft=1)


def corpus_files() -> tuple[list[Path], list[Path]]:
    """The standard library's modules as (training files, held-out files), each sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES & set(relative.parts):
            continue
        digest = int.from_bytes(hashlib.sha256(relative.as_posix().encode()).digest()[:4], "big")
        (held_out if digest % HELD_OUT_ONE_IN == 0 else training).append(path)
    return training, held_out


def read_texts(files: list[Path]) -> Iterator[str]:
    """The files' texts; undecodable bytes are dropped."""
    for path in files:
        yield path.read_text(encoding="utf-8", errors="ignore")


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without a prefix space, so that encode and decode are exact inverses."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> torch.Tensor:
    """All texts as one int64 vector, each followed by the end token. Raises ModelError where the tokenizer has none."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no end token (eos_token), which ends every text")
    ids: list[int] = []
    for text in texts:
        ids.extend(tokenizer(text)["input_ids"])
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


def build_model(shape: dict[str, int], key_value_heads: int, config: TrainingConfig) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings and heads of 64 dimensions."""
    settings: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        num_key_value_heads=key_value_heads,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(LlamaConfig(**(settings | shape)))
    torch.nn.Module.to(model, config.device)
    return model


def batch_at(step: int, data: torch.Tensor, config: Batches) -> torch.Tensor:
    """The step's random windows [batch_size, sequence_length + 1]: a function of (seed, step), so a run can resume."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(0, len(data) - config.sequence_length - 1, (config.batch_size,), generator=generator)
    return torch.stack([data[i : i + config.sequence_length + 1] for i in starts.tolist()]).to(config.device)


def losses(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(target cross-entropy, draft's KL from the target, share of positions where both argmaxes agree)."""
    inputs, labels = batch[:, :-1], batch[:, 1:]
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=has_fast_bf16(batch.device.type)):
        target_logits = target(input_ids=inputs, use_cache=False).logits.float()
        draft_logits = draft(input_ids=inputs, use_cache=False).logits.float()
    cross_entropy = F.cross_entropy(target_logits.flatten(0, 1), labels.flatten())
    teacher = F.log_softmax(target_logits.detach(), -1).flatten(0, 1)
    kl = F.kl_div(F.log_softmax(draft_logits, -1).flatten(0, 1), teacher, reduction="batchmean", log_target=True)
    agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean().item()
    return cross_entropy, kl, agreement


def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, data: torch.Tensor, config: TrainingConfig
) -> dict[str, float]:
    """Held-out cross-entropy of the target in nats per token, and agreement, over at most 32 windows."""
    windows = spread_windows(data, config.sequence_length + 1, 32)
    totals = torch.zeros(2)
    with torch.no_grad():
        for window in windows:
            cross_entropy, _, agreement = losses(target, draft, window[None].to(config.device))
            totals += torch.tensor([cross_entropy.item(), agreement])
    loss, agreement = (totals / len(windows)).tolist()
    return {"held_out_loss": round(loss, 4), "agreement": round(agreement, 4)}


def spread_windows(data: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """At most `count` windows [count, length], evenly spread over `data`."""
    windows = data[: len(data) // length * length].view(-1, length)
    return windows[:: max(1, len(windows) // count)][:count]


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: Schedule) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def train(config: TrainingConfig) -> dict[str, float]:
    """Trains or resumes the pair and writes it below `config.out`; returns the held-out figures.

    Raises ValueError when the training state belongs to another recipe.
    """
    training_files, held_out_files = corpus_files()
    tokenizer = load_or_train_tokenizer(training_files, config)
    training_data = tokenize(tokenizer, read_texts(training_files))
    held_out_data = tokenize(tokenizer, read_texts(held_out_files))

    torch.manual_seed(config.seed)
    target = build_model(TARGET_SHAPE, KEY_VALUE_HEADS["target"], config)
    draft = build_model(DRAFT_SHAPE, KEY_VALUE_HEADS["draft"], config)
    optimizers = [make_optimizer(target), make_optimizer(draft)]
    parts = {"target": target, "draft": draft, "target-optimizer": optimizers[0], "draft-optimizer": optimizers[1]}
    first_step = restore_state(config.work, recipe(config), parts, config.device)

    figures: dict[str, float] = {}
    if first_step >= config.steps:  # it was finished before: perhaps for another folder
        figures = {"steps": first_step} | evaluate(target, draft, held_out_data, config)
        export(target, draft, tokenizer, figures, config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task(f"training on {len(training_data):,} tokens", total=config.steps, completed=first_step)
        for step in range(first_step, config.steps):
            cross_entropy, kl, _ = losses(target, draft, batch_at(step, training_data, config))
            (cross_entropy + kl).backward()  # the teacher's logits are detached: two independent problems
            for model, optimizer in zip((target, draft), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, config)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            progress.update(bar, advance=1, description=f"loss {cross_entropy.item():.3f} kl {kl.item():.3f}")
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                figures = {"steps": step + 1} | evaluate(target, draft, held_out_data, config)
                progress.console.print(f"step {step + 1}: {figures}")
                save_state(config.work, step + 1, recipe(config), parts)
                export(target, draft, tokenizer, figures, config)
    write_prompts(held_out_files, tokenizer, config.out / "heldout.jsonl")
    return figures


def load_or_train_tokenizer(files: list[Path], config: TrainingConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of an interrupted run, or a new one."""
    saved = config.work / f"tokenizer-{config.vocab_size}"
    if not saved.exists():
        train_tokenizer(read_texts(files), config.vocab_size).save_pretrained(saved)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(saved)
    return tokenizer


def recipe(config: TrainingConfig) -> dict[str, int | float]:
    """What must be equal for a training state to be continued."""
    names = ("steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps", "vocab_size", "seed")
    return {name: getattr(config, name) for name in names}


def export(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    figures: dict[str, float],
    config: TrainingConfig,
) -> None:
    """Writes both models as ordinary bfloat16 safetensors checkpoints with their tokenizer."""
    for name, model in (("code-target", target), ("code-draft", draft)):
        weights = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
        copy = LlamaForCausalLM(model.config)
        torch.nn.Module.to(copy, torch.bfloat16)
        copy.load_state_dict(weights)
        copy.save_pretrained(config.out / name)
        tokenizer.save_pretrained(config.out / name)
    (config.out / "training.json").write_text(json.dumps(recipe(config) | figures, indent=1) + "\n")


def write_prompts(
    files: list[Path], tokenizer: PreTrainedTokenizerFast, path: Path, count: int = 200, tokens: int = 96
) -> None:
    """Writes `count` prompts, one JSON string a line: whole lines of held-out files, at most `tokens` tokens each."""
    texts = list(read_texts(files))
    pieces = [piece for text in texts for piece in line_pieces(text, tokenizer, tokens)]
    stride = max(1, len(pieces) // count)
    chosen = pieces[::stride][:count]
    path.write_text("".join(json.dumps(piece) + "\n" for piece in chosen))


def line_pieces(text: str, tokenizer: PreTrainedTokenizerFast, tokens: int) -> Iterator[str]:
    """Consecutive runs of whole lines; a run ends before it would exceed `tokens`."""
    run, used = "", 0
    for line in text.splitlines(keepends=True):
        length = len(tokenizer(line)["input_ids"])
        if run and used + length > tokens:
            if used > tokens // 2:
                yield run
            run, used = "", 0
        run, used = run + line, used + length
