"""What carries messages between a target and a draft: non-blocking links, and their in-process and faulty twins.

A link loses messages rather than wait: commits are cumulative and growth is a hint, so loss costs speed only. The gRPC
stream behind the same interface is in `grpc_link`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cluster.wire import decode_down, decode_up, encode_down, encode_up
from cluster.wire_sampling import WireError
from engine.types import Down, Up

logger = logging.getLogger(__name__)
MAX_QUEUED_MESSAGES = 1024  # wire messages waiting in one direction at one end
MAX_QUEUED_BYTES = 64 * 1024 * 1024

Out = TypeVar("Out")
In = TypeVar("In")
M = TypeVar("M")
_OutP = TypeVar("_OutP", contravariant=True)  # a protocol needs its variance stated


class LinkError(ConnectionError):
    """A link could not be made; the text says with whom and why."""


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counts since the link was made, of wire messages: one may carry many commits or growths."""

    sent: int = 0  # handed to the link while it was alive
    received: int = 0  # decoded and returned
    dropped: int = 0  # lost to a full queue at this end, in either direction
    garbled: int = 0  # arrived malformed


class Link(Protocol[_OutP, In]):
    """One end of an ordered, lossy, two-way stream of messages. Nothing but `wait` blocks; one thread owns an end."""

    def send(self, messages: Sequence[_OutP]) -> None:
        """Queues messages; where the queue is full, the oldest are lost. Nothing happens once the link is dead.

        Raises WireError for a message that no bytes may carry.
        """

    def receive(self) -> list[In]:
        """Everything that arrived since the last call, also what arrived before the other end died."""

    def receive_timed(self) -> list[tuple[float, In]]:
        """The same, with when each came in, by the monotonic clock: its owner may have been busy since.

        Of those that this call read itself, that is when it did.
        """

    def wait(self, timeout_s: float) -> bool:
        """Blocks until something can be received or the link is dead: True; False after `timeout_s` seconds."""

    def set_notify(self, notify: Callable[[], None] | None) -> None:
        """Has `notify` called when `wait` would return True, and when `ready_to_send` turns True after reading False.

        It may be called from any thread, at once if there is a reason already, and too often. It must be quick and
        leave the link alone: setting an event is what it is for.
        """

    def attend(self) -> int | None:
        """From now on `receive`, called often, reads what came itself: no other thread need be woken for it.

        The file returned is readable when something came that `receive` would read; None where others read always.
        """

    @property
    def ready_to_send(self) -> bool:
        """False while something sent earlier has not been taken by the transport, and when the link is dead."""

    @property
    def alive(self) -> bool:
        """False once either end was closed or the connection is lost; never True again."""

    @property
    def stats(self) -> LinkStats:
        """What passed so far."""

    def close(self) -> None:
        """Ends the link at both ends; what is on its way may be lost. May be repeated."""


def send_all(link: Link[Out, In], messages: Sequence[Out], not_told: Callable[[Out], None]) -> None:
    """Sends what can be sent; `not_told` gets each message that no bytes may carry."""
    try:
        link.send(messages)
    except ValueError:  # nothing was sent
        for message in messages:
            try:
                link.send([message])
            except ValueError as error:
                logger.warning("a session goes without drafts: %s", error)
                not_told(message)


class Pipe:
    """One direction of a link: a bounded queue of wire messages between two threads. A full one loses the oldest."""

    def __init__(self) -> None:
        self.closed = False
        self.dropped = 0
        self.reading = False  # its reader puts into it himself just now, and need not be told
        self.on_readable: Callable[[], None] | None = None  # the reader's notify
        self.on_idle: Callable[[], None] | None = None  # the writer's notify
        self._changed = threading.Condition(threading.Lock())
        self._frames: deque[tuple[float, bytes]] = deque()  # with when they were put, by the monotonic clock
        self._bytes = 0
        self._taken = False  # a transport holds the frame it took last
        self._idle_missed = False  # the writer asked and was told to wait

    def put(self, frames: Iterable[bytes]) -> None:
        """Appends frames and wakes the reader; nothing once closed."""
        with self._changed:
            if self.closed:
                return
            now = time.monotonic()
            for frame in frames:
                self._frames.append((now, frame))
                self._bytes += len(frame)
            while len(self._frames) > MAX_QUEUED_MESSAGES or self._bytes > MAX_QUEUED_BYTES:
                self._bytes -= len(self._frames.popleft()[1])
                self.dropped += 1
            self._changed.notify()
        if not self.reading:
            _call(self.on_readable)

    def take(self) -> bytes | None:
        """The next frame for a transport, which holds it until it calls again; blocks; None once closed."""
        while (frame := self.take_now()) is None and not self.closed:
            with self._changed:
                self._changed.wait_for(self.readable)
        return frame

    def take_now(self) -> bytes | None:
        """The same for a transport that doesn't wait: None also where there is no frame."""
        with self._changed:
            owed = self._settle()
            frame = self._take_first()
        if owed:
            _call(self.on_idle)
        return frame

    def _take_first(self) -> bytes | None:
        if self.closed or not self._frames:
            return None
        self._taken = True
        _, frame = self._frames.popleft()
        self._bytes -= len(frame)
        return frame

    def take_all(self) -> list[tuple[float, bytes]]:
        """Every frame there is, with when it was put; also once closed; never blocks."""
        with self._changed:
            frames = list(self._frames)
            self._frames.clear()
            self._bytes = 0
            owed = self._settle()
        if owed:
            _call(self.on_idle)
        return frames

    def _settle(self) -> bool:
        """The reader is done with what it took; whether that was what the writer waited for. The lock is held."""
        self._taken = False
        owed = self._idle_missed and not self._frames
        self._idle_missed = self._idle_missed and not owed
        return owed

    def idle(self) -> bool:
        """Whether everything put was taken and passed on; if not, `on_idle` is called when it is."""
        with self._changed:
            self._idle_missed = bool(self._frames) or self._taken
            return not self._idle_missed

    def readable(self) -> bool:
        return bool(self._frames) or self.closed

    def wait(self, timeout_s: float) -> bool:
        """Blocks until `readable`: True; False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(self.readable, timeout_s)

    def close(self) -> None:
        """Ends it for writer and reader; what it holds can still be read."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        _call(self.on_readable)


