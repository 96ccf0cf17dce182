"""What can be told about a checkpoint without loading it. Imports nothing slow."""

import json
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A checkpoint that can't be loaded or run; the message says why in one line."""


def check_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's config.json; raises ModelError when the folder is not a usable checkpoint."""
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"no model at {path}: it has no config.json")
    try:
        values: Any = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} can't be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{config} holds no settings")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"no weights at {path}: it has no .safetensors file")
    if "vocab_size" not in values:
        raise ModelError(f"{config} names no vocab_size")
    return dict(values)
