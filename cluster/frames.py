"""The frames of HTTP/2 that a running stream consists of, read and made here: messages, and room for more of them.

All else is the h2 library's. Its work for a message, some 25 us at who reads and 10 at who sends where the caches are full
of a model's weights, was 2 to 4% of steps of 2 ms (benchmarks/README.md). https://www.rfc-editor.org/rfc/rfc9113#name-frame-definitions.
"""

import struct
from dataclasses import dataclass

CONNECTION = 0  # the stream that stands for all of them
FIRST_WINDOW = 65_535  # bytes that a connection may carry before the other end has said anything of it
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # of a client, before its frames
_DATA, _GRANT = 0, 8
_LARGEST = 1 << 14  # bytes of a frame's body, where no larger ones were agreed on
_HEAD = struct.Struct(">HBBBI")  # length in two parts, type, flags, stream
_COUNT = struct.Struct(">I")
_HIGH = 1 << 31  # a bit that is reserved, before numbers


@dataclass(frozen=True, slots=True)
class Data:
    """A part of a stream's messages."""

    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """So many more bytes may be sent, in one stream or in all together."""

    stream: int
    count: int


def data_frame(stream: int, body: bytes | memoryview) -> bytes:
    """The bytes of a Data; body: at most as long as the other end takes in a frame."""
    return _HEAD.pack(len(body) >> 8, len(body) & 255, _DATA, 0, stream) + body


def grant_frame(stream: int, count: int) -> bytes:
    """The bytes of a Grant; count: from 1 to 2^31 - 1."""
    return _HEAD.pack(0, _COUNT.size, _GRANT, 0, stream) + _COUNT.pack(count)


class Frames:
    """What came over a connection, cut into these frames and bytes of others."""

    def __init__(self, client_side: bool) -> None:
        """client_side: the other end is a server, whose frames begin at once."""
        self._rest = b""
        self._preface = 0 if client_side else _PREFACE

    def split(self, data: bytes) -> list[Data | Grant | bytes]:
        """The frames that are whole now, in order. Bytes are of other frames, and of such as no connection may carry."""
        data = self._rest + data if self._rest else data
        parts: list[Data | Grant | bytes] = []
        at = others = 0  # where the next frame begins; and the bytes before it that are of other frames
        if self._preface:
            if len(data) < self._preface:
                self._preface -= len(data)
                return [data]
            at, self._preface = self._preface, 0
        while len(data) - at >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            start = at + _HEAD.size
            end = start + length
            if length > _LARGEST:
                end = len(data)  # whatever it is, it goes no further
            elif end > len(data):
                break
            elif (kind == _DATA or (kind == _GRANT and length == _COUNT.size)) and not flags and stream < _HIGH:
                if others < at:
                    parts.append(data[others:at])
                body = data[start:end]
                parts.append(Data(stream, body) if kind == _DATA else Grant(stream, _COUNT.unpack(body)[0] & ~_HIGH))
                others = end
            at = end
        if others < at:
            parts.append(data[others:at])
        self._rest = data[at:]
        return parts
