"""vLLM as the engine of a target replica, for the tests that need it."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch

from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.grpc_server import DraftServer
from cluster.placement import Placement
from cluster.vllm_options import VllmOptions
from cluster.vllm_target import VllmTarget
from engine.attention import chain_rows
from engine.runner import ModelRunner
from engine.sampling import restrict
from engine.types import GenerationRequest, SamplingParams, TokenChunk
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, until

STREAMS = 4
_numbers = count()  # of requests that warm up
# So few tokens in a step that prompts which come together are read in several.
ENGINE_ARGS = {
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
}


@dataclass(frozen=True)
class Pair:
    """vLLM with our draft."""

    target: VllmTarget
    draft: DraftReplica
    address: str

    def follow(self, *addresses: str) -> None:
        """Until these drafts are linked; of none, links that stand are ended."""

        def linked() -> bool:
            self.target.follow(addresses or None)
            return self.target.stats().drafts == len(addresses)

        until(linked, "vLLM has the drafts that it was told of")


@contextmanager
def alone(options: VllmOptions, cores: tuple[int, ...] = ()) -> Iterator[VllmTarget]:
    """A target that runs vLLM in fp32, audited at the end."""
    target = VllmTarget(exact.TARGET, "float32", STREAMS, 0.0, options, Placement(cores))
    try:
        yield target
        assert target.wait_idle(PATIENCE_S)
        target.check()
    finally:
        target.close()
    assert not target.alive


@contextmanager
def drafted(tensor_parallel_size: int = 1, cores: tuple[int, ...] = ()) -> Iterator[Pair]:
    """The same with a draft of ours, warmed up as where it is served."""
    config = DraftConfig(exact.DRAFT, "float32", chains=True)
    replica = DraftReplica(make_drafter(config, Placement()))
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    try:
        with alone(VllmOptions(tensor_parallel_size, ENGINE_ARGS, drafted=True), cores) as target:
            made = Pair(target, replica, server.address)
            made.follow(server.address)
            until(lambda: verified(target), "drafts come: both sides have compiled their loops")
            yield made
    finally:
        server.stop()
        replica.close()


def verified(target: VllmTarget) -> bool:
    """Whether it ever had drafts to verify; a short request may be the one that does."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    run(target, [GenerationRequest(f"warm-{next(_numbers)}", (1, 2), params)])
    return target.stats().verified > 0


def likelihood_z(
    runner: ModelRunner, prompts: Sequence[exact.Tokens], texts: Sequence[Sequence[int]], params: SamplingParams
) -> float:
    """The z-score of the drawn tokens' log probabilities against what they are on average under these parameters."""
    excess = variance = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        known = [*prompt, *text]
        lease = runner.pool.lease(len(known))
        logits = runner.forward([chain_rows(lease, 0, known[:-1], len(prompt) - 1)])
        runner.pool.release(lease)
        logprobs = restrict(logits.double() / params.temperature, params).log_softmax(-1)
        shares, finite = logprobs.exp(), logprobs.clamp_min(-1e3)  # 0 times infinity is 0 here
        mean = (shares * finite).sum(-1)
        variance += float(((shares * finite**2).sum(-1) - mean**2).sum())
        excess += float((logprobs.gather(-1, torch.tensor(text)[:, None])[:, 0] - mean).sum())
    return excess / math.sqrt(variance)


def run(target: VllmTarget, requests: Sequence[GenerationRequest]) -> list[list[TokenChunk]]:
    """The chunks of each request, all at the same time."""
    chunks: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
    left = {request.request_id for request in requests}
    ended = threading.Event()

    def sink(chunk: TokenChunk) -> None:
        chunks[chunk.request_id].append(chunk)
        if chunk.finish_reason is not None:
            left.discard(chunk.request_id)
        if not left:
            ended.set()

    for request in requests:
        target.submit(request, sink)
    assert ended.wait(PATIENCE_S), f"{left} did not end"
    return list(chunks.values())


def tokens(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]
