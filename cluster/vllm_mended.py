"""Sampling of vLLM 0.32 on CPUs, mended: with drafts of any kind, it is wrong at T > 0, and with top-k alone it ends vLLM.

What stands there in place of a GPU kernel spreads temperature, top-k and top-p of requests over rows, and writes the answer
into a copy that nobody reads (https://github.com/vllm-project/vllm/issues/55005): so drafts are verified at temperatures
that stood in memory by chance. And top-k without top-p takes the largest k of no rows, in a step without drafts.
Imports nothing of ours, and vLLM only when it is asked to.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def mend_sampling() -> bool:
    """Puts it right in this process, one in which vLLM computes; whether it was wrong here. Once is enough."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.sample import rejection_sampler  # type: ignore[import-not-found,unused-ignore]

    if not current_platform.is_cpu() or _spreads(rejection_sampler.expand_batch_to_tokens):
        return False
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits: "torch.Tensor", *others: Any) -> "torch.Tensor":
        return constrain(logits, *others) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = spread
    rejection_sampler.apply_sampling_constraints = constrain_some
    return True


def spread(
    x: "torch.Tensor", cu_num_tokens: "torch.Tensor", num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> "torch.Tensor":
    """Values x [requests] for each row [num_tokens]; cu_num_tokens [requests]: where the rows of each request end."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _spreads(expand: "Callable[..., torch.Tensor]") -> bool:
    """Whether the temperatures of two requests reach their rows."""
    import torch

    rows = expand(torch.tensor([0.5, 0.0]), torch.tensor([1, 3], dtype=torch.int32), 3, replace_from=0, replace_to=1)
    return bool(rows.tolist() == [0.5, 1.0, 1.0])
