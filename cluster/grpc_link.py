"""Links over gRPC: the target's client of the one bidirectional stream. The draft's server is in `grpc_server`."""

import socket
import threading
import time

from grpc import StatusCode

from cluster.address import parse_address
from cluster.http2 import Connection, Headers
from cluster.link import LinkError, Pipe, PipeLink, close_pipes
from cluster.near import dial_near
from cluster.speculate import ACCEPTED, PATH, VOCABULARY, LinkOptions
from cluster.wire import decode_up, encode_down
from engine.types import Down, Up

_AGAIN_S = 0.05  # after a server refused to be connected: it may be just starting
_NAMES = {code.value[0]: code.name for code in StatusCode}


class ClientLink(PipeLink[Down, Up]):
    """The target's end of a stream."""

    def __init__(self, outgoing: Pipe, incoming: Pipe, connection: Connection) -> None:
        super().__init__(encode_down, decode_up, outgoing, incoming, connection.close, connection)
        self._connection = connection

    def round_trip_s(self, timeout_s: float) -> float | None:
        """Seconds until a ping on the same connection is answered; None when it is not in time.

        May be called from any thread; it blocks.
        """
        return self._connection.round_trip_s(timeout_s)


def connect(address: str, timeout_s: float, options: LinkOptions | None = None) -> ClientLink:
    """The target's end of a new stream to the draft server at `address` ("host:port"); waits for a server that starts.

    On the draft's own machine, and by the address that it knows itself by, the stream goes through a unix socket.
    Raises LinkError when the stream is refused, or not accepted within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    connected = _dial(address, deadline)
    if connected is not None:
        try:
            client = _Client(connected, address, options or LinkOptions())
        except (OSError, RuntimeError) as error:  # no file can be opened, or no thread started
            connected.close()
            raise LinkError(f"cannot connect to the draft at {address}: {error}") from error
        if client.settled.wait(max(0.0, deadline - time.monotonic())) and client.accepted:
            return ClientLink(client.outgoing, client.incoming, client.connection)
        reason = client.reason  # closing gives another
        client.connection.close()
        if reason:
            raise LinkError(f"cannot connect to the draft at {address}: {reason}")
    raise LinkError(f"cannot connect to the draft at {address}: no answer within {timeout_s:g} s")


def _dial(address: str, deadline: float) -> socket.socket | None:
    """A connection, as soon as somebody listens; None once the deadline has passed."""
    while (left_s := deadline - time.monotonic()) > 0:
        if (near := dial_near(address, left_s)) is not None:
            return near
        try:
            return socket.create_connection(parse_address(address), left_s)
        except (OSError, UnicodeError):  # no such name, or one that none can have
            time.sleep(min(_AGAIN_S, left_s))
    return None


class _Client:
    """Implements Handler for a connection with one stream."""

    def __init__(self, connected: socket.socket, address: str, options: LinkOptions) -> None:
        self.settled = threading.Event()  # accepted, or failed for good
        self.accepted = False
        self.reason = ""  # of a failure
        self.incoming = Pipe()
        self.connection = Connection(connected, self, options, client=True)
        stream = self.connection.request(PATH, address, [(VOCABULARY, str(options.vocab_size))])
        self.outgoing = self.connection.outgoing(stream)
        self.connection.start()

    def opened(self, stream: int, headers: Headers) -> None:
        name, value = ACCEPTED
        self.accepted = headers.get(name) == value
        if self.accepted:
            self.settled.set()
        else:
            self.ended(stream, headers)

    def message(self, stream: int, data: bytes) -> None:
        self.incoming.put([data])

    def ended(self, stream: int, trailers: Headers) -> None:
        if not self.accepted and not self.reason:
            code = int(trailers.get("grpc-status", StatusCode.UNKNOWN.value[0]))
            self.reason = f"{_NAMES.get(code, code)}: {trailers.get('grpc-message', 'the stream was not accepted')}"
        self.connection.close()
        self._end()

    def lost(self) -> None:
        self.reason = self.reason or "UNAVAILABLE: the connection broke"
        self._end()

    def _end(self) -> None:
        close_pipes(self.outgoing, self.incoming)
        self.settled.set()
