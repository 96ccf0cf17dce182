"""What a model asks of its attention, found by running it once on two tokens before it serves any.

Models that keep something else than keys and values, ignore the attention function they are given, or want it to do what
ours doesn't, are told by what they do: their names are not known here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers

from engine.attention import Current, Heads

PROBE = "paceline-probe"  # the attention implementation that a model is loaded with
_UNDERSTOOD = {"sliding_window", "softcap", "s_aux", "is_causal", "position_ids"}  # what an attention function is told
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)

Mask = Callable[[int, int, torch.Tensor, torch.Tensor], Any]  # (batch, head, query, key) -> whether it is seen


class Unsupported(ValueError):
    """Why a model can't run; the message goes on after its architecture's name."""


class _Call(NamedTuple):
    """What the attention function is called with, as far as it matters."""

    heads: int
    kv: int
    dim: int
    value_dim: int
    mask: Mask


def register_probe() -> None:
    """Makes PROBE known to transformers."""
    transformers.AttentionInterface.register(PROBE, _record)
    transformers.AttentionMaskInterface.register(PROBE, _keep_mask)


def probe(model: Any, layers: int, length: int, current: Current) -> Heads:
    """The shape of the attention of a model loaded with PROBE, whose attention modules get `current`.

    length: the most positions there can be. Raises Unsupported.
    """
    if model.base_model is model or model.get_output_embeddings() is None:
        raise Unsupported("has no decoder and output layer that can be told apart")
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    text = torch.tensor([[token for token in range(3) if token != padding][:2]], device=model.device)
    told, called = _run(model, text, position_ids=torch.tensor([[0, 1]], device=model.device))
    counted, _ = _run(model, text)
    if not torch.allclose(told, counted, rtol=0.01, atol=0.01):  # as behind padding: ours would be other ones
        raise Unsupported("does not count positions from 0")
    calls = {int(module.layer_idx): call for module, call in called.items()}
    if len(called) != layers or set(calls) != set(range(layers)):
        raise Unsupported(f"asks for attention in {len(called)} of {layers} layers")
    if len({call[:4] for call in calls.values()}) > 1:
        raise Unsupported("has keys and values of several sizes, layer by layer")
    first = calls[0]
    if first.dim != first.value_dim:
        raise Unsupported(f"has keys and values of different sizes, {first.dim} and {first.value_dim}")
    for module in called:
        module.paceline = current
    with refusing("has masks that can't be told"):
        windows = tuple(_window(calls[layer].mask, length) for layer in range(layers))
    return Heads(first.kv, first.heads // first.kv, first.dim, windows)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns what a model's own code raises into Unsupported."""
    try:
        yield
    except Unsupported:
        raise
    except _FAILURES as error:
        raise Unsupported(f"{what}: {' '.join(str(error).split())[:200]}") from error


def _keep_mask(*_: Any, mask_function: Mask, **kwargs: Any) -> Mask:
    """In place of a mask, the rule that makes it."""
    return mask_function


def _run(model: Any, text: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, dict[Any, _Call]]:
    """The last hidden states, which know of positions by their embeddings alone, and what attention modules were told."""
    with refusing("can't run through transformers' attention interface"):
        hidden: torch.Tensor = model.base_model(input_ids=text, use_cache=False, **given).last_hidden_state
    called = {module: module.__dict__.pop("paceline") for module in model.modules() if "paceline" in module.__dict__}
    return hidden.float(), called


def _record(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that notes what it is given, and attends to nothing."""
    for name, given in kwargs.items():
        nothing = given is None or (isinstance(given, int | float) and not given)
        if not nothing and name not in _UNDERSTOOD:
            raise Unsupported(f"wants an attention with {name}")
    if getattr(module, "layer_idx", None) is None or "paceline" in module.__dict__:
        raise Unsupported("has attention that is not one per layer")
    if not callable(attention_mask):
        raise Unsupported("makes its own attention masks")
    module.paceline = _Call(query.shape[1], key.shape[1], key.shape[3], value.shape[3], attention_mask)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _window(mask: Mask, length: int) -> int | None:
    """How many positions a row sees at most, its own included; None: all before it. Raises Unsupported for other masks."""

    def sees(query: int, key: int) -> bool:
        return bool(mask(0, 0, torch.tensor(query), torch.tensor(key)))

    last = length - 1
    first, seen = 0, last  # the first position that the last one sees is between these
    while first < seen:
        middle = (first + seen) // 2
        first, seen = (first, middle) if sees(last, middle) else (middle + 1, seen)
    window = length - first
    edge = last // 2  # a window moves along: this position's begins `window` before it too
    begin = max(edge - window + 1, 0)
    if not sees(edge, begin) or sees(edge, edge + 1) or (begin > 0 and sees(edge, begin - 1)):
        raise Unsupported("has a mask that is neither causal nor a sliding window")
    return None if first == 0 else window
