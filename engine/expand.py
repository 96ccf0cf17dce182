"""A larger target with the very same outputs: a benchmark can have the cost of a big model without one.

Copies of layers are put in between whose output projections are zero, so that they add nothing to the residual stream, as in
block expansion (Wu et al. 2024, https://arxiv.org/abs/2401.02415), which then trains them.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint import ModelError, check_checkpoint

_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")  # what a layer adds to the residual stream
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def expand(model: Path, layers: int, out: Path) -> int:
    """Writes `model` with `layers` decoder layers to `out`; returns its number of parameters.

    Raises ModelError when the model has more layers already, or none of the kind that can be copied.
    """
    check_checkpoint(model)
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    old = int(config.num_hidden_layers)
    if layers < old:
        raise ModelError(f"{model} has {old} layers already, more than {layers}")
    small: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    if not all(name in dict(small.base_model.layers[0].named_modules()) for name in _OUTPUTS):
        raise ModelError(f"{model} can't be expanded: its layers have no {' and '.join(_OUTPUTS)}")
    sources = [index * old // layers for index in range(layers)]  # evenly spread; the first of each run is the original
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[source] for source in sources]
    large: Any = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    weights = {name: value for name, value in small.state_dict().items() if ".layers." not in name}
    for index, source in enumerate(sources):
        copied = index > 0 and sources[index - 1] == source
        for name, value in small.base_model.layers[source].state_dict().items():
            zero = copied and name.rpartition(".")[0] in _OUTPUTS
            weights[f"model.layers.{index}.{name}"] = torch.zeros_like(value) if zero else value
    large.load_state_dict(weights)
    large.save_pretrained(out)
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    return int(large.num_parameters())
