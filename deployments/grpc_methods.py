"""The methods of the public gRPC service, as a server needs them: all that Ray Serve's gRPC proxy imports of Paceline.

The proxy routes each call to the ingress. Two things are done here because only the server can do them: a message beyond
the limit goes no further, and a call that ended is cancelled even while its client reads nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, cast

import grpc

from cluster.pb import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_REQUEST_BYTES = 4 << 20
MAX_UNREAD = 4096  # chunks that a slow reader may leave unread; its call ends beyond

_Stream = Callable[[Any, Any], AsyncIterator[Any]]


def add_generation_service(servicer: Any, server: Any) -> None:
    """Adds the service to a grpc.aio server, or to Ray Serve's proxy, which puts its own way to the ingress in place.

    Its `grpc_servicer_functions` take this as "deployments.grpc_methods:add_generation_service".
    """
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, request_deserializer=limited, response_serializer=pb.GenerateChunk.SerializeToString
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            servicer.ListModels,
            request_deserializer=limited,
            response_serializer=pb.ListModelsResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((_Methods(handlers),))


def limited(data: bytes) -> bytes:
    """A request as it came, or cut just beyond the limit: the ingress parses it, and says what is wrong with it."""
    return data[: MAX_REQUEST_BYTES + 1]


class _Methods(grpc.GenericRpcHandler):
    """Finds the handler of a call."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        # Ray Serve's proxy replaces the handlers under this name, which grpc's own class of this kind has.
        self._method_handlers = {f"/{SERVICE}/{name}": handler for name, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None or not handler.response_streaming:
            return handler
        return handler._replace(unary_stream=_apart(handler.unary_stream))


def _apart(serve: _Stream) -> _Stream:
    """The same stream, run in a task of its own that is cancelled as soon as the call ended.

    Else the end of a call is noticed only where the stream waits for its next piece, and never by one that waits for its
    client to read: it would run on to the end of the output.
    """

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        call = _Call(context)
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(_pump(serve(request, call), pieces, call))
        context.add_done_callback(lambda _: task.cancel())
        while (piece := await pieces.get()) is not None:
            yield piece
        await task

    return stream


class _Call:
    """A call's context for a task that may outlive the call by a moment."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()  # asking for it after the end would crash the process

    def peer(self) -> str:
        return str(self._peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _pump(source: AsyncIterator[Any], pieces: "asyncio.Queue[Any]", call: _Call) -> None:
    """Runs in a task of its own, which is cancelled where `source` waits: that is what stops the work."""
    try:
        with suppress(asyncio.CancelledError):  # the call ended: there is nobody left to tell
            async for piece in source:
                pieces.put_nowait(piece)
                if pieces.qsize() == MAX_UNREAD:
                    call.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
                    call.set_details("the reader fell behind")
                    cast("asyncio.Task[None]", asyncio.current_task()).cancel()
    finally:
        pieces.put_nowait(None)
