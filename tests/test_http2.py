"""Connections: what crosses them, who may not, and what ends them. Links over them are in test_link."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from cluster import http2
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.http2 import Connection, Headers
from cluster.link import Link, LinkError, Pipe
from cluster.speculate import PATH, SERVICE, LinkOptions
from cluster.wire import encode_down, encode_up
from engine.types import Close, Down, NeedPrefix, Open, SamplingParams, Up
from tests.cluster_fixtures import PATIENCE_S, until

LONG = tuple(range(1_000_000))  # tokens of a message of some 3 MB


class Draft:
    """A draft server that hands out the links it gets."""

    def __init__(self, options: LinkOptions | None = None) -> None:
        self.links: queue.SimpleQueue[Link[Up, Down]] = queue.SimpleQueue()
        self.server = DraftServer("127.0.0.1", 0, self.links.put, options)
        self.host, self.port = "127.0.0.1", int(self.server.address.rsplit(":", 1)[1])


@pytest.fixture
def draft() -> Iterator[Draft]:
    before = set(threading.enumerate())
    made = Draft()
    yield made
    made.server.stop()
    until(lambda: not ours(set(threading.enumerate()) - before), "threads end")


def ours(threads: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threads if thread.name.startswith("paceline")]


@contextmanager
def channel(draft: Draft) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(draft.server.address) as made:
        yield made


def check(channel: grpc.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)


def collected(link: Link[Up, Down], count: int) -> list[Down]:
    messages: list[Down] = []
    while len(messages) < count:
        assert link.wait(PATIENCE_S)
        messages += link.receive()
    return messages


def test_long_messages_and_short_ones_keep_their_order(draft: Draft) -> None:
    """More than windows of flow control hold, in pieces, several times over."""
    target = connect(draft.server.address, PATIENCE_S)
    end = draft.links.get(timeout=PATIENCE_S)
    sent: list[Down] = []
    for session in range(4):
        sent += [Open(session, LONG, SamplingParams()), Close((session,))]
        target.send(sent[-2:])
    assert collected(end, len(sent)) == sent
    target.close()


def test_several_streams_of_one_connection(draft: Draft) -> None:
    """As a client may have them that is not ours: none takes another's window or place."""
    with channel(draft) as made:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = made.stream_stream(PATH)
        frames: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(3)]
        calls = [method(iter(each.get, None)) for each in frames]
        ends = [draft.links.get(timeout=PATIENCE_S) for _ in frames]
        for each in frames:
            for _ in range(2000):
                each.put(b"\xff" * 1000)
        for each in frames:
            each.put(None)  # the client says no more: its stream ends
        for end in ends:
            until(lambda end=end: not end.alive, "the stream ends")  # type: ignore[misc]
            end.receive()
            assert end.stats.garbled + end.stats.dropped == 2000
        assert [call.code() for call in calls] == [grpc.StatusCode.OK] * 3
    assert draft.server._streams == 0


def refused(channel: grpc.Channel, path: str, message: bytes) -> grpc.StatusCode:
    """The status that a call gets."""
    method: Any = channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as error:
        method(message, timeout=PATIENCE_S)
    failed: Any = error.value
    code: grpc.StatusCode = failed.code()
    return code


def test_unknown_methods_and_services_are_told_so(draft: Draft) -> None:
    another = health_pb2.HealthCheckRequest(service="another.Service").SerializeToString()
    with channel(draft) as made:
        assert refused(made, f"/{SERVICE}/Guess", b"") is grpc.StatusCode.UNIMPLEMENTED
        assert refused(made, "/grpc.health.v1.Health/Check", another) is grpc.StatusCode.NOT_FOUND
        assert refused(made, "/grpc.health.v1.Health/Check", b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
        asked_much = health_pb2.HealthCheckRequest(service="a" * 15_000).SerializeToString()
        for _ in range(100):  # more than may be on its way at a time, on one connection
            assert refused(made, "/grpc.health.v1.Health/Check", asked_much) is grpc.StatusCode.NOT_FOUND
        too_much = bytes(100_000)
        assert refused(made, "/grpc.health.v1.Health/Check", too_much) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for service in ("", SERVICE):
            assert check(made, service).status == health_pb2.HealthCheckResponse.SERVING


def test_a_server_that_stops_gives_streams_time(draft: Draft) -> None:
    target = connect(draft.server.address, PATIENCE_S)
    end = draft.links.get(timeout=PATIENCE_S)
    with channel(draft) as made:
        assert check(made, "").status == health_pb2.HealthCheckResponse.SERVING
        stopping = threading.Thread(target=draft.server.stop, args=(PATIENCE_S,))
        stopping.start()
        until(lambda: check(made, "").status == health_pb2.HealthCheckResponse.NOT_SERVING, "health says so")
        assert target.alive
        assert end.alive
        target.close()
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive()


@given(st.binary(min_size=1, max_size=300))
def test_whatever_somebody_says_ends_their_connection_alone(said: bytes) -> None:
    made = SHARED
    with socket.create_connection((made.host, made.port)) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + said if said[0] % 2 else said)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(PATIENCE_S)
        try:
            while stranger.recv(65536):
                pass
        except ConnectionResetError:
            pass


