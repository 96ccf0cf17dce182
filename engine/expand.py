"""A larger target with the very same outputs: a benchmark can have the cost of a big model without one.

Copies of layers are put in between whose output projections are zero, so that they add nothing to the residual stream, as in
block expansion (Wu et al. 2024, https://arxiv.org/abs/2401.02415), which then trains them. A wider model carries the
residual stream several times over, reads the first copy only, and has further heads and units whose outputs count for
nothing.
"""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from engine.checkpoint import ModelError, architecture, check_apart, check_checkpoint

# What adds to the residual stream, in a layer: the names that families have for it.
_OUTPUTS = (
    ("self_attn.o_proj", "mlp.down_proj"),
    ("self_attn.o_proj", "mlp.c_proj"),
    ("self_attn.dense", "mlp.fc2"),
    ("self_attn.out_proj", "fc2"),
    ("attention.dense", "mlp.dense_4h_to_h"),
    ("attn.c_proj", "mlp.c_proj"),
)
_PER_LAYER = ("layers", "layer_types")  # how settings that list something for every layer are named
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZES = ("hidden_size", "intermediate_size")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "chat_template.jinja"),
)


def expand(
    model: Path, layers: int, out: Path, hidden_size: int | None = None, intermediate_size: int | None = None
) -> int:
    """Writes `model` with `layers` decoder layers to `out`; returns its number of parameters.

    hidden_size, intermediate_size: of the larger model, multiples of the model's own; heads stay as large, and get as
    many times more as the hidden size grows. Raises ModelError when a size is less than the model's or no multiple of
    it, when `out` is the model's own folder, or when its kind can't be expanded: its output would be another.
    """
    check_apart(out, model)
    kind = architecture(check_checkpoint(model))
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    if layers < config.num_hidden_layers:
        raise ModelError(f"{model} has {config.num_hidden_layers} layers already, more than {layers}")
    sizes = {
        name: size for name, size in zip(_SIZES, (hidden_size, intermediate_size), strict=True) if size is not None
    }
    for name, size in sizes.items():
        own = getattr(config, name, None)
        if not isinstance(own, int) or size % own:
            raise ModelError(f"{model} can't get the {name} {size}: it is no multiple of the model's own, {own}")
    large: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    try:
        if sizes:
            large = _wider(large, sizes)
        if layers > config.num_hidden_layers:
            large = _deeper(large, layers)
    except _Differs as error:
        raise ModelError(f"{model} can't be expanded: {str(error).format(kind)}") from None
    large.save_pretrained(out)
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    return int(large.num_parameters())


class _Differs(Exception):
    """Why a larger model is not the same, with a place for the model's kind."""


def _wider(small: Any, sizes: dict[str, int]) -> Any:
    config = copy.deepcopy(small.config)
    times = sizes.get("hidden_size", config.hidden_size) // config.hidden_size
    for name, size in sizes.items():
        setattr(config, name, size)
    for name in _HEADS:
        if isinstance(heads := getattr(config, name, None), int):
            setattr(config, name, heads * times)
    config.tie_word_embeddings = False  # an output layer that reads all copies would give a multiple
    large = _empty(config, small)
    embeddings = {f"{name}.weight" for name, part in small.named_modules() if isinstance(part, torch.nn.Embedding)}
    wanted = {name: value.shape for name, value in large.state_dict().items()}
    try:
        weights = {
            name: _widened(value, wanted[name], name in embeddings) for name, value in small.state_dict().items()
        }
        large.load_state_dict(weights)
    except (KeyError, RuntimeError):
        raise _Differs("{} has weights that are widened in another way") from None
    logits, own = (_logits(copy.deepcopy(each).float()) for each in (large, small))
    if not torch.allclose(logits, own, rtol=0, atol=1e-3 * float(own.std())):
        raise _Differs("more width changes the output of {}")
    return large


def _widened(value: torch.Tensor, shape: torch.Size, embedding: bool) -> torch.Tensor:
    """What is written is written to all copies of the residual stream; only the first of what is read counts."""
    if embedding or value.ndim == 1:
        return value.repeat(*(size // own for size, own in zip(shape, value.shape, strict=True)))
    wide = value.new_zeros(shape)
    wide[:, : value.shape[1]] = value.repeat(shape[0] // value.shape[0], 1)
    return wide


def _deeper(small: Any, layers: int) -> Any:
    config = copy.deepcopy(small.config)
    old = config.num_hidden_layers
    place, outputs = _layers(small, old)
    if not outputs:
        raise _Differs("{} has no layers whose outputs are known here")
    sources = [index * old // layers for index in range(layers)]  # evenly spread; the first of each run is the original
    for name, value in config.to_dict().items():
        if name.endswith(_PER_LAYER) and isinstance(value, list) and len(value) == old:
            setattr(config, name, [value[source] for source in sources])
    config.num_hidden_layers = layers
    large = _empty(config, small)
    large.load_state_dict(_weights(small, place, outputs, sources))
    if not torch.equal(_logits(large), _logits(small)):  # where layers know their number, or what follows adds
        raise _Differs("more layers change the output of {}")
    return large


def _empty(config: Any, small: Any) -> Any:
    """A model to be given its weights."""
    with no_init_weights():
        large: Any = AutoModelForCausalLM.from_config(config, dtype=small.dtype).eval()
    large.tie_weights()
    return large


def _layers(model: Any, count: int) -> tuple[str, Sequence[str]]:
    """Where a model's decoder layers are, and the modules in each that add to the residual stream; none if unknown."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    for place, part in lists:
        names = dict(part[0].named_modules()) if len(part) == count else {}
        for outputs in _OUTPUTS:
            if all(output in names for output in outputs):
                return place, outputs
    return "", ()


def _weights(model: Any, place: str, outputs: Sequence[str], sources: Sequence[int]) -> dict[str, torch.Tensor]:
    """The larger model's weights: layer i is a copy of layer sources[i], without an effect but for the first copy."""
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{place}.")}
    for index, source in enumerate(sources):
        copied = index > 0 and sources[index - 1] == source
        for name, value in model.get_submodule(f"{place}.{source}").state_dict().items():
            zero = copied and name.rpartition(".")[0] in outputs
            weights[f"{place}.{index}.{name}"] = torch.zeros_like(value) if zero else value
    return weights


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor:
    """For a short text."""
    tokens = torch.arange(3, 11)[None] % model.config.vocab_size
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits
