"""HTTP/2 connections that carry the messages of gRPC's streams, both ends, by the h2 library.

One thread reads a connection; whoever sends writes to the socket itself. grpcio hands every message from thread to thread,
on the cores and under the lock that steps need, which took a fifth of a step of 2 ms (benchmarks/README.md). How messages
are framed: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from cluster.link import Pipe
from cluster.speculate import LinkOptions
from cluster.wire import MAX_MESSAGE_BYTES

Headers = dict[str, str]

OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 8, 12  # gRPC's status codes
_CONTENT_TYPE = ("content-type", "application/grpc")
_TIMEVAL = struct.Struct("ll")  # seconds and microseconds
_PREFIX = struct.Struct(">BI")  # before each message: whether it is compressed, its bytes
_WINDOW = 1024 * 1024  # bytes on their way to a reader that doesn't read, of a stream and of all
_READ_BYTES = 32 * 1024  # asked for at once: memory for much more would be mapped anew each time
_KEEPALIVE = bytes(8)  # what a ping says that only keeps the connection alive


class Handler(Protocol):
    """What a connection tells its owner, on the thread that reads it. Nothing of it may block."""

    def opened(self, stream: int, headers: Headers) -> None:
        """A request came, or the first headers of a response; of a refusal they are the last ones too."""

    def message(self, stream: int, data: bytes) -> None:
        """A message came."""

    def ended(self, stream: int, trailers: Headers) -> None:
        """The other end says no more in this stream, for the reason that the trailers give."""

    def lost(self) -> None:
        """The connection is gone, and all its streams with it: the last that is told."""


@dataclass(slots=True)
class _Stream:
    outgoing: Pipe = field(default_factory=Pipe)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))  # of the message that is being sent
    received: bytearray = field(default_factory=bytearray)  # of the message that is coming
    unacknowledged: int = 0  # bytes that came
    trailers: Headers = field(default_factory=dict)
    ending: Headers | None = None  # sent behind the last message


class Connection:
    """One end of a connection, alive until `close` or until the other end is gone. Its methods may be called anywhere."""

    def __init__(self, connected: socket.socket, handler: Handler, options: LinkOptions, client: bool) -> None:
        """Takes the socket over; `start` begins to read."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tick_s = min(options.keepalive_time_s, options.keepalive_timeout_s) / 2
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(tick_s), int(1e6 * (tick_s % 1))))
        self._socket = connected
        self._handler = handler
        self._options = options
        self._lock = threading.Lock()  # of all below
        self._h2 = H2Connection(H2Configuration(client_side=client, header_encoding="latin-1"))
        self._streams: dict[int, _Stream] = {}
        self._unsent = bytearray()
        self._pings: dict[bytes, threading.Event] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-link-reader", daemon=True)
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW})
        self._h2.increment_flow_control_window(_WINDOW)

    def start(self) -> None:
        """Begins to read. A handler may hear of `lost` from here on."""
        with self._lock:
            self._write()
        self._thread.start()

    def request(self, path: str, authority: str) -> int:
        """Opens a stream, before `start`; its number."""
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority)]
        with self._lock:
            stream = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream, [*headers, ("te", "trailers"), _CONTENT_TYPE])
            self._begin(stream)
        return stream

    def respond(self, stream: int, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Accepts a request: messages may follow. Nothing happens where the stream is gone."""
        with self._lock:
            if stream in self._streams:
                self._h2.send_headers(stream, [(":status", "200"), _CONTENT_TYPE, *headers])
                self._write()

    def refuse(self, stream: int, status: int, details: str) -> None:
        """Answers a request with an error, a code of gRPC's and a text in ASCII."""
        with self._lock:
            if self._streams.pop(stream, None) is not None:
                self._end(stream, {":status": "200", **dict([_CONTENT_TYPE]), **_status(status, details)})
                self._write()

    def outgoing(self, stream: int) -> Pipe:
        """What is put into it is sent. A pipe that leads nowhere where the stream is gone."""
        with self._lock:
            held = self._streams.get(stream)
        return held.outgoing if held is not None else Pipe()

    def finish(self, stream: int, status: int = OK, details: str = "") -> None:
        """Ends a response behind what its pipe holds."""
        with self._lock:
            held = self._streams.get(stream)
            if held is not None:
                held.ending = _status(status, details)
                self._write()

    def reset(self, stream: int) -> None:
        """Ends a stream at once."""
        with self._lock:
            if self._streams.pop(stream, None) is not None:
                self._h2.reset_stream(stream, ErrorCodes.CANCEL)
                self._write()

    def round_trip_s(self, timeout_s: float) -> float | None:
        """Seconds until a ping is answered; None when it is not in time. It blocks."""
        answered = threading.Event()
        started = time.monotonic()
        said = time.monotonic_ns().to_bytes(8)
        with self._lock:
            if self._closing:
                return None
            self._pings[said] = answered
            self._h2.ping(said)
            self._write()
        in_time = answered.wait(timeout_s)
        with self._lock:
            self._pings.pop(said, None)
        return time.monotonic() - started if in_time else None

    def close(self) -> None:
        """Ends the connection, and waits for its thread, but on that thread itself."""
        with self._lock:
            if not self._closing:
                self._h2.close_connection()
                self._flush()
                self._closing = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # ends what the thread waits for
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # sending; the lock is held

    def _begin(self, stream: int) -> None:
        self._streams[stream] = held = _Stream()
        held.outgoing.on_readable = self._pump

    def _pump(self) -> None:
        """Called, without the lock, by who puts something into a stream's pipe."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        """Sends as much as flow control and the socket take; the thread that reads goes on with the rest, when it hears that
        some of it was read, or after a while.
        """
        if self._closing:
            return
        self._flush()
        for stream, held in list(self._streams.items()):
            while not self._unsent and self._send_part(stream, held):
                self._flush()
        self._flush()

    def _send_part(self, stream: int, held: _Stream) -> bool:
        """A frame of a stream's messages, or its end; False where there is none, or no window for it."""
        if not held.rest:
            message = held.outgoing.take_now()
            if message is None:
                if held.ending is not None:
                    self._h2.send_headers(stream, list(held.ending.items()), end_stream=True)
                    held.ending = None
                    del self._streams[stream]
                return False
            held.rest = memoryview(_PREFIX.pack(0, len(message)) + message)
        room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
        if room <= 0:
            return False
        self._h2.send_data(stream, bytes(held.rest[:room]))
        held.rest = held.rest[room:]
        return True

    def _flush(self) -> None:
        self._unsent += self._h2.data_to_send()
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT) if self._unsent else 0
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)  # nobody will have it: the thread that reads finds out
        del self._unsent[:sent]

    def _end(self, stream: int, headers: Headers) -> None:
        """Says the last of a stream, of which no more is read."""
        self._h2.send_headers(stream, list(headers.items()), end_stream=True)
        with suppress(ProtocolError):  # the other end has ended it too
            self._h2.reset_stream(stream, ErrorCodes.NO_ERROR)

    # the thread that reads

    def _run(self) -> None:
        if self._options.cores:
            os.sched_setaffinity(0, self._options.cores)
        heard, pinged = time.monotonic(), False
        try:
            while not self._closing:
                limit_s = self._options.keepalive_timeout_s if pinged else self._options.keepalive_time_s
                if self._take():
                    heard, pinged = time.monotonic(), False
                elif time.monotonic() >= heard + limit_s:
                    if pinged:
                        break  # the other end is gone without a word
                    heard, pinged = time.monotonic(), True
                    self._ping()
        except (OSError, ProtocolError):
            pass  # it broke, or the other end speaks another protocol
        finally:
            self._give_up()

    def _ping(self) -> None:
        with self._lock:
            self._h2.ping(_KEEPALIVE)
            self._write()

    def _take(self) -> bool:
        """Waits for something, for a while; whether it came. Raises OSError when the connection is gone."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            data = None
        if data == b"":
            raise ConnectionResetError
        with self._lock:
            events = self._received(data) if data else []
            if self._unsent or not all(isinstance(event, DataReceived) for event in events):
                self._write()
        for event in events:
            self._tell(event)
        return data is not None

    def _received(self, data: bytes) -> list[Event]:
        """What the bytes say; nothing is sent any more where they say so."""
        try:
            events = self._h2.receive_data(data)
        except ProtocolError:
            self._closing = True
            self._flush()  # why
            raise
        for event in events:
            match event:
                case RequestReceived():
                    self._begin(event.stream_id)
                case DataReceived():
                    self._acknowledge(event.stream_id, event.flow_controlled_length)
                case StreamReset():
                    self._streams.pop(event.stream_id, None)
                case ConnectionTerminated():
                    self._closing = True
        return events

    def _acknowledge(self, stream: int, count: int) -> None:
        """So many bytes came: those of several messages are told of together."""
        held = self._streams.get(stream)
        if held is not None:
            held.unacknowledged += count
            if held.unacknowledged < _WINDOW // 64:  # so many streams may hold back as much
                return
            count, held.unacknowledged = held.unacknowledged, 0
        self._h2.acknowledge_received_data(count, stream)
        self._flush()

    def _tell(self, event: Event) -> None:
        match event:
            case RequestReceived() | ResponseReceived():
                self._handler.opened(event.stream_id, _readable(event.headers))
            case DataReceived():
                self._tell_messages(event.stream_id, event.data)
            case TrailersReceived():
                if held := self._streams.get(event.stream_id):
                    held.trailers = _readable(event.headers)
            case StreamEnded():
                held = self._streams.get(event.stream_id)
                self._handler.ended(event.stream_id, held.trailers if held else {})
            case StreamReset():
                self._handler.ended(event.stream_id, {})
            case PingAckReceived():
                with self._lock:
                    answered = self._pings.get(event.ping_data)
                if answered is not None:
                    answered.set()

    def _tell_messages(self, stream: int, data: bytes) -> None:
        held = self._streams.get(stream)
        if held is None:
            return  # reset, or refused
        held.received += data
        while len(held.received) >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(held.received)
            end = _PREFIX.size + size
            if compressed or size > MAX_MESSAGE_BYTES:
                self._reject(stream, RESOURCE_EXHAUSTED if size > MAX_MESSAGE_BYTES else UNIMPLEMENTED)
                return
            if len(held.received) < end:
                return
            message = bytes(memoryview(held.received)[_PREFIX.size : end])
            del held.received[:end]
            self._handler.message(stream, message)

    def _reject(self, stream: int, status: int) -> None:
        """Ends a stream whose messages are too long or compressed."""
        with self._lock:
            self._streams.pop(stream, None)
            if self._h2.config.client_side:
                self._h2.reset_stream(stream, ErrorCodes.CANCEL)
            else:
                self._end(stream, _status(status, "a message is too long or compressed"))
            self._write()
        self._handler.ended(stream, _status(status))

    def _give_up(self) -> None:
        with self._lock:
            self._closing = True
            self._socket.close()
            self._streams.clear()
        self._handler.lost()


def _readable(headers: object) -> Headers:
    return dict(cast(list[tuple[str, str]], headers))  # strings, as the connection is configured


def _status(status: int, details: str = "") -> Headers:
    return {"grpc-status": str(status), **({"grpc-message": details} if details else {})}