SHARED: Draft


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    global SHARED
    SHARED = Draft()
    yield
    connect(SHARED.server.address, PATIENCE_S).close()  # it serves still
    until(lambda: not SHARED.server._connections, "the connections are forgotten")
    SHARED.server.stop()


def test_connections_beyond_the_limit_are_closed() -> None:
    made = Draft(LinkOptions(max_streams=1))
    strangers = [socket.create_connection((made.host, made.port)) for _ in range(30)]
    closed = 0
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
        closed += stranger.recv(1) == b""
    assert closed == 13
    for stranger in strangers:
        stranger.close()
    until(lambda: not made.server._connections, "the connections are forgotten")
    connect(made.server.address, PATIENCE_S).close()
    made.server.stop()


class Kept:
    """A handler that remembers."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.thread = 0  # that told of the last message

    def opened(self, stream: int, headers: Headers) -> None:
        self.told.put(("opened", stream))

    def message(self, stream: int, data: bytes) -> None:
        self.thread = threading.get_ident()
        self.told.put(("message", stream, data))

    def ended(self, stream: int, trailers: Headers) -> None:
        self.told.put(("ended", stream, trailers.get("grpc-status")))

    def lost(self) -> None:
        self.told.put(("lost",))


def two_ends(kept: Kept, far: Kept, options: LinkOptions) -> tuple[Connection, Connection]:
    """A client and a server, to be started; their sockets take little at once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sockets = socket.create_connection(listening.getsockname()), listening.accept()[0]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Connection(sockets[0], kept, options, client=True), Connection(sockets[1], far, options, client=False)


def test_what_a_socket_does_not_take_at_once_is_sent_when_it_does() -> None:
    """Not when a silent reader says something, or is asked whether it lives: that would be minutes here."""
    kept, far = Kept(), Kept()
    client, server = two_ends(kept, far, LinkOptions(keepalive_time_s=60, keepalive_timeout_s=60))
    stream = client.request("/a.Service/Method", "somewhere")
    for each in (client, server):
        each.start()
    far.told.get(timeout=PATIENCE_S)
    server.respond(stream)
    sent = [bytes([number]) * 300_000 for number in range(20)]
    for message in sent:
        client.outgoing(stream).put([message])
        server.outgoing(stream).put([message])
    assert [far.told.get(timeout=PATIENCE_S)[2] for _ in sent] == sent
    assert kept.told.get(timeout=PATIENCE_S) == ("opened", stream)
    assert [kept.told.get(timeout=PATIENCE_S)[2] for _ in sent] == sent
    for each in (client, server):
        each.close()


def test_both_ends_may_close_at_once(draft: Draft) -> None:
    for _ in range(50):
        target = connect(draft.server.address, PATIENCE_S)
        end = draft.links.get(timeout=PATIENCE_S)
        closing = threading.Thread(target=target.close)
        closing.start()
        end.send([NeedPrefix((1,))])
        end.close()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    until(lambda: not draft.server._connections, "the connections are forgotten")
    assert draft.server._streams == 0


@contextmanager
def two_speaking(kept: Kept, options: LinkOptions) -> Iterator[tuple[Connection, Connection, int]]:
    """A client, a server, and a stream that the server has accepted."""
    far = Kept()
    client, server = two_ends(kept, far, options)
    stream = client.request("/a.Service/Method", "somewhere")
    for each in (client, server):
        each.start()
    far.told.get(timeout=PATIENCE_S)
    server.respond(stream)
    assert kept.told.get(timeout=PATIENCE_S) == ("opened", stream)
    yield client, server, stream
    for each in (client, server):
        each.close()


def read(connection: Connection) -> bool:
    """Reads; whether the connection is still there."""
    connection.read()
    return connection.fileno() >= 0


def test_who_reads_often_is_told_on_his_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_ATTENDED_S", 60)
    kept = Kept()
    with two_speaking(kept, LinkOptions(keepalive_time_s=60)) as (client, server, stream):
        in_a_row = number = 0
        while in_a_row < 100:  # the connection's thread finds out with the first ones that it isn't needed
            server.outgoing(stream).put([number.to_bytes(2)])
            until(lambda: not read(client) or not kept.told.empty(), "it is read")
            assert kept.told.get_nowait() == ("message", stream, number.to_bytes(2))
            in_a_row = in_a_row + 1 if kept.thread == threading.get_ident() else 0
            number += 1
        server.close()
        until(lambda: not read(client), "the end is found by reading")
        assert kept.told.get(timeout=PATIENCE_S) == ("lost",)


