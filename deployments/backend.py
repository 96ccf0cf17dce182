"""A Backend over a Serve handle: what can happen to a replica becomes one of the few errors that a Backend raises."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster.intake import Closed, Overloaded
from deployments.service import ReplicaLost
from engine.types import GenerationRequest, TokenChunk

logger = logging.getLogger(__name__)
SIGN_S = 1.0  # a replica that has nothing to say for so long says that it is there
MISSED_SIGNS = 5  # before a replica is taken for lost
_READY_TIMEOUT_S = 2.0
_LOST = (
    RayError,
    ReplicaUnavailableError,
    grpc.aio.AioRpcError,  # between replicas; Serve names only some of them
)
_UNEXPECTED = "Unexpected error ("  # Serve's, of a call that ended before its replica had said whether it takes it


class ServeBackend:
    """Runs requests on the target replicas of a deployment; implements deployments.service.Backend."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        """handle: of a TargetDeployment."""
        self._handle = handle
        # Chunks over Serve's gRPC between replicas: as objects of Ray's each would cost much more.
        self._generate = handle.options(stream=True, _by_reference=False).generate

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See Backend."""
        response = cast(DeploymentResponseGenerator[TokenChunk], self._generate.remote(request, SIGN_S))
        listener = Listener(response)
        try:
            while True:
                chunk = await listener.next()
                if chunk.tokens or chunk.finish_reason is not None:  # else it was a sign of life
                    yield chunk
                if chunk.finish_reason is not None:
                    return
        except (GeneratorExit, asyncio.CancelledError):  # the reader goes away
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        finally:
            listener.close()

    async def ready(self) -> bool:
        """Whether a replica is there and works. All are asked, beside their requests; the first good answer counts."""
        asked = self._handle.broadcast("check_health")
        answers: list[asyncio.Task[bool]] = []
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                # Not `results_async`, which waits for all of them: one may be on a machine that is lost.
                replicas = await asked._fetch_replica_results_async()
                answers += [asyncio.create_task(_is_well(replica)) for replica in replicas]
                for answer in asyncio.as_completed(answers):
                    if await answer:
                        return True
        except (DeploymentUnavailableError, TimeoutError):
            pass
        finally:
            for task in answers:
                task.cancel()
        return False


async def _is_well(replica: Any) -> bool:
    """Whether a replica answers its health check, and well. replica: Serve's result of the call."""
    try:
        await replica.get_async()
    except RayError:  # what the check raised, or that the replica is gone
        return False
    return True


class Listener:
    """Reads a response, and gives it up when its replica, once heard, falls silent.

    Where packets vanish, no connection breaks by itself. It counts its own looks rather than time: when this process had no
    turn for long, that is not the replica's silence. While a request waits in Serve, there is nobody to be heard yet.
    """

    def __init__(self, response: DeploymentResponseGenerator[TokenChunk], sign_s: float = SIGN_S) -> None:
        """sign_s: how often the replica gives a sign of life at least."""
        self._response, self._sign_s = response, sign_s
        self._listening = False  # a slow client keeps us from it
        self._looks = 0  # since something was heard
        self._next_look: asyncio.TimerHandle | None = None

    async def next(self) -> TokenChunk:
        """The next chunk, empty ones included; raises as Backend does."""
        self._listening = True
        try:
            chunk = await _next(self._response)
        finally:
            self._listening = False
        self._looks = 0
        if self._next_look is None:
            self._look_later()
        return chunk

    def close(self) -> None:
        """The response has ended."""
        if self._next_look is not None:
            self._next_look.cancel()

    def _look_later(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(self._sign_s, self._look)

    def _look(self) -> None:
        self._looks += self._listening
        if self._looks > MISSED_SIGNS:
            logger.warning(
                "a replica has been silent for %g s: its stream goes on elsewhere", self._sign_s * self._looks
            )
            self._response.cancel()  # type: ignore[no-untyped-call]
        else:
            self._look_later()


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
    except Closed as error:  # it is going away
        raise ReplicaLost(str(error)) from None
    except RayTaskError as error:  # how Ray brings what a replica raised; Serve's gRPC brings it as it is
        if isinstance(error.cause, Closed):
            raise ReplicaLost(str(error.cause)) from None
        raise error.cause from None
    except _LOST as error:
        logger.warning("a replica was lost: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        raise ReplicaLost("the replica of this request is gone") from None
    except RuntimeError as error:
        if type(error) is not RuntimeError or not str(error).startswith(_UNEXPECTED):
            raise  # what the replica said itself
        logger.warning("a replica was lost: %s", error)
        raise ReplicaLost("the replica of this request is gone") from None
    return chunk


def _cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
