"""What can be told about a checkpoint without loading it. Imports nothing slow."""

import json
from pathlib import Path
from typing import Any

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of what can be run end
_RECURRENT = (
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "xlstm",
)  # model types without a sign of it among their settings
_LAYERS = {"full_attention", "sliding_attention"}


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
    if reason := _unsupported(values):
        raise ModelError(f"{path} can't be run: {architecture(values)} {reason}")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"no weights at {path}: it has no .safetensors file")
    if "vocab_size" not in values:
        raise ModelError(f"{config} names no vocab_size")
    return dict(values)


def architecture(values: dict[str, Any]) -> str:
    """The name of the model's class, or at least its kind, from its config.json."""
    names = values.get("architectures")
    return str(names[0] if isinstance(names, list) and names else values.get("model_type", "a model of no kind"))


def _unsupported(values: dict[str, Any]) -> str | None:
    """Why settings are those of a model that can't be run, as far as they tell; what they don't, `engine.probe` finds."""
    if values.get("is_encoder_decoder"):
        return "has an encoder; only decoders can be run"
    if values.get("architectures") and not architecture(values).endswith(_CAUSAL):
        return "is not a causal language model of text alone"
    if values.get("model_type") in _RECURRENT:
        return "keeps a recurrent state in place of keys and values"
    if values.get("kv_lora_rank"):
        return "compresses its keys and values (latent attention)"
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and (others := sorted({str(kind) for kind in kinds} - _LAYERS)):
        return f"has layers of other kinds than attention: {', '.join(others)}"
    return None
