"""How vLLM runs a target, and the arguments of its engine that follow. Imports nothing slow, and not vLLM."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint import ModelError

# In vLLM's additional_config: our proposer is told of the draft services by its WorkerAccess, and they may change.
FOLLOWED = "paceline_follow"
# What `engine_args` may not say: it follows from other settings, or cluster.vllm_target needs it as it is.
_RESERVED = ("model", "dtype", "max_num_seqs", "tensor_parallel_size", "disable_log_stats")
_RESERVED_WITH_DRAFT = ("speculative_config", "worker_extension_cls", "additional_config")
_PROPOSER = "cluster.vllm_proposer.RemoteProposer"
_ACCESS = "cluster.vllm_proposer.WorkerAccess"
_MENDED = "cluster.vllm_mended_worker.MendedWorker"  # our proposer does the same


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM runs a target."""

    tensor_parallel_size: int = 1
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # for vllm.AsyncEngineArgs, beside what we set
    drafted: bool = False  # by our drafts; else alone, or as the engine_args' own speculative_config says
    draft_tokens: int = 5  # of our drafts, per request and step, at most


def check_options(options: VllmOptions) -> None:
    """What can be told without importing vLLM; raises ModelError, in one line."""
    reserved = _RESERVED + (_RESERVED_WITH_DRAFT if options.drafted else ())
    if taken := sorted(set(options.engine_args) & set(reserved)):
        raise ModelError(f"engine_args: {taken[0]} is set by Paceline")
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("the engine vllm is not installed: pip install -e '.[vllm]'")


def engine_arguments(model: Path, dtype: str, max_batch: int, options: VllmOptions) -> dict[str, Any]:
    """The arguments of vLLM's engine, by their names."""
    ours: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_num_seqs": max_batch,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": False,  # they are our metrics
    }
    if options.tensor_parallel_size > 1:  # in a Ray actor, vLLM would look for a placement group
        ours = {"distributed_executor_backend": "mp", **ours}
    if options.drafted:
        ours["speculative_config"] = {
            "method": "custom_class",
            "model": _PROPOSER,
            "num_speculative_tokens": options.draft_tokens,
        }
        ours |= {"worker_extension_cls": _ACCESS, "additional_config": {FOLLOWED: True}}
    return {"worker_extension_cls": _MENDED, **options.engine_args, **ours}
