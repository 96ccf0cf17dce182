"""A process of its own for tests.test_warm: a pair warms up, serves, and prints what was compiled, or loaded, only then.

With the argument "alone", a target without a draft; with "turns", one that has it in its own process; with "local" and a
name, one with that drafter of its own; with "generate", target and draft in one loop. With "proposer" and a draft service's
address, what drafts for a vLLM.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
from numba.core.dispatcher import Dispatcher

from cluster.actors import TargetConfig, own_target
from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.link import memory_link
from cluster.placement import Placement
from cluster.vllm_proposer import Proposals, ProposerOptions
from deployments.generate import OneProcess, Pair
from engine.types import GenerationRequest, SamplingParams, TokenChunk
from tests.exact import DRAFT, LOCALS, TARGET

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
    return Counter({f"{each.py_func.__module__}.{each.py_func.__qualname__}": len(each.overloads) for each in found})


def serve(draft: DraftReplica | None, where: Placement, how: Sequence[str] = ()) -> Counter[str]:
    """A target; what was compiled before it served."""
    config = TargetConfig(TARGET, "float32", places=("separate",))
    match how:
        case ["turns"]:
            config = replace(config, places=("shared",), draft=DraftConfig(DRAFT, "float32"))
        case ["local", name]:
            config = replace(config, local=LOCALS[name])
    replica, _ = own_target(config, where, 0)
    if draft is not None:
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
                documents = (prompt,) if number % 2 else ()
                request = GenerationRequest(f"{at_once}-{number}", prompt, params, documents=documents)
                replica.submit(request, ended.put)
            assert replica.wait_idle(120)
    replica.close()
    return before


def generate() -> Counter[str]:
    """What the command does without replicas; what was compiled before its first request."""
    engine = OneProcess(Pair(TARGET, DRAFT, "float32"), lambda _: None)
    before = compiled()
    for number, params in enumerate(KINDS):
        for _ in engine.stream(GenerationRequest(str(number), tuple(range(1, 40)) * 2, params)):
            pass
    return before


def propose(address: str) -> Counter[str]:
    """Proposals for texts that go on as proposed, or don't; what was compiled before the first one."""
    proposals = Proposals(ProposerOptions((address,), 8, 4096))
    before = compiled()
    texts = [list(range(1, 40)), list(range(2, 50))]
    taken = refused = turn = 0
    deadline = time.monotonic() + 120
    while min(taken, refused) < 8:
        assert time.monotonic() < deadline, "hardly anything was proposed"
        texts = [text[-500:] for text in texts]  # other texts, once they are long
        answers = proposals.propose([np.asarray(text, np.int32) for text in texts], [True, True])
        for text, answer in zip(texts, answers, strict=True):
            takes = turn % 2 == 0
            taken += bool(answer) and takes
            refused += bool(answer) and not takes
            text += [*answer, 7] if takes else [8]
        turn += 1
    proposals.close()
    return before


def main() -> None:
    where, arguments = Placement(cores=(0,)), sys.argv[1:]
    if arguments[:1] == ["proposer"]:
        before = propose(arguments[1])
    elif arguments == ["generate"]:
        before = generate()
    elif arguments:
        before = serve(None, where, arguments)
    else:
        draft = DraftReplica(make_drafter(DraftConfig(DRAFT, "float32"), where), where)
        before = serve(draft, where)
        draft.close()
    sys.stdout.write(" ".join(compiled() - before))


if __name__ == "__main__":
    main()
