"""Links over gRPC: the target's client of the one bidirectional stream. The draft's server is in `grpc_server`.

gRPC's threads only move bytes between the stream and the pipes of a link; the owner's thread encodes and decodes them.
Each end pings the other when the stream is silent, so that a peer that vanished is noticed within 3 seconds.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from cluster.link import LinkError, Pipe, PipeLink
from cluster.pb import draft_pb2 as pb
from cluster.wire import MAX_MESSAGE_BYTES, decode_up, encode_down
from engine.types import Down, Up

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
METHOD = "Speculate"
MAX_STREAMS = 64  # targets on one draft replica
HEALTH = "grpc.health.v1.Health"
ACCEPTED = (("paceline-stream", "accepted"),)  # initial metadata of a stream that a link stands behind


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Limits of gRPC links; both ends of a link need the same keepalive."""

    max_streams: int = MAX_STREAMS
    keepalive_time_s: float = 1.0  # silence before a ping
    keepalive_timeout_s: float = 1.5  # from a ping until the link is dead

    def channel_arguments(self) -> list[tuple[str, int]]:
        """The same for client and server: a peer that pings more often than the other allows is cut off."""
        time_ms, timeout_ms = round(1000 * self.keepalive_time_s), round(1000 * self.keepalive_timeout_s)
        return [
            ("grpc.keepalive_time_ms", time_ms),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            ("grpc.http2.ping_timeout_ms", timeout_ms),  # else a ping may go unanswered for a minute
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),  # no limit
            ("grpc.http2.min_ping_interval_without_data_ms", time_ms // 2),
            ("grpc.http2.max_ping_strikes", 0),  # no limit
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # two servers on one port would share its streams by chance
            ("grpc.use_local_subchannel_pool", 1),  # a connection per link
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),  # a stream that broke is a dead link
            ("grpc.initial_reconnect_backoff_ms", 100),  # while connecting to a server that is just starting
            ("grpc.max_reconnect_backoff_ms", 500),
        ]


class ClientLink(PipeLink[Down, Up]):
    """The target's end of a stream."""

    def __init__(self, outgoing: Pipe, incoming: Pipe, hang_up: Callable[[], object], channel: grpc.Channel) -> None:
        super().__init__(encode_down, decode_up, outgoing, incoming, hang_up)
        # No serializers: bytes out, bytes in.
        self._check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{HEALTH}/Check")

    def round_trip_s(self, timeout_s: float) -> float | None:
        """Seconds until a call beside the stream, on the same connection, is answered; None when it is not in time.

        May be called from any thread; it blocks.
        """
        started = time.monotonic()
        try:
            self._check(b"", timeout=timeout_s)
        except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
            return None
        return time.monotonic() - started


def connect(address: str, timeout_s: float, options: LinkOptions | None = None) -> ClientLink:
    """The target's end of a new stream to the draft server at `address` ("host:port"); waits for a server that starts.

    Raises LinkError when the stream is refused, or not accepted within `timeout_s` seconds.
    """
    return _Client(address, options or LinkOptions()).open(timeout_s)


class _Client:
    """What stands behind a target's link: a channel with one call, and the thread that reads from it."""

    def __init__(self, address: str, options: LinkOptions) -> None:
        self._address = address
        self._incoming, self._outgoing = Pipe(), Pipe()
        self._channel = grpc.insecure_channel(address, options=options.channel_arguments())
        # No serializers: bytes out, bytes in.
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = method(iter(self._outgoing.take, None), wait_for_ready=True)
        self._settled = threading.Event()  # accepted, or failed for good
        self._accepted = False
        self._reader = threading.Thread(target=self._read, name="paceline-target-reader")
        self._reader.start()

    def open(self, timeout_s: float) -> ClientLink:
        self._settled.wait(timeout_s)
        if self._accepted:
            return ClientLink(self._outgoing, self._incoming, self._hang_up, self._channel)
        settled = self._settled.is_set()
        self._hang_up()
        reason = f"{self._call.code().name}: {self._call.details()}" if settled else f"no answer within {timeout_s:g} s"
        raise LinkError(f"cannot connect to the draft at {self._address}: {reason}")

    def _read(self) -> None:
        try:
            self._accepted = any(item in ACCEPTED for item in self._call.initial_metadata())
            if self._accepted:
                self._settled.set()
            for data in self._call:
                self._incoming.put([data])
        except grpc.RpcError:
            pass  # refused, broken or cancelled: the code and details stay with the call
        finally:
            close_pipes(self._outgoing, self._incoming)
            self._settled.set()
            self._channel.close()  # a dead link holds nothing, closed or not

    def _hang_up(self) -> None:
        self._call.cancel()
        if threading.current_thread() is not self._reader:  # it is when a notify closes the link
            self._reader.join()


def close_pipes(outgoing: Pipe, incoming: Pipe) -> None:
    """Outgoing first: when closing `incoming` wakes the owner, the link reads as dead already."""
    outgoing.close()
    incoming.close()
