"""What replicas run before they serve: kernels and loops are compiled, and the cost of a step is measured."""

import atexit
import gc
import time
from collections.abc import Callable

import numpy as np
import torch

from cluster.wire import DIGEST_BYTES, decode_up, encode_up
from engine import noise, sampling
from engine.attention import chain_rows
from engine.budget import Calibration, CostModel, GoodputWindow
from engine.drafters import Drafter
from engine.drafters.ngram import Earned, Lookup
from engine.drafters.past import Past
from engine.effort import EffortWindow, draft_steps
from engine.huge_pages import use_huge_pages
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.tree_loops import worthwhile
from engine.types import Growth, KVHandle, SamplingParams
from engine.verify import walk

# The first pass of any other number makes kernels, which the cost model would take for its cost.
_WARM_ROWS = (*range(1, 18), 20, 24, 32, 64, 128)
_WARM_PREFIX = 128  # tokens that each sequence has, whatever they are
_WARM_SEQUENCES = 16


def warm_up(
    runner: ModelRunner,
    cost: CostModel | None = None,
    repeats: int = 5,
    clock: Callable[[], float] = time.monotonic,
    count: int = 1,
) -> None:
    """Runs every common row count, which compiles its kernels, and tells the cost model the median time by the clock.

    oneDNN makes kernels for each thread: another one's first pass of each row count takes half a millisecond more.

    What was loaded until now is left out of garbage collection, whose rounds over it would hold up steps; on CPUs it moves
    into huge pages. On GPUs passes are recorded that choose `count` tokens after each row.
    """
    warm_up_loops()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of what is never freed
    if runner.pool.data.is_cpu:
        use_huge_pages()
    runner.record(count)
    lease = runner.pool.lease(_WARM_PREFIX + max(_WARM_ROWS))
    leases = [lease]
    try:
        runner.forward([chain_rows(lease, start, [0]) for start in (64, 128)])  # several sequences go another way
        runner.pool.move(lease.slots[:1].tolist(), lease.slots[1:2].tolist())
        batches = {rows: [chain_rows(lease, _WARM_PREFIX, [0] * rows, 0)] for rows in _WARM_ROWS}
        room = _WARM_PREFIX + runner.pool.page_size  # of one row each, in whole pages
        while len(leases) < _WARM_SEQUENCES and runner.pool.free_tokens >= room:
            leases.append(runner.pool.lease(room))
        together = [chain_rows(other, _WARM_PREFIX, [0]) for other in leases]
        times: dict[int, list[float]] = {rows: [] for rows in (*batches, 0)}  # 0: of all sequences together
        for _ in range(repeats):  # a machine that is slower for a while is so for all of them
            for rows, batch in [*batches.items(), (0, together)]:
                params = [SamplingParams()] * (rows or len(batch))
                started = clock()
                runner.best(batch, params, None, 1)
                times[rows].append(clock() - started)
        if cost is not None:
            middle = {rows: 1000 * sorted(taken)[repeats // 2] for rows, taken in times.items()}
            for rows in batches:
                cost.start(rows, middle[rows])
            if len(together) > 1:
                cost.start_further(len(together), middle[0])
    finally:
        for lease in leases:
            runner.pool.release(lease)


def warm_up_loops() -> None:
    """Grows, tells, verifies and commits a small tree, and samples: compiles the loops of all that, or loads what was
    compiled.
    """
    logits, drawn = torch.zeros(1, 2), [SamplingParams(temperature=1.0)]
    sampling.choose(logits, drawn, noise.keys(0, [0]))
    sampling.propose(logits, drawn, noise.keys(0, [0]), 1)
    sampling.margins(logits, drawn, noise.keys(0, [0]))  # choices within rounding are made exactly, which is rare
    draft, mirror = TokenTree(0), TokenTree(0)
    draft.expand([ROOT], np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    draft.frontier(1, 2)
    worthwhile(np.ones(1, np.float32), 0.1)
    nodes = draft.unsent(1)
    [growth] = decode_up(encode_up([Growth(0, KVHandle(1, bytes(DIGEST_BYTES)), *draft.piece(nodes))])[0])
    assert isinstance(growth, Growth)
    mirror.graft([], growth.parents, growth.tokens, growth.confidences)
    window = GoodputWindow(Calibration(), CostModel())
    [chosen] = window.choose([mirror])
    window.observe(mirror, chosen, [1])
    mirror.rows(chosen)
    walk(mirror, chosen, np.zeros(1 + len(chosen), np.int32))
    mirror.chain(1)
    mirror.commit([0])
    mirror.hang([0], [0.5])
    mirror.add_many([ROOT], [1], [0.5])
    mirror.along([0])
    Lookup([0, 0], True, Earned(), 1).hang(mirror)
    Past(0).begin()


def warm_up_drafter(drafter: Drafter) -> float:
    """First sessions, greedy and sampled, alone and beside another: they compile what every other one runs.

    Returns the milliseconds of the fastest step of one session alone.
    """
    times = []
    for temperature in (0.0, 1.0):
        for session in (0, 1):
            drafter.open(session, [0], SamplingParams(temperature=temperature))
            for _ in range(3):
                started = time.monotonic()
                drafter.grow()
                times += [time.monotonic() - started] if session == 0 else []
        for session in (0, 1):
            TokenTree(0).adopt(drafter.tree(session), 1, known=False)  # as a target does with its own guesses
            drafter.commit(session, [0])
            drafter.close(session)
    return 1000 * min(times)


def warm_up_turns(drafter: Drafter, effort: EffortWindow) -> None:
    """Draft steps that are taken as long as they pay, of one session and of two, into which a mirror's nodes hang first.

    effort: one of its own, that nobody uses afterwards.
    """
    for sessions in ([0], [0, 1]):
        for session in sessions:
            drafter.open(session, [0], SamplingParams(temperature=0.0))
            mirror = TokenTree(0)
            mirror.add(ROOT, 0, 0.5)
            drafter.tree(session).adopt(mirror, 1, known=False)
        draft_steps(drafter, sessions, 2, effort)
        effort.choose([drafter.tree(session) for session in sessions])
        for session in sessions:
            drafter.commit(session, [0])
            drafter.close(session)
