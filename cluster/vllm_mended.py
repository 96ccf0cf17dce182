"""Three faults of vLLM 0.32 on CPUs, mended. Elsewhere nothing is changed. Imports nothing of ours, and vLLM only in `mend`.

1. With drafts of any kind, they are verified at temperatures, top-k and top-p out of uninitialized memory: what spreads
   them over rows writes into a copy that nobody reads (https://github.com/vllm-project/vllm/issues/55005).
2. With drafts of any kind, top-k without top-p ends the engine in the first step without drafts: `max()` of no rows.
3. A request with a seed at T > 0 ends the engine when its prompt is read in several steps: it wants to rewind what was
   drawn too early, and generators on CPUs have no offset.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_FAULTY = "0.32."


@cache
def mend() -> None:
    """For the process in which vLLM computes. A failure is logged, and stops nothing else."""
    try:
        from vllm import __version__  # type: ignore[import-not-found,unused-ignore]
        from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]

        if not current_platform.is_cpu():
            return
        if __version__.startswith(_FAULTY):
            _mend_verification()
            _mend_seeds()
        else:
            logger.warning("vLLM %s is not mended: of %s it is known what is wrong on CPUs", __version__, _FAULTY)
    except Exception:
        logger.exception("vLLM is not mended, or not in all")


def _mend_verification() -> None:
    """Faults 1 and 2."""
    from vllm.v1.sample import rejection_sampler  # type: ignore[import-not-found,unused-ignore]

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_rows(logits: "torch.Tensor", *arguments: Any, **more: Any) -> "torch.Tensor":
        return constrain(logits, *arguments, **more) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = spread
    rejection_sampler.apply_sampling_constraints = constrain_rows


def spread(
    x: "torch.Tensor", cu_num_tokens: "torch.Tensor", num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> "torch.Tensor":
    """Values x [requests] for each row [num_tokens]; cu_num_tokens [requests]: where the rows of each request end."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _mend_seeds() -> None:
    """Fault 3: generators of requests whose prompt is not read yet are as they were before the step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found,unused-ignore]

    sample, book = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sample_and_rewind(runner: Any, *arguments: Any, **more: Any) -> Any:
        generators = runner.input_batch.generators
        unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        states = {row: generators[row].get_state() for row in unread if row in generators}
        output = sample(runner, *arguments, **more)
        for row, state in states.items():
            generators[row].set_state(state)
        return output

    def book_without_rewinding(runner: Any, *arguments: Any, **more: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return book(runner, *arguments, **more)
        finally:
            batch.generators = generators

    GPUModelRunner._sample = sample_and_rewind
    GPUModelRunner._bookkeeping_sync = book_without_rewinding
