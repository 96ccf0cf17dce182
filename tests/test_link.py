"""Links: what arrives, what is lost, who notices, and that nothing is left behind."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from random import Random
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import grpcio_link
from cluster import link as link_module
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.kept_links import KeptLinks
from cluster.link import Link, LinkError, memory_link
from cluster.speculate import PATH, SERVICE, LinkOptions
from cluster.wire import decode_down, decode_up, encode_down, encode_up
from engine.types import Close, Commit, Down, Growth, KVHandle, NeedPrefix, Open, Renew, SamplingParams, Up
from tests.cluster_fixtures import PATIENCE_S
from tests.faulty_link import FaultyLink, nonsense

Out = TypeVar("Out")
In = TypeVar("In")
Ends = tuple[Link[Down, Up], Link[Up, Down]]


def renews(*sessions: int) -> list[Down]:
    """One wire message each."""
    return [Renew((session,)) for session in sessions]


def collect(link: Link[Out, In], count: int) -> list[In]:
    """Exactly the next `count` messages."""
    messages: list[In] = []
    while len(messages) < count:
        assert link.wait(PATIENCE_S)
        assert link.alive
        messages += link.receive()
    assert len(messages) == count
    return messages


def ready(link: Link[Out, In]) -> bool:
    """Read anew each time: a type checker takes a property to stay what it was."""
    return link.ready_to_send


def wait_until_dead(link: Link[Out, In]) -> None:
    while link.alive:
        assert link.wait(PATIENCE_S)
        link.receive()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread


class Draft:
    """A draft server that hands out the links it gets."""

    def __init__(self, options: LinkOptions | None = None) -> None:
        self._links: queue.SimpleQueue[Link[Up, Down]] = queue.SimpleQueue()
        self.server = DraftServer("127.0.0.1", 0, self._links.put, options)

    def next_link(self) -> Link[Up, Down]:
        return self._links.get(timeout=PATIENCE_S)


@contextmanager
def draft_server(options: LinkOptions | None = None) -> Iterator[Draft]:
    draft = Draft(options)
    try:
        yield draft
    finally:
        draft.server.stop()


@contextmanager
def grpc_ends(far: bool = False) -> Iterator[Ends]:
    with draft_server() as draft:
        target = connect(far_address(draft) if far else draft.server.address, PATIENCE_S)
        try:
            yield target, draft.next_link()
        finally:
            target.close()


def far_address(draft: Draft) -> str:
    """One that the draft doesn't know itself by, so that it is dialled as on another machine."""
    return draft.server.address.replace("127.0.0.1", "localhost")


def tcp_ends() -> AbstractContextManager[Ends]:
    return grpc_ends(far=True)


@contextmanager
def grpcio_ends() -> Iterator[Ends]:
    """The target's end as in vLLM's process."""
    with draft_server() as draft:
        target = grpcio_link.connect(draft.server.address, PATIENCE_S)
        try:
            yield target, draft.next_link()
        finally:
            target.close()


@contextmanager
def memory_ends() -> Iterator[Ends]:
    target, draft = memory_link()
    yield target, draft
    target.close()


@contextmanager
def attended_ends(far: bool = False) -> Iterator[Ends]:
    """Whose owners read themselves when they receive; who waits, waits for another thread all the same."""
    with grpc_ends(far) as pair:
        assert all((link.attend() or 0) > 0 for link in pair)
        yield pair


def attended_tcp_ends() -> AbstractContextManager[Ends]:
    return attended_ends(far=True)


@pytest.fixture(
    params=[memory_ends, grpc_ends, tcp_ends, attended_ends, attended_tcp_ends, grpcio_ends],
    ids=["memory", "grpc", "tcp", "attended", "attended-tcp", "grpcio"],
)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with request.param() as pair:
        yield pair


