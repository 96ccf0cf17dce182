"""Final hidden states -> logits, with all that a model's own forward does on the way: soft caps, scales, padding cut off."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from engine.probe import refusing

Head = Callable[[torch.Tensor], torch.Tensor]


class _States:
    """What a base model returns, of which only the final hidden states are there."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Given(torch.nn.Module):
    """In a base model's place: it is given the final hidden states as embeddings, and returns them."""

    @property
    def decoder(self) -> "_Given":
        """The part of the base model that some models call instead."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _States:
        return _States(inputs_embeds)


def output_head(model: Any) -> Head:
    """Computes logits [n, vocab_size] of final hidden states [n, hidden_size]: the output layer alone where that is all.

    Raises Unsupported.
    """
    plain: Head = model.get_output_embeddings()
    whole = copy.copy(model)  # shares everything but its base model
    whole.__dict__["_modules"] = model._modules | {model.base_model_prefix: _Given()}

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = whole(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    weight: Any = model.get_output_embeddings().weight
    # Values so large that a soft cap is seen in any dtype.
    sample = 100 * torch.arange(2 * weight.shape[1], device=weight.device).sin().view(2, -1).to(weight.dtype)
    with torch.inference_mode(), refusing("does more than its output layer does, and that can't be run alone"):
        return plain if torch.equal(plain(sample), head(sample)) else head
