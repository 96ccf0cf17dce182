"""What a user gets without choosing: a draft model with lookup beside it, which draft only where that pays."""

import time
from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from engine.budget import Calibration, CostModel
from engine.decode import Speculation
from engine.drafters.model import Growing, ModelDrafter
from engine.effort import EffortWindow
from engine.runner import ModelRunner

SHARED = 1 << 18  # tokens of earlier outputs that lookup knows: 18 MB
MOST_STEPS = 16  # draft steps before a target step
GROWING = Growing(shared=SHARED)


def growing_in_turns(device: str) -> Growing:
    """How trees grow where target and draft take turns. On CPUs every row takes its time, in either model: so one node of
    a session in a draft step, few children, and none of the lookups that are mostly wrong.
    """
    return replace(GROWING, each=1, children=3, doubtful=0.4, overrule=True) if device == "cpu" else GROWING


def taking_turns(
    draft: ModelRunner,
    cost: CostModel,
    draft_ms: float,
    tokenizer: PreTrainedTokenizerFast | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Speculation:
    """For target and draft in one loop.

    cost: of a target step, which goes on learning. draft_ms: a first guess at a draft step. clock: in seconds.
    """
    growing = growing_in_turns(draft.device)
    window = EffortWindow(Calibration(), cost, draft_ms, growing.each or growing.rows, clock=clock)
    return Speculation(ModelDrafter(draft, growing, tokenizer), window, MOST_STEPS)