def test_messages_arrive_in_order_both_ways(ends: Ends) -> None:
    target, draft = ends
    opened = Open(7, (1, 2, 3), SamplingParams(temperature=1.0, seed=5))
    commits: list[Down] = [Commit(7, KVHandle(4 + index, bytes(16)), (index,), index % 2 == 0) for index in range(50)]
    target.send([opened])
    for commit in commits:
        target.send([commit])
    assert collect(draft, 51) == [opened, *commits]
    draft.send([NeedPrefix((7,))])
    draft.send([NeedPrefix((8,)), NeedPrefix((9,))])
    assert collect(target, 3) == [NeedPrefix((7,)), NeedPrefix((8,)), NeedPrefix((9,))]
    assert (target.stats.sent, target.stats.received) == (51, 3)
    assert (draft.stats.sent, draft.stats.received) == (3, 51)


def test_wait_and_receive_do_not_block_without_messages(ends: Ends) -> None:
    target, draft = ends
    assert not target.wait(0)
    assert target.receive() == []
    target.send([])
    assert not draft.wait(0)


def test_notify_wakes_one_loop_over_several_links(ends: Ends) -> None:
    _, draft = ends
    woken = threading.Event()
    with memory_ends() as (other_target, other_draft):
        for link in (draft, other_draft):
            link.set_notify(woken.set)
        other_target.send(renews(1))
        assert woken.wait(PATIENCE_S)
        assert other_draft.receive() == renews(1)
        woken.clear()
        ends[0].send(renews(2))
        assert woken.wait(PATIENCE_S)
        assert draft.receive() == renews(2)


def test_notify_set_late_is_called_at_once(ends: Ends) -> None:
    target, draft = ends
    target.send(renews(1))
    assert draft.wait(PATIENCE_S)
    woken = threading.Event()
    draft.set_notify(woken.set)
    assert woken.is_set()


def test_closing_either_end_ends_both(ends: Ends) -> None:
    target, draft = ends
    woken = threading.Event()
    target.set_notify(woken.set)
    draft.close()
    wait_until_dead(target)
    assert woken.is_set()
    assert not draft.alive
    assert not ready(target)
    for link in (target, draft):
        sent = link.stats.sent
        link.send([])
        link.close()
        link.close()
        assert link.wait(PATIENCE_S)
        assert link.receive() == []
        assert link.stats.sent == sent
    target.send(renews(1))
    assert target.stats.sent == 0


def test_the_target_closing_is_noticed(ends: Ends) -> None:
    target, draft = ends
    target.close()
    wait_until_dead(draft)


def test_messages_come_with_when_they_came_in(ends: Ends) -> None:
    target, draft = ends
    sent = time.monotonic()
    target.send(renews(1))
    assert draft.wait(PATIENCE_S)
    here = time.monotonic()
    [(arrived, message)] = draft.receive_timed()
    assert [message] == renews(1)
    assert sent <= arrived <= here


def test_ready_again_after_the_transport_took_it(ends: Ends) -> None:
    target, draft = ends
    woken = threading.Event()
    assert ready(target)
    target.set_notify(woken.set)
    target.send(renews(1))
    was_ready = ready(target)  # over gRPC it may be taken already
    collect(draft, 1)
    assert was_ready or woken.wait(PATIENCE_S)
    assert ready(target)


def test_memory_link_is_ready_once_the_other_end_received() -> None:
    target, draft = memory_link()
    target.send(renews(1))
    assert not ready(target)
    draft.receive()
    assert ready(target)


