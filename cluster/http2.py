"""HTTP/2 connections that carry the messages of gRPC's streams, both ends, by the h2 library but for the messages' frames.

Whoever sends writes to the socket itself, and whoever wants messages often reads it; a thread does so where nobody does.
grpcio hands every message from thread to thread, on the cores and under the lock that steps need, which took a fifth of a
step of 2 ms; a thread of ours that reads took another twelfth (benchmarks/README.md). How messages are framed:
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import logging
import os
import select
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

from cluster.frames import CONNECTION, FIRST_WINDOW, Data, Frames, Grant, data_frame, grant_frame
from cluster.link import Pipe
from cluster.speculate import LinkOptions
from cluster.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)
Headers = dict[str, str]

OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 8, 12  # gRPC's status codes
_ACCEPTED = ((":status", "200"), ("content-type", "application/grpc"))
_PREFIX = struct.Struct(">BI")  # before each message: whether it is compressed, its bytes
_STREAMS = 32  # of one connection, at a time
_WINDOW = 1024 * 1024  # bytes that may come before they are acknowledged, of a stream and of all together
_ACKNOWLEDGED = _WINDOW // (2 * _STREAMS)  # bytes of a stream that are acknowledged together
_MOST_UNSENT = 1024 * 1024  # bytes for somebody who doesn't read; messages wait in their pipes
_FULL_READS = 32  # at most, one after the other, for who reads on a thread of its own
_READ_BYTES = 32 * 1024  # asked for at once: memory for much more would be mapped anew each time
_ATTENDED_S = 0.1  # so long after somebody read, or up to twice as long, the thread leaves reading to him
_KEEPALIVE = bytes(8)  # what a ping says that only keeps the connection alive


class Handler(Protocol):
    """What a connection tells its owner, on the thread that reads it just then. Nothing of it may block."""

    def opened(self, stream: int, headers: Headers) -> None:
        """A request came, or the first headers of a response; of a refusal they are the last ones too."""

    def message(self, stream: int, data: bytes) -> None:
        """A message came."""

    def ended(self, stream: int, trailers: Headers) -> None:
        """The other end says no more in this stream, for the reason that the trailers give. It may be told twice."""

    def lost(self) -> None:
        """The connection is gone, and all its streams with it: the last that is told."""


@dataclass(slots=True)
class _Stream:
    speaks: bool  # whether messages may be sent
    most_bytes: int  # of a message that comes
    outgoing: Pipe = field(default_factory=Pipe)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))  # of the message that is being sent
    received: bytearray = field(default_factory=bytearray)  # of the message that is coming
    unacknowledged: int = 0  # bytes that came
    sent: int = 0  # bytes of messages
    granted: int = 0  # bytes that may be sent beside those of the first window
    trailers: Headers = field(default_factory=dict)
    ending: Headers | None = None  # sent behind the last message


class Connection:
    """One end of a connection, alive until `close` or until the other end is gone. Its methods may be called anywhere.

    Once it is closed, they do nothing.
    """

    def __init__(self, connected: socket.socket, handler: Handler, options: LinkOptions, client: bool) -> None:
        """Takes the socket over; `start` begins to read."""
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket = connected
        self._handler = handler
        self._options = options
        self._lock = threading.Lock()  # of all below
        self._h2 = H2Connection(H2Configuration(client_side=client, header_encoding="latin-1"))
        self._frames = Frames(client)
        self._streams: dict[int, _Stream] = {}
        self._room = FIRST_WINDOW  # bytes of messages that may be sent in all streams together
        self._unsent = bytearray()
        self._pings: dict[bytes, threading.Event] = {}
        self._closing = False
        self._gone = False
        self._reading = threading.Lock()  # held while bytes are read and told of; of the locks, it is taken first
        self._reader = 0  # the thread that holds it
        self._attended = False  # somebody called `read` since the thread looked
        self._heard = 0.0  # when something came last, by the monotonic clock
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="paceline-link-reader", daemon=True)
        self._h2.initiate_connection()
        limits = {SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW, SettingCodes.MAX_CONCURRENT_STREAMS: _STREAMS}
        self._h2.update_settings(cast(dict[SettingCodes | int, int], limits))
        self._h2.increment_flow_control_window(_WINDOW)

    def start(self) -> None:
        """Begins to read. A handler may hear of `lost` from here on. Raises RuntimeError where no thread can be started."""
        with self._lock:
            self._write()
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had: nothing was begun
            self._closing = self._gone = True
            os.close(self._wakes)
            raise

    def request(self, path: str, authority: str, more: Sequence[tuple[str, str]] = ()) -> int:
        """Opens a stream, before `start`; its number. more: headers."""
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority)]
        with self._lock:
            stream = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream, [*headers, ("te", "trailers"), _ACCEPTED[1], *more])
            self._begin(stream, speaks=True, most_bytes=MAX_MESSAGE_BYTES)
        return stream

    def respond(
        self, stream: int, headers: Sequence[tuple[str, str]] = (), most_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """Accepts a request: messages may follow, of at most so many bytes from the other end."""
        with self._lock:
            held = self._streams.get(stream)
            if held is not None and not self._closing:
                try:
                    self._h2.send_headers(stream, [*_ACCEPTED, *headers])
                except ProtocolError:  # the other end has reset it, which is told next
                    return
                held.speaks, held.most_bytes = True, most_bytes
                self._write()

    def refuse(self, stream: int, status: int, details: str) -> None:
        """Answers a request with an error, a code of gRPC's and a text in ASCII."""
        with self._lock:
            if not self._closing and self._drop(stream):
                self._end(stream, dict(_ACCEPTED) | _status(status, details))
                self._write()

    def outgoing(self, stream: int) -> Pipe:
        """What is put into it is sent, once the stream is accepted. A pipe that leads nowhere where the stream is gone."""
        with self._lock:
            held = self._streams.get(stream)
        return held.outgoing if held is not None else Pipe()

    def finish(self, stream: int, status: int = OK, details: str = "") -> None:
        """Ends a response behind what its pipe holds; the first status counts."""
        with self._lock:
            held = self._streams.get(stream)
            if held is not None and held.ending is None:
                held.ending = _status(status, details)
                self._write()

    def reset(self, stream: int) -> None:
        """Ends a stream at once."""
        with self._lock:
            if not self._closing and self._drop(stream):
                with suppress(ProtocolError):  # the other end was faster
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
            return time.monotonic() - started if in_time and not self._closing else None

    def fileno(self) -> int:
        """The file that is readable when `read` brings something; -1 once the connection is gone."""
        return self._socket.fileno()

    def read(self) -> None:
        """Takes in what came, on this thread, for those who would else wait for another to do so. It waits for nothing."""
        self._attended = True
        if not self._closing:
            try:
                for _ in range(_FULL_READS):
                    if not self._take(blocking=False):
                        break
            except Exception as error:  # it ends the connection, as on its thread, not who reads it
                if not isinstance(error, (OSError, ProtocolError)):
                    logger.exception("a connection failed")
                with self._lock:
                    self._no_more()

    def close(self) -> None:
        """Ends the connection, and waits for its thread, but where a handler calls."""
        with self._lock:
            if not self._closing:
                self._h2.close_connection()
                self._flush()
            self._no_more()
        if threading.get_ident() not in (self._thread.ident, self._reader):
            self._thread.join()

    # sending; the lock is held

    def _no_more(self) -> None:
        """The thread gives up, and nothing is sent any more."""
        self._closing = True
        if not self._gone:
            os.eventfd_write(self._wakes, 1)

    def _begin(self, stream: int, speaks: bool, most_bytes: int) -> None:
        self._streams[stream] = held = _Stream(speaks, most_bytes)
        held.outgoing.on_readable = self._pump

    def _drop(self, stream: int) -> bool:
        """Forgets a stream; whether there was one. Its bytes count no longer among those that are on their way."""
        held = self._streams.pop(stream, None)
        if held is not None and held.unacknowledged:
            self._unsent += grant_frame(CONNECTION, held.unacknowledged)
        return held is not None

    def _pump(self) -> None:
        """Called, without the lock, by who puts something into a stream's pipe."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        """Sends as much as flow control and the socket take. With the rest of it, the thread that reads goes on."""
        if self._closing:
            return
        if self._unsent:
            self._flush()
        for stream, held in list(self._streams.items()):
            while held.speaks and not self._unsent and self._send_part(stream, held):
                self._flush()
        if not self._unsent:
            self._flush()

    def _send_part(self, stream: int, held: _Stream) -> bool:
        """A frame of a stream's messages, or its end; False where there is none, or no window for it."""
        if not held.rest:
            message = held.outgoing.take_now()
            if message is None:
                if held.ending is not None:
                    self._drop(stream)
                    self._h2.send_headers(stream, list(held.ending.items()), end_stream=True)
                return False
            held.rest = memoryview(_PREFIX.pack(0, len(message)) + message)
        window = self._h2.remote_settings.initial_window_size + held.granted - held.sent
        room = min(window, self._room, self._h2.max_outbound_frame_size)
        if room <= 0:
            return False
        part = held.rest[:room]
        held.rest = held.rest[room:]
        held.sent += len(part)
        self._room -= len(part)
        self._unsent += self._h2.data_to_send()  # what was said before
        self._unsent += data_frame(stream, part)
        return True

    def _flush(self) -> None:
        self._unsent += self._h2.data_to_send()
        if not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self._unsent)  # nobody will have it: the thread that reads finds out
        del self._unsent[:sent]
        if self._unsent and threading.current_thread() is not self._thread:
            os.eventfd_write(self._wakes, 1)  # that thread goes on with it

    def _end(self, stream: int, headers: Headers) -> None:
        """Says the last of a stream, of which no more is read."""
        with suppress(ProtocolError):  # the other end has ended it too
            self._h2.send_headers(stream, list(headers.items()), end_stream=True)
            self._h2.reset_stream(stream, ErrorCodes.NO_ERROR)

    # the thread

    def _run(self) -> None:
        try:
            if self._options.cores:
                with suppress(OSError):  # where there are no such cores, any will do
                    os.sched_setaffinity(0, self._options.cores)
            self._watch()
        except (OSError, ProtocolError):
            pass  # it broke, or the other end speaks another protocol
        finally:
            self._give_up()

    def _watch(self) -> None:
        """Reads until the connection is closed, or nothing comes although it was asked for."""
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        self._heard = asked = time.monotonic()
        while not self._closing:
            attended, self._attended = self._attended, False
            wanted = select.POLLOUT if self._unsent else 0
            poll.modify(self._socket, wanted if attended else wanted | select.POLLIN)
            waits = asked > self._heard
            since, limit_s = max(asked, self._heard), self._options.keepalive_time_s
            left_s = since + (self._options.keepalive_timeout_s if waits else limit_s) - time.monotonic()
            ready = dict(poll.poll(1000 * max(0.0, min(left_s, _ATTENDED_S) if attended else left_s)))
            if ready.pop(self._wakes, 0):
                os.eventfd_read(self._wakes)
            if ready or left_s <= 0:  # the time may be over because this thread waited for its turn
                self._take()
            if left_s <= 0 and self._heard <= since:
                if waits:
                    return  # the other end is gone without a word
                asked = time.monotonic()
                self._ping()

    def _ping(self) -> None:
        with self._lock:
            if not self._closing:
                self._h2.ping(_KEEPALIVE)
                self._write()

    # reading

    def _take(self, blocking: bool = True) -> bool:
        """Reads and writes what can be, unless another thread does so; whether more may have come.

        Raises OSError when the connection is gone.
        """
        if not self._reading.acquire(blocking):
            return False
        self._reader = threading.get_ident()
        try:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                if self._unsent:
                    self._pump()
                return False
            if not data:
                raise ConnectionResetError
            self._heard = time.monotonic()
            with self._lock:
                parts = self._frames.split(data)
                told = [each for part in parts for each in self._received(part)]
                if self._unsent or not all(isinstance(part, Data) for part in parts):
                    self._write()  # there may be room for it now
                else:
                    self._flush()
                if len(self._unsent) > _MOST_UNSENT:
                    raise ConnectionAbortedError
            for each in told:
                self._tell(each)
            return len(data) == _READ_BYTES and not self._closing
        finally:
            self._reader = 0
            self._reading.release()

    def _received(self, part: Data | Grant | bytes) -> Sequence[Data | Event]:
        """What is told of a part of what came."""
        match part:
            case Data(stream, body) if stream in self._streams:
                self._acknowledge(stream, len(body))
                return (part,)
            case Data(stream, body):
                return self._received_by_h2(data_frame(stream, body))
            case Grant(stream, count):
                if stream == CONNECTION:
                    self._room += count
                elif held := self._streams.get(stream):
                    held.granted += count
                return ()
            case _:
                return self._received_by_h2(part)

    def _received_by_h2(self, data: bytes) -> list[Event]:
        """What the bytes say; nothing is sent any more where they say so."""
        try:
            events = self._h2.receive_data(data)
        except ProtocolError:
            self._flush()  # why
            self._no_more()
            raise
        for event in events:
            match event:
                case RequestReceived():
                    self._begin(event.stream_id, speaks=False, most_bytes=0)
                case DataReceived():
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case StreamReset():
                    if held := self._streams.get(event.stream_id):
                        held.speaks = False
                case ConnectionTerminated():
                    self._no_more()
        return events

    def _acknowledge(self, stream: int, count: int) -> None:
        """So many bytes came: those of several messages are told of together."""
        held = self._streams[stream]
        held.unacknowledged += count
        if held.unacknowledged >= _ACKNOWLEDGED:
            self._unsent += grant_frame(CONNECTION, held.unacknowledged) + grant_frame(stream, held.unacknowledged)
            held.unacknowledged = 0

    def _tell(self, event: Data | Event) -> None:
        match event:
            case Data():
                self._tell_messages(event.stream, event.body)
            case RequestReceived() | ResponseReceived():
                self._handler.opened(event.stream_id, _readable(event.headers))
            case DataReceived():
                self._tell_messages(event.stream_id, event.data)
            case TrailersReceived():
                if held := self._streams.get(event.stream_id):
                    held.trailers = _readable(event.headers)
            case StreamEnded() | StreamReset():
                held = self._streams.get(event.stream_id)
                if isinstance(event, StreamReset):
                    with self._lock:
                        self._drop(event.stream_id)
                self._handler.ended(event.stream_id, held.trailers if held else {})
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
            if compressed or size > held.most_bytes:
                self._reject(stream, UNIMPLEMENTED if compressed else RESOURCE_EXHAUSTED)
                return
            if len(held.received) < end:
                return
            message = bytes(memoryview(held.received)[_PREFIX.size : end])
            del held.received[:end]
            self._handler.message(stream, message)

    def _reject(self, stream: int, status: int) -> None:
        """Ends a stream whose messages are too long or compressed."""
        with self._lock:
            if self._closing or not self._drop(stream):
                return
            if self._h2.config.client_side:
                self._h2.reset_stream(stream, ErrorCodes.CANCEL)
            else:
                self._end(stream, _status(status, "a message is too long or compressed"))
            self._write()
        self._handler.ended(stream, _status(status))

    def _give_up(self) -> None:
        with self._reading, self._lock:
            self._closing = self._gone = True
            self._socket.close()
            os.close(self._wakes)
            self._streams.clear()
            for answered in self._pings.values():
                answered.set()
        self._handler.lost()


def _readable(headers: object) -> Headers:
    return dict(cast(list[tuple[str, str]], headers))  # strings, as the connection is configured


def _status(status: int, details: str = "") -> Headers:
    return {"grpc-status": str(status), **({"grpc-message": details} if details else {})}
