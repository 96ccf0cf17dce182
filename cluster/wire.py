"""Bytes on the wire: the one place that turns protobuf into the frozen dataclasses of `engine.types` and back.

Decoding trusts nothing: whatever the bytes, it returns well-formed messages or raises WireError. What is well-formed
yet useless (unknown token ids, a confidence of NaN) passes: the receiver of growth has to cope with nonsense anyway.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from cluster.pb import draft_pb2 as pb
from cluster.wire_sampling import WireError, decode_sampling, encode_sampling, require
from engine.compiled import compiled
from engine.types import MAX_TOKEN_ID, Close, Commit, Down, Growth, IntArray, KVHandle, NeedPrefix, Open, Renew, Up

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_SESSIONS = 4096  # in one message
MAX_NODES = 65_536  # tree nodes in one message
MAX_PREFIX_TOKENS = 1_048_576
DIGEST_BYTES = 16
_ID, _CONFIDENCE = np.dtype("<i4"), np.dtype("<f4")  # of a node, as they are sent

_T = TypeVar("_T")


def encode_down(messages: Sequence[Down]) -> list[bytes]:
    """Bytes of messages from target to draft, in order; consecutive commits share one protobuf message.

    Raises WireError for a message beyond the limits, ValueError for a number that its field cannot hold.
    """
    frames: list[bytes] = []
    commits: list[Commit] = []
    for message in messages:
        if isinstance(message, Commit):
            commits.append(message)
            continue
        frames += _commit_frames(commits)
        commits = []
        match message:
            case Open():
                frames.append(_open_frame(message))
            case Renew():
                frames += [_frame(pb.Down(renew=pb.Renew(sessions=part))) for part in _parts(message.sessions)]
            case Close():
                frames += [_frame(pb.Down(close=pb.Close(sessions=part))) for part in _parts(message.sessions)]
    return frames + _commit_frames(commits)


def encode_up(messages: Sequence[Up]) -> list[bytes]:
    """Bytes of messages from draft to target, in order; consecutive growths share one protobuf message.

    Raises WireError for a message beyond the limits or a growth whose arrays differ in length, ValueError for a number
    that its field cannot hold.
    """
    frames: list[bytes] = []
    growths: list[Growth] = []
    for message in messages:
        if isinstance(message, Growth):
            growths.append(message)
            continue
        frames += _growth_frames(growths)
        growths = []
        frames += [_frame(pb.Up(need_prefix=pb.NeedPrefix(sessions=part))) for part in _parts(message.sessions)]
    return frames + _growth_frames(growths)


def decode_down(data: bytes) -> list[Down]:
    """The messages from target to draft that `data` carries. Raises WireError if it is malformed."""
    message = pb.Down()
    _parse(message, data)
    match message.WhichOneof("body"):
        case "open":
            return [_decode_open(message.open)]
        case "commits":
            return _decode_commits(message.commits)
        case "renew":
            return [Renew(_sessions(message.renew.sessions))]
        case "close":
            return [Close(_sessions(message.close.sessions))]
    raise WireError("the message is empty")


def decode_up(data: bytes) -> list[Up]:
    """The messages from draft to target that `data` carries. Raises WireError if it is malformed."""
    message = pb.Up()
    _parse(message, data)
    match message.WhichOneof("body"):
        case "growths":
            return _decode_growths(message.growths)
        case "need_prefix":
            return [NeedPrefix(_sessions(message.need_prefix.sessions))]
    raise WireError("the message is empty")


# --- encoding. What is within a message is given as a mapping: a message would be copied.


def _frame(message: pb.Down | pb.Up) -> bytes:
    data = message.SerializeToString()
    require(len(data) <= MAX_MESSAGE_BYTES, f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return data


def _parts(sessions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sessions in runs that one message may carry; one empty run if there are none."""
    for start in range(0, max(1, len(sessions)), MAX_SESSIONS):
        yield sessions[start : start + MAX_SESSIONS]


