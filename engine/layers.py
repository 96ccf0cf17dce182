"""A model that ends after its first layers, made of another's parts: no weight is copied."""

import copy
from typing import Any

import torch

from engine.probe import Unsupported


def first_layers(model: Any, count: int) -> Any:
    """The first `count` layers of a causal language model, then its final norm and output layer, all shared with it.

    Raises Unsupported when its layers can't be found, or are not more.
    """
    total = int(model.config.get_text_config().num_hidden_layers)
    if not 1 <= count < total:
        raise Unsupported(f"has {total} layers, of which 1 to {total - 1} can be its first, not {count}")
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    for place, part in lists:
        if len(part) == total:
            return _with(model, place.split("."), part[:count])
    raise Unsupported("has no list of layers that is known here")


def _with(module: Any, path: list[str], part: torch.nn.Module) -> Any:
    """A copy of a module in which the one at `path` is another; everything beside the path is shared."""
    if not path:
        return part
    twin = copy.copy(module)
    inner = _with(module._modules[path[0]], path[1:], part)
    twin.__dict__["_modules"] = module._modules | {path[0]: inner}
    twin.__dict__["_compiled_call_impl"] = None  # would still run the original
    return twin
