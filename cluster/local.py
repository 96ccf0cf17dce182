"""A whole cluster on this machine: Ray, a registry, targets and drafts. The demo, the CLI and the benchmarks use it."""

import logging
import os
import uuid
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any

import ray

from cluster.actors import DraftActor, TargetActor, TargetConfig
from cluster.drafters import DraftConfig
from cluster.placement import Placement, place
from cluster.registry import RegistryName
from engine.types import GenerationRequest, TokenChunk

# Serve's proxy then reads an ingress' streams over gRPC; as objects of Ray's, chunks take twice as much of a core. Its
# messages may have 256 MB, as long answers with log probabilities do, instead of 4.
SERVE_TRANSPORT = {"RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 28)}
# Of processes on several machines: when a machine is lost, packets to it vanish. What was sent and not acknowledged for so
# long breaks the connection, so that Serve sends it elsewhere; else it does so after two minutes.
MACHINE_LOSS = {"RAY_grpc_client_keepalive_timeout_ms": "5000"}
# Of the head: a machine is lost after three checks that failed, which are 3 to 15 s; else 15 to 65.
HEAD_LOSS_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
_START_TIMEOUT_S = 600.0  # models load and, the first time, loops are compiled: 2 minutes and more on two slow cores
_LINK_TIMEOUT_S = 120.0


class LocalCluster:
    """Targets and drafts as Ray actors, ready when the constructor returns; a context manager that ends them."""

    def __init__(
        self,
        target: TargetConfig,
        draft: DraftConfig | None,
        *,
        targets: int = 1,
        drafts: int = 1,
        placements: tuple[list[Placement], list[Placement]] | None = None,
        target_actor: type[TargetActor] = TargetActor,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """draft: None for a cluster without drafts. target_actor: one that can more. progress: told what is waited for."""
        drafts = drafts if draft is not None else 0
        progress("starting Ray")
        self._started_ray = start_ray()
        target_places, draft_places = placements or place(targets, drafts, count_gpus())
        registry = RegistryName(f"paceline-registry-{uuid.uuid4().hex}")
        self.registry: Any = registry.open()
        progress("loading the models (the first time, loops are compiled: a minute or two)")
        self.targets: list[Any] = [
            self._actor(target_actor, where).remote(target, where, registry, index)
            for index, where in enumerate(target_places)
        ]
        self.drafts: list[Any] = [
            self._actor(DraftActor, where).remote(draft, where, registry) for where in draft_places
        ]
        ray.get([actor.pid.remote() for actor in [*self.targets, *self.drafts]], timeout=_START_TIMEOUT_S)
        progress("linking targets and drafts")
        self.wait_linked(len(self.drafts))

    @staticmethod
    def _actor(cls: type, where: Placement) -> Any:
        """An actor class with its resources; it restarts when its process dies, and a call that hangs blocks no other."""
        threads = {"env_vars": {"OMP_NUM_THREADS": str(where.threads)}}
        return ray.remote(cls).options(
            max_restarts=-1, max_concurrency=256, runtime_env=threads, **{**where.ray_options(), "num_cpus": 0}
        )

    def wait_linked(self, drafts: int) -> None:
        """Blocks until every target has this many drafts; raises TimeoutError."""
        if not all(ray.get([target.wait_linked.remote(drafts, _LINK_TIMEOUT_S) for target in self.targets])):
            raise TimeoutError(f"a target did not find its {drafts} drafts")

    def stream(self, request: GenerationRequest, target: int = 0) -> Generator[TokenChunk]:
        """The chunks of one request. Closing the iterator cancels the request.

        Raises InvalidRequest, Overloaded or Closed, or RayActorError when the target dies: the request can be resumed
        on another one.
        """
        actor = self.targets[target]
        try:
            for reference in actor.generate.options(num_returns="streaming").remote(request):
                yield ray.get(reference)
        except (GeneratorExit, KeyboardInterrupt):
            with suppress(ray.exceptions.RayActorError):  # what is dead needs no cancelling
                ray.get(actor.cancel.remote(request.request_id))
            raise

    def close(self) -> None:
        """Ends all actors, and Ray if this started it."""
        for actor in [*self.targets, *self.drafts, self.registry]:
            ray.kill(actor)
        if self._started_ray:
            ray.shutdown()

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def start_ray() -> bool:
    """Starts Ray on this machine, without its dashboard, unless it runs already; whether it was started here."""
    if ray.is_initialized():
        return False
    os.environ.update({**SERVE_TRANSPORT, **os.environ})  # for the processes that Ray starts
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would announce that its tokens protect this cluster
    ray.init(
        address="local",  # whatever else runs here
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _system_config={
            "worker_niceness": 0,  # Ray's own processes would go before the models
            "prestart_worker_first_driver": False,  # for tasks; while it waits for some, it takes a hundredth of a core
        },
    )
    return True


def count_gpus() -> int:
    """GPUs that Ray knows of."""
    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
