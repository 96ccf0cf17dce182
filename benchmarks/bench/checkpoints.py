"""The targets: the bundled one, and larger ones with the same outputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint import MODELS
from engine.expand import expand

TARGET, DRAFT, PROMPTS = MODELS / "code-target", MODELS / "code-draft", MODELS / "heldout.jsonl"


Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Pair:
    """The checkpoints."""

    target: Path
    draft: Path
    params: int  # of the target
    dtype: Dtype = "float32"  # that everybody computes in


def make_pair(size: str, folder: Path, dtype: Dtype = "float32") -> Pair:
    """The bundled pair, or one whose target was expanded to about so many parameters ("30M"), made once."""
    if size == "bundled":
        return Pair(TARGET, DRAFT, parameters(TARGET), dtype)
    wanted, small = float(size.rstrip("M")) * 1e6, parameters(TARGET)
    config = AutoConfig.from_pretrained(TARGET, local_files_only=True)
    outside = config.vocab_size * config.hidden_size  # the embedding, which is the output's too
    layers = round((wanted - outside) / ((small - outside) / config.num_hidden_layers))
    path = folder / f"code-target-{layers}-layers"
    if not (path / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        expand(TARGET, layers, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return Pair(path.absolute(), DRAFT, parameters(path), dtype)


def parameters(path: Path) -> int:
    """Of a checkpoint, without loading it."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())
