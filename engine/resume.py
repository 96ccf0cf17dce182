"""The state of a training run on disk: written so that an interruption at any moment can be resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_state(folder: Path, step: int, recipe: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Writes the state atomically. parts: models and optimizers, whatever has a state_dict, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "state.tmp"
    held = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, "recipe": recipe, **held}, temporary)
    temporary.replace(folder / "state.pt")


def restore_state(folder: Path, recipe: dict[str, Any], parts: Mapping[str, Any], device: str) -> int:
    """Loads the state into the parts, if there is one; the first step to run. Raises ValueError for another recipe's."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    if state["recipe"] != recipe:
        raise ValueError(f"{path} was written by another recipe: {state['recipe']}; delete it to start anew")
    if missing := parts.keys() - state.keys():
        raise ValueError(f"{path} was written by another version, without {min(missing)}; delete it to start anew")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])
