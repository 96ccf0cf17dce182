"""A larger target with the very same outputs: a benchmark can have the cost of a big model without one.

Copies of layers are put in between whose output projections are zero, so that they add nothing to the residual stream, as in
block expansion (Wu et al. 2024, https://arxiv.org/abs/2401.02415), which then trains them.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint import ModelError, architecture, check_checkpoint

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
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "chat_template.jinja"),
)


def expand(model: Path, layers: int, out: Path) -> int:
    """Writes `model` with `layers` decoder layers to `out`; returns its number of parameters.

    Raises ModelError when the model has more layers already, or none of the kind that can be copied.
    """
    kind = architecture(check_checkpoint(model))
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    old = int(config.num_hidden_layers)
    if layers < old:
        raise ModelError(f"{model} has {old} layers already, more than {layers}")
    small: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    place, outputs = _layers(small, old)
    if not outputs:
        raise ModelError(f"{model} can't be expanded: {kind} has no layers whose outputs are known here")
    sources = [index * old // layers for index in range(layers)]  # evenly spread; the first of each run is the original
    for name, value in config.to_dict().items():
        if name.endswith(_PER_LAYER) and isinstance(value, list) and len(value) == old:
            setattr(config, name, [value[source] for source in sources])
    config.num_hidden_layers = layers
    large: Any = AutoModelForCausalLM.from_config(config, dtype=small.dtype).eval()
    large.load_state_dict(_weights(small, place, outputs, sources))
    if not _same(small, large):
        raise ModelError(f"{model} can't be expanded: more layers change the output of {kind}")
    large.save_pretrained(out)
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    return int(large.num_parameters())


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
def _same(small: Any, large: Any) -> bool:
    """Whether two models give the same logits for a short text: not where layers know their number, or what follows adds."""
    tokens = torch.arange(3, 11)[None] % small.config.vocab_size
    return torch.equal(small(tokens, use_cache=False).logits, large(tokens, use_cache=False).logits)
