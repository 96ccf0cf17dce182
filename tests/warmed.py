"""A process of its own for tests.test_warm: a pair warms up, serves, and prints what was compiled, or loaded, only then.

With the argument "alone", a target without a draft.
"""

import gc
import sys
from collections import Counter
from dataclasses import replace
from queue import SimpleQueue

from numba.core.dispatcher import Dispatcher

from cluster.actors import TargetConfig, own_target
from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.link import memory_link
from cluster.placement import Placement
from engine.types import GenerationRequest, SamplingParams, TokenChunk
from tests.exact import DRAFT, TARGET

KINDS = [
    SamplingParams(0.0, max_tokens=48),
    SamplingParams(1.0, max_tokens=96),
    SamplingParams(1.0, max_tokens=96),
    SamplingParams(1.0, top_p=0.9, max_tokens=24),
    SamplingParams(0.7, top_k=20, min_p=0.05, max_tokens=24),
    SamplingParams(1.0, repetition_penalty=1.2, logprobs=2, max_tokens=24),
]


def compiled() -> Counter[str]:
    """Of each function, for how many types of arguments."""
    gc.unfreeze()  # what was loaded before the warm-up is out of sight else
    found = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
    return Counter({each.py_func.__qualname__: len(each.overloads) for each in found})


def main() -> None:
    where = Placement(cores=(0,))
    replica, _ = own_target(TargetConfig(TARGET, "float32", places=("separate",)), where, 0)
    draft = None
    if "alone" not in sys.argv:
        draft = DraftReplica(make_drafter(DraftConfig(DRAFT, "float32"), where), where)
        near, far = memory_link()
        draft.add_link(far)
        replica.add_link(near)
    before = compiled()
    for at_once in (1, len(KINDS)):
        for first in range(0, 3 * len(KINDS), at_once):
            ended: SimpleQueue[TokenChunk] = SimpleQueue()
            for number in range(first, first + at_once):
                params = replace(KINDS[number % len(KINDS)], seed=number)
                prompt = tuple(range(number + 1, number + 40)) * 2
                replica.submit(GenerationRequest(f"{at_once}-{number}", prompt, params), ended.put)
            assert replica.wait_idle(120)
    sys.stdout.write(" ".join(compiled() - before))
    replica.close()
    if draft is not None:
        draft.close()


if __name__ == "__main__":
    main()