def _packs(messages: Sequence[_T], sizes: Sequence[int]) -> Iterator[tuple[Sequence[_T], Sequence[int]]]:
    """Messages and their sizes in runs of at most MAX_SESSIONS messages and MAX_NODES in size, or one message."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == MAX_SESSIONS or total + size > MAX_NODES):
            yield messages[start:index], sizes[start:index]
            start, total = index, 0
        total += size
    if start < len(messages):
        yield messages[start:], sizes[start:]


def _bytes(arrays: Sequence[npt.NDArray[np.generic]], dtype: np.dtype[np.generic]) -> bytes:
    """The arrays, one after the other."""
    return b"".join([array.astype(dtype, copy=False).tobytes() for array in arrays])


def _digests(handles: Sequence[KVHandle]) -> bytes:
    require(all(len(handle.digest) == DIGEST_BYTES for handle in handles), "a digest is not 16 bytes long")
    return b"".join([handle.digest for handle in handles])


def _open_frame(message: Open) -> bytes:
    require(len(message.tokens) <= MAX_PREFIX_TOKENS, f"a prefix is over the limit of {MAX_PREFIX_TOKENS} tokens")
    sampling = encode_sampling(message.params)
    opened = pb.Open(session=message.session, tokens=message.tokens, sampling=sampling, prompt=message.prompt)
    return _frame(pb.Down(open=opened))


def _commit_frames(commits: Sequence[Commit]) -> list[bytes]:
    longest = max((commit.handle.length for commit in commits), default=0)
    require(longest <= MAX_PREFIX_TOKENS, f"a prefix is over the limit of {MAX_PREFIX_TOKENS} tokens")
    frames = []
    for pack, counts in _packs(commits, [len(commit.tokens) for commit in commits]):
        packed = {
            "sessions": [commit.session for commit in pack],
            "lengths": [commit.handle.length for commit in pack],
            "digests": _digests([commit.handle for commit in pack]),
            "counts": counts,
            "tokens": [token for commit in pack for token in commit.tokens],
            "mirrored": [commit.mirrored for commit in pack],
        }
        frames.append(_frame(pb.Down(commits=packed)))
    return frames


def _growth_frames(growths: Sequence[Growth]) -> list[bytes]:
    for growth in growths:
        # Summed over a pack, differences could cancel out and give nodes to the wrong session.
        agree = len(growth.parents) == len(growth.tokens) == len(growth.confidences)
        require(agree, "the arrays of a growth differ in length")
        require(len(growth.tokens) <= MAX_NODES, f"a growth is over the limit of {MAX_NODES} nodes")
    frames = []
    for pack, counts in _packs(growths, [len(growth.tokens) for growth in growths]):
        packed = {
            "sessions": [growth.session for growth in pack],
            "base_lengths": [growth.base.length for growth in pack],
            "base_digests": _digests([growth.base for growth in pack]),
            "counts": counts,
            "parents": _bytes([growth.parents for growth in pack], _ID),
            "tokens": _bytes([growth.tokens for growth in pack], _ID),
            "confidences": _bytes([growth.confidences for growth in pack], _CONFIDENCE),
        }
        frames.append(_frame(pb.Up(growths=packed)))
    return frames


# --- decoding. Repeated fields are read by slicing, which is far faster than iterating; nodes by numpy, as they are.


def _parse(message: pb.Down | pb.Up, data: bytes) -> None:
    require(len(data) <= MAX_MESSAGE_BYTES, f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError("not a protobuf message") from error


def _sessions(field: Sequence[int]) -> tuple[int, ...]:
    require(len(field) <= MAX_SESSIONS, f"over {MAX_SESSIONS} sessions")
    return tuple(field[:])


def _token_ids(field: Sequence[int]) -> Sequence[int]:
    tokens = field[:]
    require(max(tokens, default=0) <= MAX_TOKEN_ID, f"a token id is above {MAX_TOKEN_ID}")
    return tokens


def _handles(field: Sequence[int], digests: bytes, sessions: int) -> list[KVHandle]:
    """One handle per session, of packed lengths and digests."""
    require(len(field) == sessions, "as many lengths as sessions are needed")
    require(len(digests) == DIGEST_BYTES * sessions, "as many digests as sessions are needed")
    lengths = field[:]
    require(max(lengths, default=0) <= MAX_PREFIX_TOKENS, f"a prefix is over the limit of {MAX_PREFIX_TOKENS} tokens")
    return [
        KVHandle(length, digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])
        for index, length in enumerate(lengths)
    ]


def _bounds(counts: Sequence[int], sessions: int, total: int) -> list[int]:
    """Where each session's entries start in the packed arrays of `total` entries, and where the last ones end."""
    require(len(counts) == sessions, "as many counts as sessions are needed")
    bounds = list(accumulate(counts[:], initial=0))
    require(bounds[-1] == total, "the counts do not add up to the entries")
    return bounds


