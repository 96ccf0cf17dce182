"""Which replica gets which cores or GPU."""

import os
import threading

import pytest
import torch

from cluster.placement import Placement, place
from engine.checkpoint import ModelError


def with_cores(monkeypatch: pytest.MonkeyPatch, *cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))


def test_every_replica_gets_cores_of_its_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2, 3, 5, 7, 11, 13)
    assert place(1, 2, gpus=0, threads=2) == (
        [Placement(cores=(2, 3), threads=2)],
        [Placement(cores=(5, 7), threads=2), Placement(cores=(11, 13), threads=2)],
    )


def test_cores_are_shared_in_turn_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 0, 1)
    targets, drafts = place(2, 2, gpus=0)
    assert [where.cores for where in targets] == [(0,), (1,)]
    assert [where.cores for where in drafts] == [(0,), (1,)]


def test_a_replica_never_gets_a_core_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 0, 1)
    (target,), (draft,) = place(1, 1, gpus=0, threads=3)
    for where in (target, draft):
        assert sorted(where.cores) == [0, 1]
        assert where.threads == 3


def test_each_replica_gets_a_gpu_where_there_are_enough() -> None:
    targets, drafts = place(2, 1, gpus=3)
    for where in [*targets, *drafts]:
        assert where == Placement(gpus=1.0)
        assert where.device == "cuda"
        assert where.ray_options()["num_gpus"] == 1.0


@pytest.mark.parametrize(("gpus", "share"), [(2, 0.5), (1, 1 / 3)])
def test_too_few_gpus_are_shared(gpus: int, share: float) -> None:
    targets, drafts = place(2, 1, gpus=gpus)
    for where in [*targets, *drafts]:
        assert where == Placement(gpus=share)
        assert where.device == "cuda"


def test_no_drafts() -> None:
    targets, drafts = place(1, 0, gpus=0)
    assert (len(targets), drafts) == (1, [])


def test_only_the_calling_thread_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    core = min(before)
    seen: list[set[int]] = []

    def run() -> None:
        Placement(cores=(core,), threads=1).apply_to_thread()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before


def test_the_number_of_arithmetic_threads_is_set_without_pinning() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    Placement(cores=(min(before),), threads=2).apply_to_process()
    assert torch.get_num_threads() == 2
    assert os.sched_getaffinity(0) == before
    torch.set_num_threads(threads)


def test_cores_that_are_not_there_are_named() -> None:
    Placement().check()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})  # where this thread is pinned says nothing of where others may be
        Placement(cores=tuple(before)).check()
        for cores in ((4000,), (min(before), 4000)):
            with pytest.raises(ModelError, match="cores: there is none with the number 4000 here"):
                Placement(cores=cores).check()
    finally:
        os.sched_setaffinity(0, before)
