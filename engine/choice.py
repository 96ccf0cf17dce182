"""Which drafter a draft replica runs, by name, what each of them needs, and its weights. Imports nothing slow."""

from pathlib import Path
from typing import Literal

from engine.checkpoint import ModelError

# auto: a model with lookup beside it, in the session's text and in earlier outputs; without a checkpoint, lookup alone.
DrafterName = Literal["auto", "model", "ngram", "suffix", "retrieval", "merged", "cascade"]
# Of a draft model's layers. full: as the checkpoint has them; auto: 8 bits where a pass takes less time for it, else full.
Weights = Literal["auto", "full", "int8", "int4"]

LEAST_KV_TOKENS = 1024  # of a pool: a draft begins with two sessions, each with room for its tree

_MODEL_NEEDED = ("model", "cascade")
_MODEL_USED = ("auto", "merged", *_MODEL_NEEDED)
_DOCUMENTS_USED = ("retrieval", "merged")


def check_choice(
    drafter: DrafterName, checkpoint: Path | None, documents: Path | None, inner: str | None = None
) -> None:
    """Raises ModelError, in one line, when a drafter lacks something, or is given what it would not use."""
    if drafter in _MODEL_NEEDED and checkpoint is None:
        raise ModelError(f"the drafter {drafter} needs a checkpoint")
    if drafter not in _MODEL_USED and checkpoint is not None:
        raise ModelError(f"the drafter {drafter} uses no checkpoint")
    if drafter == "retrieval" and documents is None:
        raise ModelError("the drafter retrieval needs documents")
    if drafter not in _DOCUMENTS_USED and documents is not None:
        raise ModelError(f"the drafter {drafter} uses no documents: retrieval and merged do")
    if drafter != "cascade" and inner is not None:
        raise ModelError(f"the drafter {drafter} uses no inner draft service: cascade does")
    if drafter == "merged" and checkpoint is None and documents is None:
        raise ModelError("the drafter merged needs a checkpoint or documents: suffix alone is the drafter suffix")


def check_weights(weights: Weights, checkpoint: Path | None, gpu: bool, dtype: str, compile: bool = False) -> None:
    """Raises ModelError, in one line, where a model can't have such weights, whatever the machine."""
    if weights in ("auto", "full"):
        return
    if checkpoint is None:
        raise ModelError(f"weights {weights}: there is no checkpoint")
    if weights == "int4" and not gpu:
        raise ModelError("weights int4: only on GPUs")
    if weights == "int4" and dtype == "float32":
        raise ModelError("weights int4: not in float32, only in bfloat16")
    if compile and not gpu:
        raise ModelError(f"weights {weights}: not compiled on CPUs")


def check_documents(path: Path) -> None:
    """Raises ModelError unless there is a file, or a folder with one."""
    if not path.exists():
        raise ModelError(f"there is nothing at {path}")
    if path.is_dir() and not any(file.is_file() for file in path.rglob("*")):
        raise ModelError(f"no documents in {path}")
