"""Which actor runs where: its GPU, or its CPU cores and thread count."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine.checkpoint import ModelError


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one replica. Only its loop's thread, and those that read its links, are pinned."""

    cores: tuple[int, ...] = ()  # empty: any core
    threads: int = 1  # of the model's CPU arithmetic
    gpus: float = 0.0

    @property
    def device(self) -> str:
        """The torch device. Ray shows an actor its own GPUs only, so the first is the right one."""
        return "cuda" if self.gpus else "cpu"

    def ray_options(self) -> dict[str, float]:
        """Arguments of an actor's `.options`."""
        return {"num_cpus": self.threads, "num_gpus": self.gpus}

    def check(self) -> None:
        """Raises ModelError for cores that this process can't have."""
        if not self.cores:
            return
        with ThreadPoolExecutor(1) as thread:  # one of its own tries it: where this one is pinned is no limit
            try:
                had = thread.submit(_pinned, self.cores).result()
            except OSError:  # to none of them
                had = set()
        if missing := set(self.cores) - had:
            raise ModelError(f"cores: there is none with the number {min(missing)} here")

    def apply_to_thread(self) -> None:
        """Pins the calling thread, and the arithmetic threads it will start, and sets their number."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        self.apply_to_process()

    def apply_to_process(self) -> None:
        """Sets the number of arithmetic threads. Pins nothing: threads inherit the cores of their parent."""
        torch.set_num_threads(self.threads)


def _pinned(cores: tuple[int, ...]) -> set[int]:
    """Pins the calling thread; the cores that it has then."""
    os.sched_setaffinity(0, cores)
    return os.sched_getaffinity(0)


def place(targets: int, drafts: int, gpus: int, threads: int = 1) -> tuple[list[Placement], list[Placement]]:
    """Placements for (targets, drafts): on GPUs where there are any, else `threads` cores each, in turn.

    Replicas share GPUs, equally, or cores only when there are fewer than replicas need.
    """
    total = targets + drafts
    if gpus:
        placements = [Placement(gpus=1.0 / -(-total // gpus)) for _ in range(total)]
    else:
        cores = sorted(os.sched_getaffinity(0))
        share = min(threads, len(cores))
        shares = [tuple(cores[(i * share + j) % len(cores)] for j in range(share)) for i in range(total)]
        placements = [Placement(cores=share, threads=threads) for share in shares]
    return placements[:targets], placements[targets:]
