"""A Backend over a Serve handle: what can happen to a replica becomes one of the few errors that a Backend raises."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster.intake import Closed, Overloaded
from deployments.service import ReplicaLost
from engine.types import GenerationRequest, TokenChunk

logger = logging.getLogger(__name__)
_READY_TIMEOUT_S = 2.0
_LOST = (
    RayActorError,
    ObjectLostError,
    WorkerCrashedError,
    ReplicaUnavailableError,
    TaskCancelledError,
    grpc.aio.AioRpcError,  # between replicas; Serve names only some of them
)


class ServeBackend:
    """Runs requests on the target replicas of a deployment; implements deployments.service.Backend."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        """handle: of a TargetDeployment."""
        self._handle = handle
        # Chunks over Serve's gRPC between replicas: as objects of Ray's each would cost much more.
        self._generate = handle.options(stream=True, _by_reference=False).generate

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See Backend."""
        response = cast(DeploymentResponseGenerator[TokenChunk], self._generate.remote(request))
        try:
            while True:
                chunk = await _next(response)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        except (GeneratorExit, asyncio.CancelledError):  # the reader goes away
            response.cancel()  # type: ignore[no-untyped-call]
            raise

    async def ready(self) -> bool:
        """Whether a replica is there and works. All are asked, beside their requests."""
        asked = self._handle.broadcast("check_health")
        try:
            answers = await asked.results_async(timeout_s=_READY_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return False
        return any(not isinstance(answer, BaseException) for answer in answers)


async def _next(response: DeploymentResponseGenerator[TokenChunk]) -> TokenChunk:
    """The next chunk; raises as Backend does."""
    try:
        chunk: TokenChunk = await anext(response)
    except StopAsyncIteration:
        raise ReplicaLost("the stream ended before its last chunk") from None
    except asyncio.CancelledError:
        if _cancelled():
            raise
        raise ReplicaLost("the replica cancelled the request") from None  # Serve makes the same error of that
    except BackPressureError as error:
        raise Overloaded(f"{error.args[1]} requests are waiting already") from None
    except DeploymentUnavailableError:
        raise Closed("the model could not be started") from None
    except _LOST as error:
        logger.info("a replica was lost: %s", type(error).__name__)
        raise ReplicaLost("the replica of this request is gone") from None
    except Closed as error:  # it is going away
        raise ReplicaLost(str(error)) from None
    except RayTaskError as error:  # how Ray brings what a replica raised; Serve's gRPC brings it as it is
        if isinstance(error.cause, Closed):
            raise ReplicaLost(str(error.cause)) from None
        raise error.cause from None
    return chunk


def _cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
