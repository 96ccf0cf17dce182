"""What vLLM says about its steps, as a target's statistics."""

import time
from typing import Any

from cluster.target_stats import TargetStats


class VllmCounts:
    """A stat logger of vLLM's, by its methods: `record` is called after each step, on the event loop's thread."""

    def __init__(self) -> None:
        self.stats = TargetStats()
        self.accepted_at: list[int] = []
        self.kv_share = 0.0  # of all blocks, that requests hold
        self.heard = time.monotonic()

    def record(self, scheduler: Any, iteration: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """scheduler: vLLM's SchedulerStats. iteration: its IterationStats, if anybody got something."""
        self.heard = time.monotonic()
        stats = self.stats
        if scheduler is not None:
            stats.running, stats.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            stats.shared += scheduler.prefix_cache_stats.hits + scheduler.prefix_cache_stats.preempted_hits
            self.kv_share = scheduler.kv_cache_usage
            if scheduler.spec_decoding_stats is not None:
                self._count_drafts(scheduler.spec_decoding_stats)
        if iteration is not None:
            stats.preempted += iteration.num_preempted_reqs
            stats.tokens += iteration.num_generation_tokens
            stats.decoded += iteration.num_generation_tokens - len(iteration.time_to_first_tokens_iter)
            stats.steps += bool(iteration.inter_token_latencies_iter)
            stats.sequence_steps += len(iteration.inter_token_latencies_iter)

    def _count_drafts(self, drafts: Any) -> None:
        """Of one step. A step with a draft is one that began with a hit, as near as vLLM tells."""
        self.stats.drafted += drafts.num_drafts
        self.stats.hits += drafts.num_drafts
        self.stats.verified += drafts.num_draft_tokens
        self.stats.accepted += drafts.num_accepted_tokens
        accepted = drafts.num_accepted_tokens_per_pos
        known = self.accepted_at or [0] * len(accepted)
        self.accepted_at = [before + now for before, now in zip(known, accepted, strict=True)]

    def log(self) -> None:
        """For vLLM."""

    def log_engine_initialized(self) -> None:
        """For vLLM."""
