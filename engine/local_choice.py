"""Which drafter runs beside a target, in its own process, by name, and what each of them needs. Imports nothing slow."""

from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from engine.checkpoint import ModelError

LocalName = Literal["heads", "early-exit", "jacobi", "suffix", "ngram", "retrieval"]
HEADS_FILE = "heads.safetensors"


def check_local(drafter: LocalName | None, heads: Path | None, documents: Path | None) -> None:
    """Raises ModelError, in one line, when a drafter lacks something, or is given what it would not use."""
    named = f"the drafter {drafter}" if drafter is not None else "a target without a drafter of its own"
    if drafter == "heads" and heads is None:
        raise ModelError(f"{named} needs heads, as 'paceline heads' trains them")
    if drafter != "heads" and heads is not None:
        raise ModelError(f"{named} uses no heads")
    if drafter == "retrieval" and documents is None:
        raise ModelError(f"{named} needs documents")
    if drafter != "retrieval" and documents is not None:
        raise ModelError(f"{named} uses no documents: retrieval does")


def check_heads(path: Path, hidden_size: int, target: Path) -> None:
    """Raises ModelError unless there are heads in a folder, for a target of this hidden size (0: not known)."""
    file = path / HEADS_FILE
    if not file.is_file():
        raise ModelError(f"no heads at {path}: it has no {HEADS_FILE}")
    try:
        with safe_open(file, "numpy") as weights:
            named = "blocks.0.weight" in weights.keys()  # noqa: SIM118  it is no dict
            shape = weights.get_slice("blocks.0.weight").get_shape() if named else []
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} can't be read: {' '.join(str(error).split())}") from error
    if len(shape) != 2:
        raise ModelError(f"{file} holds no heads")
    if hidden_size and shape[-1] != hidden_size:
        raise ModelError(f"{file} is for a hidden size of {shape[-1]}; that of {target} is {hidden_size}")
