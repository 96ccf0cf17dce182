"""Frames of HTTP/2 that are read and made without the h2 library, against what hyperframe, which it uses, makes of them."""

from itertools import pairwise

from hyperframe.frame import DataFrame, Frame, HeadersFrame, PingFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.frames import Data, Frames, Grant, data_frame, grant_frame

Part = Data | Grant | bytes
STREAMS = st.integers(1, 2**31 - 1)
DATA = st.builds(Data, STREAMS, st.binary(max_size=100))
GRANTS = st.builds(Grant, st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
PINGS = st.binary(min_size=8, max_size=8).map(lambda said: PingFrame(0, said).serialize())
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def bytes_of(part: Part) -> bytes:
    """As hyperframe makes them."""
    match part:
        case Data(stream, body):
            return DataFrame(stream, body).serialize()
        case Grant(stream, count):
            return WindowUpdateFrame(stream, count).serialize()
        case _:
            return part


def joined(parts: list[Part]) -> list[Part]:
    """With the bytes of other frames that stand together as one."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += part
        else:
            found.append(part)
    return found


@given(DATA, GRANTS)
def test_what_is_made_is_what_hyperframe_makes(data: Data, grant: Grant) -> None:
    assert data_frame(data.stream, data.body) == bytes_of(data)
    assert data_frame(data.stream, memoryview(data.body)) == bytes_of(data)
    assert grant_frame(grant.stream, grant.count) == bytes_of(grant)


@given(st.lists(DATA | GRANTS | PINGS, max_size=12), st.booleans(), st.lists(st.integers(0, 400), max_size=6))
def test_frames_are_read_however_they_are_cut(sent: list[Part], client: bool, cuts: list[int]) -> None:
    whole = (b"" if client else PREFACE) + b"".join(map(bytes_of, sent))
    frames, found = Frames(client), []
    at = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    for start, stop in pairwise(at):
        found += frames.split(whole[start:stop])
    assert joined(found) == joined(sent if client else [PREFACE, *sent])


def test_frames_with_flags_and_odd_ones_are_left_to_others() -> None:
    ended, padded = DataFrame(1, b"last"), DataFrame(3, b"padded", pad_length=3)
    ended.flags.add("END_STREAM")
    padded.flags.add("PADDED")
    short = bytes((0, 0, 3, 8, 0, 0, 0, 0, 0, 1, 2, 3))  # a grant of three bytes
    others: list[Frame] = [ended, padded, SettingsFrame(0), HeadersFrame(1, b"")]
    whole = b"".join(frame.serialize() for frame in others) + short
    assert Frames(True).split(whole) == [whole]


@settings(max_examples=20)
@given(st.integers(2**14 + 1, 2**24 - 1))
def test_what_is_too_long_is_not_waited_for(length: int) -> None:
    begun = bytes_of(Data(1, b"fine")), length.to_bytes(3) + bytes((0, 0, 0, 0, 0, 1)) + b"begun"
    assert Frames(True).split(b"".join(begun)) == [Data(1, b"fine"), begun[1]]


@given(st.binary(max_size=200), st.booleans())
def test_whatever_comes_is_passed_on_or_waited_for(said: bytes, client: bool) -> None:
    parts = Frames(client).split(said)
    assume(not any(isinstance(part, Grant) for part in parts))  # which may have had a bit that means nothing
    assert said.startswith(b"".join(map(bytes_of, parts)))