@pytest.mark.parametrize("limits", [(4, 10**6), (1000, 16)])
def test_a_full_queue_loses_the_oldest(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_QUEUED_MESSAGES", limits[0])
    monkeypatch.setattr(link_module, "MAX_QUEUED_BYTES", limits[1])
    assert len(encode_down(renews(1))[0]) == 5
    kept = min(limits[0], limits[1] // 5)
    target, draft = memory_link()
    target.send(renews(*range(1, 7)))
    target.send(renews(*range(7, 11)))
    assert draft.receive() == renews(*range(11 - kept, 11))
    assert target.stats.sent == 10
    assert target.stats.dropped == 10 - kept
    target.send(renews(11))
    assert draft.receive() == renews(11)


# --- gRPC only


class FreezableProxy:
    """Forwards one connection's bytes until told to stop, as a network does that fails without a word."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._upstream = (host, int(port))
        self._sockets = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self.thaw()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._upstream)
        self._sockets += [near, far]
        for source, sink in ((near, far), (far, near)):
            thread = threading.Thread(target=self._pump, args=(source, sink))
            self._threads.append(thread)
            thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(options: LinkOptions) -> Iterator[tuple[FreezableProxy, Link[Down, Up], Link[Up, Down]]]:
    with draft_server(options) as draft:
        proxy = FreezableProxy(draft.server.address)
        try:
            target = connect(proxy.address, PATIENCE_S, options)
            yield proxy, target, draft.next_link()
            target.close()
        finally:
            proxy.close()


def test_a_half_open_connection_is_noticed_at_both_ends() -> None:
    with proxied(LinkOptions(keepalive_time_s=0.2, keepalive_timeout_s=0.5)) as (proxy, target, draft):
        target.send(renews(1))
        collect(draft, 1)
        proxy.freeze()
        wait_until_dead(target)
        wait_until_dead(draft)


def test_by_default_a_half_open_connection_is_noticed_within_three_seconds() -> None:
    options = LinkOptions()
    assert options.keepalive_time_s + options.keepalive_timeout_s <= 3
    told = dict(grpcio_link._arguments(options))
    assert told["grpc.keepalive_time_ms"] + told["grpc.keepalive_timeout_ms"] <= 3000
    assert told["grpc.keepalive_time_ms"] + told["grpc.http2.ping_timeout_ms"] <= 3000


def test_a_stalled_transport_holds_back_and_loses_the_oldest() -> None:
    patient = LinkOptions(keepalive_time_s=10 * PATIENCE_S, keepalive_timeout_s=PATIENCE_S)
    with proxied(patient) as (proxy, target, draft):
        proxy.freeze()
        large: list[Down] = [Open(1, (2**20,) * 10**6, SamplingParams())]  # more than sockets and flow control take
        target.send(large)
        target.send(large)
        woken = threading.Event()
        target.set_notify(woken.set)
        assert not ready(target)
        count = link_module.MAX_QUEUED_MESSAGES
        target.send(renews(*range(count + 10)))
        assert 10 <= target.stats.dropped <= 12
        assert not ready(target)
        assert not woken.is_set()
        proxy.thaw()
        received: list[Down] = []
        while renews(count + 9)[0] not in received:
            assert draft.wait(PATIENCE_S)
            received += draft.receive()
        assert woken.wait(PATIENCE_S)
        assert ready(target)
        expected = renews(*range(10, count + 10))
        assert received[-count:] == expected


def test_the_death_of_the_server_is_noticed() -> None:
    with draft_server() as draft:
        target = connect(draft.server.address, PATIENCE_S)
        end = draft.next_link()
        draft.server.stop()
        wait_until_dead(target)
        wait_until_dead(end)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(LinkError, match=rf"{address}: no answer within 0\.2 s"):
        connect(address, 0.2)


@pytest.mark.parametrize("host", [".", "x" * 64])
def test_a_name_that_no_host_can_have_is_no_answer(host: str) -> None:
    with pytest.raises(LinkError, match=r"no answer within 0\.2 s"):
        connect(f"{host}:9101", 0.2)


def test_a_server_that_starts_later_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    links: queue.SimpleQueue[Link[Down, Up]] = queue.SimpleQueue()
    connecting = threading.Thread(target=lambda: links.put(connect(f"127.0.0.1:{port}", PATIENCE_S)))
    connecting.start()
    server = DraftServer("127.0.0.1", port, lambda _: None)
    links.get(timeout=PATIENCE_S).close()
    server.stop()


def family(link: Link[Any, Any]) -> socket.AddressFamily:
    """Of the socket that a link's owner reads."""
    with socket.socket(fileno=os.dup(link.attend() or -1)) as seen:
        return seen.family


def test_on_one_machine_a_unix_socket_is_found() -> None:
    with grpc_ends() as near:
        assert {family(link) for link in near} == {socket.AF_UNIX}
    with grpc_ends(far=True) as far:
        assert {family(link) for link in far} == {socket.AF_INET}


def test_a_draft_on_the_same_port_of_another_host_is_not_taken_for_it() -> None:
    """As behind a tunnel: what listens at the dialled address counts, not who has the same port elsewhere."""
    with draft_server() as draft:
        port = int(draft.server.address.rpartition(":")[2])
        other = DraftServer("127.0.0.2", port, lambda link: None)
        try:
            connect(draft.server.address, PATIENCE_S).close()
            draft.next_link()
        finally:
            other.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_socket_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = f"""
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0paceline-draft/127.0.0.1:{port}")
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
    taker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert taker.stdin is not None
    assert taker.stdout is not None
    try:
        assert taker.stdout.readline() == b"listens\n"
        server = DraftServer("127.0.0.1", port, lambda link: None)  # has no such socket: the name is taken
        target = connect(server.address, PATIENCE_S)
        assert family(target) == socket.AF_INET
        target.close()
        server.stop()
    finally:
        taker.stdin.close()
        assert taker.wait(PATIENCE_S) == 0
        taker.stdout.close()


def test_a_taken_port_is_refused() -> None:
    with draft_server() as draft, pytest.raises(LinkError, match="cannot listen"):
        DraftServer("127.0.0.1", int(draft.server.address.rsplit(":", 1)[1]), lambda _: None)


@pytest.mark.parametrize("dial", [connect, grpcio_link.connect])
def test_a_target_with_another_vocabulary_is_refused_with_both_sizes(dial: Callable[..., Link[Any, Any]]) -> None:
    with draft_server(LinkOptions(vocab_size=32_000)) as draft:
        told = "FAILED_PRECONDITION: the draft's vocabulary has 32000 tokens, the target's 99"
        with pytest.raises(LinkError, match=told):
            dial(draft.server.address, PATIENCE_S, LinkOptions(vocab_size=99))
        for size in (32_000, 32_128, 0):  # the second one is padded
            dial(draft.server.address, PATIENCE_S, LinkOptions(vocab_size=size)).close()
    with draft_server(LinkOptions()) as draft:
        dial(draft.server.address, PATIENCE_S, LinkOptions(vocab_size=99)).close()


def test_streams_beyond_the_limit_are_refused_until_one_ends() -> None:
    with draft_server(LinkOptions(max_streams=2)) as draft:
        first, end = connect(draft.server.address, PATIENCE_S), draft.next_link()
        second = connect(draft.server.address, PATIENCE_S)
        with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED: the draft has 2 streams"):
            connect(draft.server.address, PATIENCE_S)
        first.close()
        wait_until_dead(end)
        third = connect(draft.server.address, PATIENCE_S)
        for target in (second, third):
            target.close()


def raw_stream(channel: grpc.Channel) -> "grpc.StreamStreamMultiCallable[bytes, bytes]":
    return channel.stream_stream(PATH)


def test_bytes_that_are_no_message_are_counted_and_skipped() -> None:
    with draft_server() as draft, grpc.insecure_channel(draft.server.address) as channel:
        frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for frame in (b"\xff\xff", encode_down(renews(1))[0], b"", encode_down(renews(2))[0]):
            frames.put(frame)
        call = raw_stream(channel)(iter(frames.get, None))
        end = draft.next_link()
        assert collect(end, 2) == renews(1, 2)
        assert (end.stats.received, end.stats.garbled) == (2, 2)
        frames.put(None)
        call.cancel()
        wait_until_dead(end)


def test_an_oversized_message_ends_the_stream_only() -> None:
    with draft_server() as draft, grpc.insecure_channel(draft.server.address) as channel:
        call = raw_stream(channel)(iter([bytes(5 * 1024 * 1024)]))
        end = draft.next_link()
        wait_until_dead(end)
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        connect(draft.server.address, PATIENCE_S).close()


def test_health_and_reflection() -> None:
    with draft_server() as draft, grpc.insecure_channel(draft.server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (described,) = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S)
        assert len(described.file_descriptor_response.file_descriptor_proto) == 1


# --- the faulty link


def through_faults(seed: int, **rates: Any) -> tuple[list[Down], list[Up]]:
    """What arrives of Renew 0.. going down and NeedPrefix 0.. coming up, one of each a round."""
    inner, draft = memory_link()
    target: Link[Down, Up] = FaultyLink(inner, seed, **rates)
    down: list[Down] = []
    up: list[Up] = []
    for index in range(60):
        target.send(renews(index))
        draft.send([NeedPrefix((index,))])
        down += draft.receive()
        up += target.receive()
    while target.wait(0):
        up += target.receive()
        down += draft.receive()
    return down, up


def sessions(messages: list[Down] | list[Up]) -> list[int]:
    return [message.sessions[0] for message in messages if isinstance(message, Renew | NeedPrefix)]


def test_without_rates_a_faulty_link_is_an_ordinary_one() -> None:
    down, up = through_faults(1)
    assert sessions(down) == sessions(up) == list(range(60))


def test_faults_depend_on_the_seed_alone() -> None:
    rates = {"drop": 0.2, "duplicate": 0.2, "delay": 0.3, "nonsense": 0.1}
    assert through_faults(1, **rates) == through_faults(1, **rates)
    assert through_faults(1, **rates) != through_faults(2, **rates)


def test_each_fault_does_what_it_says() -> None:
    assert through_faults(1, drop=1.0) == ([], [])
    assert [sessions(way) for way in through_faults(1, duplicate=1.0)] == [[i // 2 for i in range(120)]] * 2
    for way in through_faults(1, delay=0.3):
        order = sessions(way)
        assert order != sorted(order)
        assert sorted(order) == list(range(60))  # late, but all of them
    for way in through_faults(1, nonsense=1.0):
        assert len(way) == 120


def test_a_faulty_link_ends_with_its_inner_link() -> None:
    inner, draft = memory_link()
    target = FaultyLink(inner, 1, delay=1.0)
    woken = threading.Event()
    target.set_notify(woken.set)
    assert ready(target)
    draft.send([NeedPrefix((1,))])
    woken.clear()
    target.receive()
    assert woken.is_set()  # something is held: come again
    target.close()
    assert not target.alive
    assert not draft.alive
    assert target.stats.received == 1


GROWN = Growth(
    1, KVHandle(4, bytes(16)), np.array([-1, 0], np.int32), np.array([5, 6], np.int32), np.ones(2, np.float32)
)
DOWNS: list[Down] = [
    Open(1, (1, 2, 3), SamplingParams()),
    Commit(1, KVHandle(4, bytes(16)), (1,), True),
    *(kind((1, 2)) for kind in (Renew, Close)),
]


UPS: list[Up] = [GROWN, NeedPrefix((1,))]


@pytest.mark.parametrize("seed", range(20))
def test_nonsense_is_well_formed(seed: int) -> None:
    random = Random(seed)
    for down in DOWNS:
        (frame,) = encode_down([nonsense(down, random)])
        assert [type(each) for each in decode_down(frame)] == [type(down)]
    for up in UPS:
        (frame,) = encode_up([nonsense(up, random)])
        assert [type(each) for each in decode_up(frame)] == [type(up)]


def test_who_ends_waits_for_no_further_service() -> None:
    closing, asked = threading.Event(), list[str]()

    def dial(address: str) -> Link[Down, Up]:
        asked.append(address)
        closing.set()
        raise LinkError("nobody is there")

    KeptLinks(dial, lambda link: None).keep(lambda: ["127.0.0.1:1", "127.0.0.1:2"], closing)
    assert asked == ["127.0.0.1:1"]
