"""The draft's server of the one bidirectional stream; its clients are in `grpc_link`."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.grpc_link import ACCEPTED, HEALTH, METHOD, SERVICE, LinkOptions, close_pipes
from cluster.link import Link, LinkError, Pipe, PipeLink
from cluster.wire import decode_down, encode_up
from engine.types import Down, Up

_SPARE_WORKERS = 16  # beside the streams: health, reflection, and telling a stream that it is refused


class DraftServer:
    """Serves the streams of targets, beside gRPC's health and reflection services, from construction until `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        on_connect: Callable[[Link[Up, Down]], None],
        options: LinkOptions | None = None,
    ) -> None:
        """port: 0 chooses one. on_connect: gets each new stream's link on one of gRPC's threads; must be quick.

        Raises LinkError when the port cannot be had.
        """
        self._options = options or LinkOptions()
        self._on_connect = on_connect
        self._lock = threading.Lock()
        self._streams = 0
        self._readers: set[threading.Thread] = set()
        workers = self._options.max_streams + _SPARE_WORKERS
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="paceline-stream")
        arguments = self._options.channel_arguments()
        self._server = grpc.server(self._pool, options=arguments, maximum_concurrent_rpcs=workers)
        self._health = self._add_services()
        self.address = self._bind(f"[{host}]" if ":" in host else host, port)
        self._server.start()

    def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more streams, gives those there are `grace_s` seconds to end, then ends them; waits for that."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s or None).wait()
        self._pool.shutdown()
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join()

    def _add_services(self) -> health.HealthServicer:
        # No serializers: bytes in, bytes out.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._speculate)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])
        servicer = health.HealthServicer()
        for name in ("", SERVICE):
            servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        return servicer

    def _bind(self, host: str, port: int) -> str:
        try:
            return f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        except RuntimeError as error:
            self._server.stop(0)
            self._pool.shutdown()
            raise LinkError(f"cannot listen on {host}:{port}: {error}") from error

    def _speculate(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream: runs on one of the pool's threads until it ends, feeding what the link sends."""
        self._admit(context)
        incoming, outgoing = Pipe(), Pipe()
        reader = threading.Thread(target=self._read, args=(requests, incoming), name="paceline-draft-reader")

        def ended() -> None:
            with self._lock:
                self._streams -= 1
            close_pipes(outgoing, incoming)

        if not context.add_callback(ended):  # it ended already
            ended()
            return
        with self._lock:
            self._readers.add(reader)
        reader.start()
        self._on_connect(PipeLink(encode_up, decode_down, outgoing, incoming, hang_up=context.cancel))
        context.send_initial_metadata(ACCEPTED)
        yield from iter(outgoing.take, None)

    def _admit(self, context: grpc.ServicerContext) -> None:
        limit = self._options.max_streams
        with self._lock:
            admitted = self._streams < limit
            self._streams += admitted
        if not admitted:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the draft has {limit} streams, its limit")

    def _read(self, requests: Iterator[bytes], incoming: Pipe) -> None:
        try:
            for data in requests:
                incoming.put([data])
        except grpc.RpcError:
            pass  # the stream broke: `ended` closes the pipes
        finally:
            with self._lock:
                self._readers.discard(threading.current_thread())