def _decode_open(message: pb.Open) -> Open:
    require(len(message.tokens) <= MAX_PREFIX_TOKENS, f"a prefix is over the limit of {MAX_PREFIX_TOKENS} tokens")
    require(message.prompt <= len(message.tokens), "a prompt is longer than its prefix")
    params = decode_sampling(message.sampling)
    return Open(message.session, tuple(_token_ids(message.tokens)), params, message.prompt)


def _decode_commits(packed: pb.Commits) -> list[Down]:
    sessions = _sessions(packed.sessions)
    handles = _handles(packed.lengths, packed.digests, len(sessions))
    bounds = _bounds(packed.counts, len(sessions), len(packed.tokens))
    require(len(packed.mirrored) == len(sessions), "as many mirrored flags as sessions are needed")
    tokens = _token_ids(packed.tokens)
    commits: list[Down] = []
    for session, handle, start, end, mirrored in zip(
        sessions, handles, bounds[:-1], bounds[1:], packed.mirrored[:], strict=True
    ):
        require(end - start <= handle.length, "a commit has more tokens than its prefix")
        commits.append(Commit(session, handle, tuple(tokens[start:end]), mirrored))
    return commits


def _decode_growths(packed: pb.Growths) -> list[Up]:
    size = len(packed.tokens)
    require(size <= MAX_NODES * _ID.itemsize, f"over {MAX_NODES} nodes")
    require(len(packed.parents) == len(packed.confidences) == size, "the arrays of nodes differ in length")
    require(size % _ID.itemsize == 0, "a node is not whole")
    sessions = _sessions(packed.sessions)
    handles = _handles(packed.base_lengths, packed.base_digests, len(sessions))
    bounds = _bounds(packed.counts, len(sessions), size // _ID.itemsize)
    parents = np.frombuffer(packed.parents, _ID)
    tokens = np.frombuffer(packed.tokens, _ID)
    confidences = np.frombuffer(packed.confidences, _CONFIDENCE)
    _require_order(parents, bounds)
    return [
        Growth(session, base, parents[start:end], tokens[start:end], confidences[start:end])
        for session, base, start, end in zip(sessions, handles, bounds[:-1], bounds[1:], strict=True)
    ]


def _require_order(parents: IntArray, bounds: Sequence[int]) -> None:
    """Every parent is the base or an earlier node of the same session. parents: [nodes]; bounds: [sessions + 1]."""
    require(_in_order(parents, np.asarray(bounds, np.int64)), "a parent does not come before its child")


@compiled
def _in_order(parents: IntArray, bounds: npt.NDArray[np.int64]) -> bool:
    for session in range(len(bounds) - 1):
        for node in range(bounds[session], bounds[session + 1]):
            if not -1 <= parents[node] < node - bounds[session]:
                return False
    return True