def _call(notify: Callable[[], object] | None) -> None:
    if notify is not None:
        notify()


class Readable(Protocol):
    """What puts into a link's pipe what comes; also on the thread of the link's owner, who then needs no other."""

    def fileno(self) -> int:
        """The file that is readable when `read` brings something."""

    def read(self) -> None:
        """Puts what came into the pipe. Waits for nothing."""


class PipeLink(Generic[Out, In]):
    """A link over two pipes, whoever moves bytes at their other ends. Bytes are decoded on the owner's thread."""

    def __init__(
        self,
        encode: Callable[[Sequence[Out]], list[bytes]],
        decode: Callable[[bytes], list[In]],
        outgoing: Pipe,
        incoming: Pipe,
        hang_up: Callable[[], object] | None = None,
        source: Readable | None = None,
    ) -> None:
        """hang_up: ends the connection; called after the pipes were closed. source: what the owner may read."""
        self._encode, self._decode = encode, decode
        self._outgoing, self._incoming = outgoing, incoming
        self._hang_up = hang_up
        self._source = source
        self._attends = False
        self._sent = self._received = self._garbled = 0

    def send(self, messages: Sequence[Out]) -> None:
        if not self.alive:
            return
        frames = self._encode(messages)
        self._sent += len(frames)
        if frames:
            self._outgoing.put(frames)

    def receive(self) -> list[In]:
        return [message for _, message in self.receive_timed()]

    def receive_timed(self) -> list[tuple[float, In]]:
        messages: list[tuple[float, In]] = []
        if self._attends and self._source is not None:
            self._incoming.reading = True
            self._source.read()
            self._incoming.reading = False  # who puts something after this tells; what was put before is taken below
        if not self._incoming.readable():
            return messages
        for put, frame in self._incoming.take_all():
            try:
                messages += [(put, message) for message in self._decode(frame)]
            except WireError as error:
                if not self._garbled:
                    logger.warning("a message can't be read and is dropped, as all like it will be: %s", error)
                self._garbled += 1
            else:
                self._received += 1
        return messages

    def wait(self, timeout_s: float) -> bool:
        return self._incoming.wait(timeout_s)

    def set_notify(self, notify: Callable[[], None] | None) -> None:
        self._incoming.on_readable = self._outgoing.on_idle = notify
        if self._incoming.readable():
            _call(notify)

    def attend(self) -> int | None:
        self._attends = True
        return self._source.fileno() if self._source is not None else None

    @property
    def ready_to_send(self) -> bool:
        return self.alive and self._outgoing.idle()

    @property
    def alive(self) -> bool:
        return not (self._incoming.closed or self._outgoing.closed)

    @property
    def stats(self) -> LinkStats:
        dropped = self._outgoing.dropped + self._incoming.dropped
        return LinkStats(self._sent, self._received, dropped, self._garbled)

    def close(self) -> None:
        close_pipes(self._outgoing, self._incoming)
        self._incoming.take_all()
        _call(self._hang_up)


def close_pipes(outgoing: Pipe, incoming: Pipe) -> None:
    """Outgoing first: when closing `incoming` wakes the owner, the link reads as dead already."""
    outgoing.close()
    incoming.close()


def memory_link() -> tuple[Link[Down, Up], Link[Up, Down]]:
    """The target's and the draft's end of an in-process link. Messages pass through the wire format all the same.

    What one end sent counts as taken when the other end received it.
    """
    down, up = Pipe(), Pipe()
    return PipeLink(encode_down, decode_up, down, up), PipeLink(encode_up, decode_down, up, down)