def test_who_reads_has_all_that_came() -> None:
    """Also of a message that is longer than what is asked for at once."""
    kept, far = Kept(), Kept()
    client, server = two_ends(kept, far, LinkOptions(keepalive_time_s=60))
    client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    stream = client.request("/a.Service/Method", "somewhere")  # its thread never starts: all is read here
    with client._lock:
        client._write()
    server.start()
    far.told.get(timeout=PATIENCE_S)
    server.respond(stream)
    until(lambda: not read(client) or not kept.told.empty(), "the stream is accepted")
    assert kept.told.get_nowait() == ("opened", stream)
    long = bytes(40_000)
    server.outgoing(stream).put([long])
    until(lambda: waiting(client) >= 5 + len(long) + 9 * len(long) // 16384, "it has come")
    until(lambda: not server._unsent, "nothing is under way")
    client.read()
    assert kept.told.get_nowait() == ("message", stream, long)
    server.close()
    client._socket.close()


def waiting(connection: Connection) -> int:
    """Bytes that came and were not read."""
    try:
        return len(connection._socket.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


def test_who_has_read_and_stops_is_read_for() -> None:
    """And stays alive for the other end, which asks."""
    kept = Kept()
    with two_speaking(kept, LinkOptions(keepalive_time_s=0.2)) as (client, server, stream):
        for number in range(100):
            server.outgoing(stream).put([bytes([number])])
            client.read()
        for number in range(100):
            assert kept.told.get(timeout=PATIENCE_S) == ("message", stream, bytes([number]))
        for _ in range(3):
            client.read()
            server.outgoing(stream).put([b"more"])
            assert kept.told.get(timeout=PATIENCE_S) == ("message", stream, b"more")
            client.read()
            assert server.round_trip_s(PATIENCE_S) is not None


def test_two_ends_of_a_connection() -> None:
    kept, far = Kept(), Kept()
    client, server = two_ends(kept, far, LinkOptions())
    stream = client.request("/a.Service/Method", "somewhere")
    for each in (client, server):
        each.start()
    assert far.told.get(timeout=PATIENCE_S) == ("opened", stream)
    server.respond(stream)
    assert kept.told.get(timeout=PATIENCE_S) == ("opened", stream)
    client.outgoing(stream).put([b"", b"down"])
    assert [far.told.get(timeout=PATIENCE_S) for _ in range(2)] == [
        ("message", stream, b""),
        ("message", stream, b"down"),
    ]
    server.outgoing(stream).put([b"up"])
    server.finish(stream, 7)
    assert kept.told.get(timeout=PATIENCE_S) == ("message", stream, b"up")
    assert kept.told.get(timeout=PATIENCE_S) == ("ended", stream, "7")
    assert 0 < (client.round_trip_s(PATIENCE_S) or 0) < PATIENCE_S
    server.close()
    assert far.told.get(timeout=PATIENCE_S) == ("lost",)
    assert kept.told.get(timeout=PATIENCE_S) == ("lost",)
    assert client.round_trip_s(PATIENCE_S) is None
    assert isinstance(client.outgoing(stream), Pipe)
    for each in (client, server):
        each.close()


def test_a_stream_that_is_asked_for_and_reset_at_once_leaves_the_others_alone(draft: Draft) -> None:
    """Both frames come in one read: by the time that the server would accept the stream, it is gone."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", draft.server.address)]
    with socket.create_connection((draft.host, draft.port)) as connected:
        client.send_headers(1, headers)
        connected.sendall(client.data_to_send())
        kept = draft.links.get(timeout=PATIENCE_S)
        client.send_headers(3, headers)
        client.reset_stream(3)
        connected.sendall(client.data_to_send())
        gone = draft.links.get(timeout=PATIENCE_S)
        assert gone.wait(PATIENCE_S)
        assert not gone.alive
        (frame,) = encode_down([Close((7,))])
        client.send_data(1, b"\0" + len(frame).to_bytes(4) + frame)
        connected.sendall(client.data_to_send())
        assert collected(kept, 1) == [Close((7,))]
        assert kept.alive


def test_a_thread_that_can_not_be_had_is_no_link(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(LinkError, match="can't start new thread"):
            connect(draft.server.address, PATIENCE_S)
    connect(draft.server.address, PATIENCE_S).close()


def test_no_more_is_sent_than_the_other_end_granted(draft: Draft) -> None:
    """By the other end's own count, which ends the connection at one byte more."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    headers = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", draft.server.address)]
    client.send_headers(1, headers)
    asked = [NeedPrefix(tuple(range(1000 * number, 1000 * number + 1000))) for number in range(100)]
    sent = [len(frame) + 5 for frame in encode_up(asked)]
    received = 0
    with socket.create_connection((draft.host, draft.port)) as connected:
        connected.settimeout(PATIENCE_S)
        connected.sendall(client.data_to_send())
        draft.links.get(timeout=PATIENCE_S).send(asked)
        while received < sum(sent):
            for event in client.receive_data(connected.recv(1 << 16)):
                if isinstance(event, DataReceived):
                    received += len(event.data)
                    client.acknowledge_received_data(event.flow_controlled_length, 1)
                    window = 3000 if received < 20_000 else 200_000  # more than the connection's, which counts as well
                    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
            connected.sendall(client.data_to_send())
    assert received == sum(sent)
