"""The wire format: what goes in comes out, and no bytes do harm."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from cluster.pb import draft_pb2 as pb
from cluster.wire import decode_down, decode_up, encode_down, encode_up
from cluster.wire_sampling import WireError
from engine.types import (
    MAX_TOKEN_ID,
    Close,
    Commit,
    Down,
    Grammar,
    Growth,
    KVHandle,
    NeedPrefix,
    Open,
    Renew,
    SamplingParams,
    Up,
)

DIGEST = bytes(range(16))
NODE = {"parents": "<i4", "tokens": "<i4", "confidences": "<f4"}  # what the arrays of nodes hold

session_ids = st.integers(0, 2**64 - 1)
session_tuples = st.lists(session_ids, max_size=5).map(tuple)
token_tuples = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=6).map(tuple)
handles = st.builds(KVHandle, st.integers(6, wire.MAX_PREFIX_TOKENS), st.binary(min_size=16, max_size=16))
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
downs: st.SearchStrategy[Down] = st.one_of(
    st.builds(Open, session_ids, token_tuples, params),
    st.builds(Commit, session_ids, handles, token_tuples, st.booleans()),
    st.builds(Renew, session_tuples),
    st.builds(Close, session_tuples),
)


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 6)))]
    tokens = [draw(st.integers(-(2**31), 2**31 - 1)) for _ in parents]
    confidences = [draw(st.floats(width=32)) for _ in parents]
    return growth(draw(session_ids), draw(handles), parents, tokens, confidences)


ups: st.SearchStrategy[Up] = st.one_of(growths(), st.builds(NeedPrefix, session_tuples))


def growth(
    session: int, base: KVHandle, parents: Sequence[int], tokens: Sequence[int], confidences: Sequence[float]
) -> Growth:
    arrays = np.array(parents, np.int32), np.array(tokens, np.int32), np.array(confidences, np.float32)
    return Growth(session, base, *arrays)


def plain(message: Up) -> object:
    """Something that compares equal for equal messages: arrays and NaN do not."""
    if isinstance(message, Growth):
        arrays = message.parents, message.tokens, message.confidences
        assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32]
        return message.session, message.base, [[repr(value) for value in array.tolist()] for array in arrays]
    return message


@given(st.lists(downs, max_size=8))
def test_down_round_trip_keeps_everything_in_order(messages: list[Down]) -> None:
    assert [message for frame in encode_down(messages) for message in decode_down(frame)] == messages


@given(st.lists(ups, max_size=8))
def test_up_round_trip_keeps_everything_in_order(messages: list[Up]) -> None:
    back = [plain(message) for frame in encode_up(messages) for message in decode_up(frame)]
    assert back == [plain(message) for message in messages]


def commit(session: int, tokens: int = 2) -> Commit:
    return Commit(session, KVHandle(max(tokens, 10), DIGEST), tuple(range(tokens)), True)


def test_consecutive_commits_and_growths_share_a_frame() -> None:
    assert len(encode_down([commit(1), commit(2), Renew((1,)), commit(1), commit(2)])) == 3
    grown = growth(1, KVHandle(4, DIGEST), [-1], [5], [0.5])
    assert len(encode_up([grown, grown, NeedPrefix((1,)), grown])) == 3


def test_packs_are_split_at_the_limits() -> None:
    commits: list[Down] = [commit(session) for session in range(wire.MAX_SESSIONS + 1)]
    frames = encode_down(commits)
    assert [len(decode_down(frame)) for frame in frames] == [wire.MAX_SESSIONS, 1]
    long = commit(1, tokens=wire.MAX_NODES)
    assert [len(decode_down(frame)) for frame in encode_down([commit(1), long, long])] == [1, 1, 1]
    renew = Renew(tuple(range(wire.MAX_SESSIONS + 1)))
    assert [decode_down(frame) for frame in encode_down([renew])] == [
        [Renew(renew.sessions[:-1])],
        [Renew(renew.sessions[-1:])],
    ]


def test_only_what_shapes_tokens_crosses() -> None:
    sent = Open(1, (1, 2), SamplingParams(0.5, 3, 0.9, 0.1, 7, max_tokens=5, stop=("x",), logprobs=2))
    assert decode_down(encode_down([sent])[0]) == [Open(1, (1, 2), SamplingParams(0.5, 3, 0.9, 0.1, 7))]
    unlimited = Open(1, (), SamplingParams(top_k=2**40))
    assert decode_down(encode_down([unlimited])[0]) == [Open(1, (), SamplingParams(top_k=2**32 - 1))]


def test_every_processor_crosses() -> None:
    params = SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, -100.0), (7, 0.5)),
        min_tokens=4,
        stop_token_ids=(9, 11),
        bad_words=((1, 2), (3,)),
        grammar=Grammar("regex", "[a-z]+"),
    )
    opened = Open(1, (1, 2), params, prompt=1)
    assert decode_down(encode_down([opened])[0]) == [opened]
    ends = Open(1, (1, 2), SamplingParams(ignore_eos=True), prompt=2)
    assert decode_down(encode_down([ends])[0]) == [ends]


def test_decoded_arrays_cannot_be_written() -> None:
    (message,) = decode_up(encode_up([growth(1, KVHandle(4, DIGEST), [-1, 0], [5, 6], [0.5, 0.5])])[0])
    assert isinstance(message, Growth)
    for array in (message.parents, message.tokens, message.confidences):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def commits_frame(**changes: Any) -> bytes:
    fields = {
        "sessions": [1, 2],
        "lengths": [5, 6],
        "digests": DIGEST * 2,
        "counts": [1, 2],
        "tokens": [7, 8, 9],
        "mirrored": [True, False],
    }
    return pb.Down(commits=pb.Commits(**(fields | changes))).SerializeToString()


def growths_frame(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "sessions": [1, 2],
        "base_lengths": [5, 6],
        "base_digests": DIGEST * 2,
        "counts": [1, 2],
        "parents": [-1, -1, 0],
        "tokens": [7, 8, 9],
        "confidences": [0.5, 0.5, 0.5],
    } | changes
    for name, dtype in NODE.items():
        if not isinstance(fields[name], bytes):
            fields[name] = np.array(fields[name], dtype).tobytes()
    return pb.Up(growths=pb.Growths(**fields)).SerializeToString()


def open_frame(**changes: Any) -> bytes:
    fields = {"temperature": 0.5, "top_p": 1.0, "repetition_penalty": 1.0}
    return pb.Down(open=pb.Open(session=1, tokens=[1], sampling=pb.Sampling(**(fields | changes)))).SerializeToString()


def test_the_frames_that_are_broken_below_are_fine_unbroken() -> None:
    assert len(decode_down(commits_frame())) == 2
    assert len(decode_up(growths_frame())) == 2
    assert len(decode_down(open_frame())) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"sessions": [1]},
        {"sessions": [1] * (wire.MAX_SESSIONS + 1)},
        {"lengths": [5]},
        {"lengths": [5, wire.MAX_PREFIX_TOKENS + 1]},
        {"lengths": [5, 1]},  # shorter than the tokens that end it
        {"digests": DIGEST},
        {"digests": DIGEST * 2 + b"x"},
        {"counts": [1]},
        {"counts": [1, 1]},
        {"counts": [2**32 - 1, 4]},  # adds up in 32 bits
        {"tokens": [7, 8]},
        {"tokens": [7, 8, 2**31]},
        {"mirrored": [True]},
    ],
)
def test_malformed_commits(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_down(commits_frame(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sessions": [1]},
        {"base_lengths": [5, 6, 7]},
        {"base_lengths": [5, wire.MAX_PREFIX_TOKENS + 1]},
        {"base_digests": DIGEST + b"x"},
        {"counts": [1]},
        {"counts": [2, 2]},
        {"counts": [2**32 - 1, 4]},
        {"parents": [-1, -1]},
        {"parents": [-1, -1, 1]},  # its own parent
        {"parents": [-1, 1, 0]},  # before its parent
        {"parents": [-1, 0, 0]},  # a first node has the base alone
        {"parents": [-1, -1, -2]},
        {"tokens": [7, 8, 9, 10]},
        {"confidences": [0.5]},
        {"parents": bytes(11), "tokens": bytes(11), "confidences": bytes(11)},  # two nodes and a part of one
    ],
)
def test_malformed_growths(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_up(growths_frame(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": float("nan")},
        {"seed": 2**63},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"bias_tokens": [1, 2], "biases": [0.5]},
        {"bad_words": [1, 2], "bad_word_lengths": [1]},
        {"bad_words": [1, 2], "bad_word_lengths": [2, 0]},
        {"grammar": pb.Grammar(kind="prose", text="x")},
        {"grammar": pb.Grammar(kind="regex")},
        {"stop_tokens": [1] * 4097},
    ],
)
def test_sampling_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_down(open_frame(**changes))


def test_too_much_of_anything() -> None:
    renew = pb.Down(renew=pb.Renew(sessions=range(wire.MAX_SESSIONS + 1))).SerializeToString()
    tokens = [1] * (wire.MAX_PREFIX_TOKENS + 1)
    prefix = pb.Down(open=pb.Open(tokens=tokens, sampling=pb.Sampling(top_p=1))).SerializeToString()
    for frame in (renew, prefix, bytes(wire.MAX_MESSAGE_BYTES + 1)):
        with pytest.raises(WireError, match="over"):
            decode_down(frame)
    nodes = wire.MAX_NODES + 1
    with pytest.raises(WireError, match="nodes"):
        decode_up(
            growths_frame(counts=[1, nodes - 1], parents=[-1] * nodes, tokens=[1] * nodes, confidences=[0] * nodes)
        )


def test_nonsense_that_is_well_formed_passes() -> None:
    confidences = [float("nan"), float("inf"), -3.0]
    first, second = decode_up(growths_frame(tokens=[-1, -(2**31), 0], confidences=confidences))
    assert isinstance(first, Growth)
    assert isinstance(second, Growth)
    assert first.tokens.tolist() == [-1]
    assert np.isnan(first.confidences[0])
    assert second.tokens.tolist() == [-(2**31), 0]
    assert second.confidences.tolist() == [float("inf"), -3.0]


@pytest.mark.parametrize(
    "message",
    [
        Open(1, (2**31 - 1,) * (wire.MAX_PREFIX_TOKENS // 5 * 4 + 1), SamplingParams()),  # 5 bytes a token
        Open(1, (1,) * (wire.MAX_PREFIX_TOKENS + 1), SamplingParams()),
        Commit(1, KVHandle(4, DIGEST[:-1]), (), True),
    ],
)
def test_what_cannot_be_encoded_down(message: Down) -> None:
    with pytest.raises(WireError):
        encode_down([message])


@pytest.mark.parametrize("lengths", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (wire.MAX_NODES + 1,) * 3])
def test_what_cannot_be_encoded_up(lengths: tuple[int, int, int]) -> None:
    parents, tokens, confidences = ([0] * length for length in lengths)
    with pytest.raises(WireError):
        encode_up([growth(1, KVHandle(4, DIGEST), parents, tokens, confidences)])


def survives(decode: Callable[[bytes], object], data: bytes) -> None:
    with suppress(WireError):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    survives(decode_down, data)
    survives(decode_up, data)


@given(st.sampled_from([commits_frame(), growths_frame(), open_frame()]), st.data())
def test_damaged_frames_do_no_harm(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(frame)))]
    survives(decode_down, bytes(damaged))
    survives(decode_up, bytes(damaged))
