"""What can be told about a checkpoint without loading it. Imports nothing slow."""

import hashlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "models"  # the bundled checkpoints, and held-out prompts

_MAX_HEADER = 100_000_000  # bytes, as safetensors allows
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # places of a file of weights that its digest looks at
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


def check_checkpoint(path: Path, own_engine: bool = True) -> dict[str, Any]:
    """The checkpoint's config.json; raises ModelError when the folder is not a usable checkpoint.

    own_engine: our own engine has to run it, which doesn't know every kind of model.
    """
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"no model at {path}: it has no config.json")
    try:
        values: Any = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} can't be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{config} holds no settings")
    if own_engine and (reason := _unsupported(values)):
        raise ModelError(f"{path} can't be run: {architecture(values)} {reason}")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"no weights at {path}: it has no .safetensors file")
    if "vocab_size" not in values:
        raise ModelError(f"{config} names no vocab_size")
    return dict(values)


def check_pair(target: Path, draft: Path | None) -> int:
    """Tokens that fit in the target's context; raises ModelError when the checkpoints can't be used together."""
    values = check_checkpoint(target)
    if draft is not None:
        sizes = values["vocab_size"], check_checkpoint(draft)["vocab_size"]
        if sizes[0] != sizes[1]:
            raise ModelError(f"vocabularies differ: {sizes[0]} tokens in {target}, {sizes[1]} in {draft}")
    return context_length(values)


def check_apart(out: Path, *sources: Path) -> None:
    """Raises ModelError when what is made would be written over a checkpoint that it is made of."""
    for source in sources:
        if out.resolve() == source.resolve():
            raise ModelError(f"{out} holds a checkpoint that this is made from: choose another folder")


def check_tokenizer(path: Path) -> None:
    """Raises ModelError when a checkpoint has no fast tokenizer, or one that can't be read."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json")
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  it raises nothing else
        raise ModelError(f"{file} can't be read: {error}") from None


def architecture(values: dict[str, Any]) -> str:
    """The name of the model's class, or at least its kind, from its config.json."""
    names = values.get("architectures")
    return str(names[0] if isinstance(names, list) and names else values.get("model_type", "a model of no kind"))


def context_length(values: dict[str, Any]) -> int:
    """Tokens that fit in a model's context, by its settings: those at which rotations don't depend on the text's length."""
    text = values.get("text_config")
    values = values | text if isinstance(text, dict) else values
    known = (
        values.get("max_position_embeddings") or values.get("n_positions") or _usual_length(values.get("model_type"))
    )
    for name in ("rope_parameters", "rope_scaling"):
        rotations = values.get(name) or {}
        for rotation in (rotations, *rotations.values()):  # one for all layers, or for every kind of them
            if isinstance(rotation, dict) and (rotation.get("rope_type") or rotation.get("type")) in ("longrope", "su"):
                first = rotation.get("original_max_position_embeddings")
                known = min(known, first or values.get("original_max_position_embeddings") or known)
    return int(known)


def _usual_length(kind: object) -> int:
    """Tokens that transformers takes for the context of a kind of model whose settings don't say."""
    from transformers import CONFIG_MAPPING  # seconds, which most settings spare

    usual = CONFIG_MAPPING[kind]() if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    return int(getattr(usual, "max_position_embeddings", None) or sys.maxsize)


def hidden_size(values: dict[str, Any]) -> int:
    """Features between a model's layers, by its config.json; 0 where it doesn't say."""
    text = values.get("text_config")
    values = text if isinstance(text, dict) else values
    size = values.get("hidden_size") or values.get("n_embd")
    return size if isinstance(size, int) else 0


def stored_numbers(path: Path) -> dict[str, int]:
    """How many numbers of each type ("BF16", "F32"...) a checkpoint's files hold; nothing where a file can't be read."""
    numbers: Counter[str] = Counter()
    try:
        for file in path.glob("*.safetensors"):
            for name, tensor in json.loads(_header(file)).items():
                if name != "__metadata__":
                    numbers[tensor["dtype"]] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whoever loads it says what is wrong
        return {}
    return dict(numbers)


def checkpoint_name(path: Path) -> str:
    """What tells a checkpoint from others when training goes on: where it is, and what can be seen of it quickly."""
    return f"{path.resolve()} {checkpoint_digest(path)}"


def checkpoint_digest(path: Path) -> str:
    """A name for a checkpoint's content, 32 hex digits: of its settings, its weights' names and shapes, and samples of them.

    The weights are not read whole: those of a large model take minutes. Training changes nearly all of them.
    """
    digest = hashlib.blake2b((path / "config.json").read_bytes(), digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        digest.update(_header(file))
        with file.open("rb") as weights:
            for i in range(_SAMPLES):
                weights.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """What a safetensors file says of its tensors, in JSON."""
    with file.open("rb") as weights:
        length = int.from_bytes(weights.read(8), "little")
        return weights.read(min(length, _MAX_HEADER))


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
