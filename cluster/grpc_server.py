"""The draft's server of the one bidirectional stream; its clients are in `grpc_link` and `grpcio_link`.

Beside it, gRPC's health service (Check alone) and reflection, on the same port.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from cluster.http2 import Connection, Headers
from cluster.link import Link, LinkError, Pipe, PipeLink, close_pipes
from cluster.near import listen_near
from cluster.speculate import ACCEPTED, PADDING, PATH, SERVICE, VOCABULARY, LinkOptions
from cluster.wire import decode_down, encode_up
from engine.types import Down, Up

logger = logging.getLogger(__name__)
HEALTH = "grpc.health.v1.Health"
_SPARE = 16  # connections beside those of targets
_MOST_ASKED = 64 * 1024  # bytes of a message that asks for something else
_AGAIN_S = 0.05  # after a connection could not be accepted
M = TypeVar("M", bound=Message)


class DraftServer:
    """Serves the streams of targets from construction until `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        on_connect: Callable[[Link[Up, Down]], None],
        options: LinkOptions | None = None,
    ) -> None:
        """port: 0 chooses one. on_connect: gets each new stream's link on a thread that reads; must be quick.

        Raises LinkError when the port cannot be had.
        """
        self.options = options or LinkOptions()
        self.on_connect = on_connect
        self._serving = True
        self._changed = threading.Condition()  # of what follows
        self._streams = 0
        self._connections: set[_Served] = set()
        self._reflection = reflection.ReflectionServicer((SERVICE, HEALTH, reflection.SERVICE_NAME))
        # Methods that answer each message with one.
        self.answers = {
            f"/{HEALTH}/Check": self._check,
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": self._describe,
        }
        listener = listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listener.getsockname()[1]}"
        near = listen_near(self.address)
        self._listeners = [listener] if near is None else [listener, near]
        self._accepting = [
            threading.Thread(target=self._accept, args=[each], name="paceline-draft-listener", daemon=True)
            for each in self._listeners
        ]
        for thread in self._accepting:
            thread.start()

    def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more streams, gives those there are `grace_s` seconds to end, then ends them; waits for that."""
        self._serving = False
        for listener, thread in zip(self._listeners, self._accepting, strict=True):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: self._streams == 0, grace_s)
            connections = list(self._connections)
        for each in connections:
            each.connection.close()

    def admit(self) -> None:
        """Counts one more stream. Raises Refused when there are as many as there may be."""
        with self._changed:
            if not self._serving:
                raise Refused(StatusCode.UNAVAILABLE, "the draft is shutting down")
            if self._streams >= self.options.max_streams:
                limit = self.options.max_streams
                raise Refused(StatusCode.RESOURCE_EXHAUSTED, f"the draft has {limit} streams, its limit")
            self._streams += 1

    def stream_ended(self) -> None:
        """One stream less."""
        with self._changed:
            self._streams -= 1
            self._changed.notify_all()

    def connection_ended(self, served: "_Served") -> None:
        """One connection less."""
        with self._changed:
            self._connections.discard(served)

    def _accept(self, listener: socket.socket) -> None:
        while self._serving:
            try:
                connected, _ = listener.accept()
            except OSError:
                time.sleep(_AGAIN_S)  # it ends, or no file can be opened
                continue
            if len(self._connections) < self.options.max_streams + _SPARE:
                self._serve(connected)
            else:
                connected.close()
        listener.close()

    def _serve(self, connected: socket.socket) -> None:
        served = None
        try:
            served = _Served(self, connected)
            with self._changed:
                self._connections.add(served)
            served.connection.start()
        except (OSError, RuntimeError) as error:  # it broke already, or no thread can be started
            logger.warning("a connection is not served: %s", error)
            connected.close()
            if served is not None:
                self.connection_ended(served)

    def _check(self, data: bytes) -> bytes:
        service = _parsed(HealthCheckRequest, data).service
        if service not in ("", SERVICE):
            raise Refused(StatusCode.NOT_FOUND, "there is no such service")
        status = HealthCheckResponse.SERVING if self._serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status).SerializeToString()

    def _describe(self, data: bytes) -> bytes:
        request = _parsed(ServerReflectionRequest, data)
        unused = cast(grpc.ServicerContext, None)
        [response] = self._reflection.ServerReflectionInfo(iter([request]), unused)
        described: bytes = response.SerializeToString()
        return described


class Refused(Exception):
    """A request that gets an error, with a status and a text for it."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code: int = code.value[0]


def listen(host: str, port: int) -> socket.socket:
    """Raises LinkError when the port can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error  # a name that was not found
        raise LinkError(f"cannot listen on {host}:{port}: {reason}") from error


def _parsed(kind: type[M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Refused(StatusCode.INVALID_ARGUMENT, "not a protobuf message") from error
    return message


class _Served:
    """Implements Handler for one connection: a target's, or of somebody who asks for health or reflection."""

    def __init__(self, server: DraftServer, connected: socket.socket) -> None:
        self._server = server
        self._pipes: dict[int, tuple[Pipe, Pipe]] = {}  # outgoing and incoming, of streams with a link
        self._answers: dict[int, Callable[[bytes], bytes]] = {}  # of the other streams
        self.connection = Connection(connected, self, server.options, client=False)

    def opened(self, stream: int, headers: Headers) -> None:
        path = headers.get(":path", "")
        try:
            if path == PATH:
                self._check_vocabulary(headers.get(VOCABULARY, "0"))
                self._speculate(stream)
            elif path in self._server.answers:
                self._answers[stream] = self._server.answers[path]
                self.connection.respond(stream, most_bytes=_MOST_ASKED)
            else:
                raise Refused(StatusCode.UNIMPLEMENTED, "there is no such method")
        except Refused as refused:
            self.connection.refuse(stream, refused.code, str(refused))

    def message(self, stream: int, data: bytes) -> None:
        if pipes := self._pipes.get(stream):
            pipes[1].put([data])
        elif answer := self._answers.get(stream):
            try:
                self.connection.outgoing(stream).put([answer(data)])
            except Refused as refused:
                del self._answers[stream]
                self.connection.finish(stream, refused.code, str(refused))

    def ended(self, stream: int, trailers: Headers) -> None:
        self.connection.finish(stream)
        self._answers.pop(stream, None)
        pipes = self._pipes.pop(stream, None)
        if pipes is not None:
            self._server.stream_ended()
            close_pipes(*pipes)

    def lost(self) -> None:
        for stream in list(self._pipes):
            self.ended(stream, {})
        self._server.connection_ended(self)

    def _check_vocabulary(self, theirs: str) -> None:
        ours, told = self._server.options.vocab_size, int(theirs) if theirs.isascii() and theirs.isdigit() else 0
        if ours and told and abs(ours - told) > PADDING:
            sizes = f"the draft's vocabulary has {ours} tokens, the target's {told}"
            raise Refused(StatusCode.FAILED_PRECONDITION, f"{sizes}: name the target's --tokenizer, or another draft")

    def _speculate(self, stream: int) -> None:
        self._server.admit()
        outgoing, incoming = self.connection.outgoing(stream), Pipe()
        self._pipes[stream] = outgoing, incoming
        hang_up = partial(self._hang_up, stream)
        self._server.on_connect(PipeLink(encode_up, decode_down, outgoing, incoming, hang_up, self.connection))
        self.connection.respond(stream, [ACCEPTED])

    def _hang_up(self, stream: int) -> None:
        self.connection.reset(stream)
        if self._pipes.pop(stream, None) is not None:
            self._server.stream_ended()
