"""A target's end of the stream by grpcio, for the environment of an engine that brings grpcio and not h2: vLLM's.

Our own targets use `grpc_link`: grpcio's threads cost more. They only move bytes between the stream and the pipes of a link;
the owner's thread encodes and decodes them.
"""

import threading

import grpc

from cluster.link import Link, LinkError, Pipe, PipeLink, close_pipes
from cluster.speculate import ACCEPTED, PATH, VOCABULARY, LinkOptions
from cluster.wire import MAX_MESSAGE_BYTES, decode_up, encode_down
from engine.types import Down, Up


def _arguments(options: LinkOptions) -> list[tuple[str, int]]:
    time_ms, timeout_ms = round(1000 * options.keepalive_time_s), round(1000 * options.keepalive_timeout_s)
    return [
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # else a ping may go unanswered for a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),  # a connection per link
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # a stream that broke is a dead link
        ("grpc.initial_reconnect_backoff_ms", 100),  # while connecting to a server that is just starting
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def connect(address: str, timeout_s: float, options: LinkOptions | None = None) -> Link[Down, Up]:
    """The target's end of a new stream to the draft server at `address` ("host:port"); waits for a server that starts.

    Raises LinkError when the stream is refused, or not accepted within `timeout_s` seconds.
    """
    return _Client(address, options or LinkOptions()).open(timeout_s)


class _Client:
    """What stands behind a target's link: a channel with one call, and the thread that reads from it."""

    def __init__(self, address: str, options: LinkOptions) -> None:
        self._address = address
        self._incoming, self._outgoing = Pipe(), Pipe()
        self._channel = grpc.insecure_channel(address, options=_arguments(options))
        # No serializers: bytes out, bytes in.
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(PATH)
        told = ((VOCABULARY, str(options.vocab_size)),)
        self._call = method(iter(self._outgoing.take, None), wait_for_ready=True, metadata=told)
        self._settled = threading.Event()  # accepted, or failed for good
        self._accepted = False
        self._reader = threading.Thread(target=self._read, name="paceline-target-reader", daemon=True)
        self._reader.start()

    def open(self, timeout_s: float) -> Link[Down, Up]:
        self._settled.wait(timeout_s)
        if self._accepted:
            return PipeLink(encode_down, decode_up, self._outgoing, self._incoming, self._hang_up)
        settled = self._settled.is_set()
        self._hang_up()
        reason = f"{self._call.code().name}: {self._call.details()}" if settled else f"no answer within {timeout_s:g} s"
        raise LinkError(f"cannot connect to the draft at {self._address}: {reason}")

    def _read(self) -> None:
        try:
            self._accepted = any(tuple(item) == ACCEPTED for item in self._call.initial_metadata())
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
