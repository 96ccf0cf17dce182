"""The draft's side as a pure state machine: messages in, commands out, no clock, socket or tensor inside.

It decides what the drafter holds: a prefix that doesn't match its handle is asked for again, stale and doubled messages
change nothing, and sessions end with their stream or their lease.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.prefix import HandleChain
from engine.tree import ROOT, TokenTree
from engine.types import Close, Commit, Down, Growth, NeedPrefix, Open, Renew, SamplingParams, Up

LEASE_S = 30.0  # a session that is neither committed nor renewed for this long ends
MOST_TOLD = 512
MAX_SESSIONS = 1024  # on one draft replica; more are refused silently, which costs their speed only
REFUSED_S = 1.0  # so long nothing is said of a refused session: its prefix would come again with every commit


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Command: the drafter shall hold this prefix under this key."""

    key: int
    tokens: tuple[int, ...]
    params: SamplingParams
    prompt: int = 0  # how many of the tokens are the prompt


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """Command: append tokens. `resend`: the mirror has nothing below the new root, send that subtree again."""

    key: int
    tokens: tuple[int, ...]
    resend: bool


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Command: free this key."""

    key: int


Command = OpenSession | CommitTokens | CloseSession


@dataclass
class _Session:
    key: int
    tokens: list[int]
    chain: HandleChain
    heard: float  # seconds: when its target last spoke of it


class DraftState:
    """Sessions of one draft replica by (stream, session id); the drafter knows each by a key of its own."""

    def __init__(self, most_told: int = MOST_TOLD) -> None:
        """most_told: nodes of a session that are worth telling."""
        self._most_told = most_told
        self._sessions: dict[tuple[int, int], _Session] = {}
        self._names: dict[int, tuple[int, int]] = {}  # key -> (stream, session id)
        self._refused: dict[tuple[int, int], float] = {}  # until when
        self._unknown: dict[int, dict[int, None]] = {}  # by stream: session ids whose prefix is needed
        self._next_key = 0

    # events

    def received(self, stream: int, message: Down, now: float) -> list[Command]:
        """A target said something at `now` (seconds)."""
        match message:
            case Open():
                return self._open(stream, message, now)
            case Commit():
                return self._commit(stream, message, now)
            case Renew():
                return self._renew(stream, message, now)
            case Close():
                return [command for session in message.sessions for command in self._close((stream, session))]

    def stream_closed(self, stream: int) -> list[Command]:
        """A target is gone: so are its sessions."""
        self._unknown.pop(stream, None)
        self._refused = {name: until for name, until in self._refused.items() if name[0] != stream}
        gone = [name for name in self._sessions if name[0] == stream]
        return [command for name in gone for command in self._close(name)]

    def expire(self, now: float) -> list[Command]:
        """Ends the sessions whose lease ran out."""
        self._refused = {name: until for name, until in self._refused.items() if now < until}
        gone = [name for name, held in self._sessions.items() if now - held.heard > LEASE_S]
        return [command for name in gone for command in self._close(name)]

    def refused(self, key: int, now: float) -> None:
        """The drafter has no room for a session: it is forgotten, its target decodes alone; asked for again later."""
        name = self._names.pop(key)
        del self._sessions[name]
        self._refused[name] = now + REFUSED_S

    # what the loop asks for

    def growth(self, key: int, tree: TokenTree) -> Growth | None:
        """What a session's target was not told of among the best nodes of its tree; it counts as sent from now on.

        The others follow when they are among the best: what can't be in a window yet would only be work for the target.
        """
        nodes = tree.unsent(self._most_told)
        if key not in self._names or not len(nodes):
            return None
        name = self._names[key]
        tree.sent[nodes] = True
        return Growth(name[1], self._sessions[name].chain.handle, *tree.piece(nodes))

    def stream_of(self, key: int) -> int:
        """The stream that a session came on."""
        return self._names[key][0]

    def questions(self, stream: int) -> list[Up]:
        """Prefixes to ask a stream's target for, each once."""
        unknown = self._unknown.pop(stream, None)
        return [NeedPrefix(tuple(unknown))] if unknown else []

    @property
    def asks(self) -> bool:
        """Whether there are prefixes to ask for."""
        return bool(self._unknown)

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self._sessions)

    def check(self) -> None:
        """Raises AssertionError unless the state is consistent."""
        assert {held.key: name for name, held in self._sessions.items()} == self._names
        for held in self._sessions.values():
            assert held.chain.handle.length == len(held.tokens)

    def _open(self, stream: int, message: Open, now: float) -> list[Command]:
        name = (stream, message.session)
        held = self._sessions.get(name)
        if not message.tokens or self._silent(name, now):
            return []
        if held is None and len(self._sessions) >= MAX_SESSIONS:
            self._refused[name] = now + REFUSED_S
            return []
        if held is not None and _starts_with(held.tokens, message.tokens):
            held.heard = now
            return []  # a repeated or late one: it knows no more than we do
        commands = self._close(name)
        session = _Session(self._next_key, list(message.tokens), HandleChain(message.tokens), now)
        self._next_key += 1
        self._sessions[name] = session
        self._names[session.key] = name
        return [*commands, OpenSession(session.key, message.tokens, message.params, message.prompt)]

    def _commit(self, stream: int, message: Commit, now: float) -> list[Command]:
        held = self._sessions.get((stream, message.session))
        if held is None:
            self._need(stream, message.session, now)
            return []
        held.heard = now
        new = message.handle.length - len(held.tokens)
        if new <= 0 and held.chain.names(message.handle):
            return []  # late or doubled
        if new <= 0 or new > len(message.tokens):
            self._need(stream, message.session, now)
            return []
        tokens = message.tokens[len(message.tokens) - new :]
        if not held.chain.try_extend(tokens, message.handle.digest):
            self._need(stream, message.session, now)
            return []
        held.tokens.extend(tokens)
        return [CommitTokens(held.key, tokens, resend=not message.mirrored)]

    def _renew(self, stream: int, message: Renew, now: float) -> list[Command]:
        for session in message.sessions:
            held = self._sessions.get((stream, session))
            if held is None:
                self._need(stream, session, now)
            else:
                held.heard = now
        return []

    def _close(self, name: tuple[int, int]) -> list[Command]:
        self._refused.pop(name, None)
        held = self._sessions.pop(name, None)
        if held is None:
            return []
        del self._names[held.key]
        return [CloseSession(held.key)]

    def _silent(self, name: tuple[int, int], now: float) -> bool:
        """Whether a session was refused a moment ago."""
        return now < self._refused.get(name, now)

    def _need(self, stream: int, session: int, now: float) -> None:
        if self._silent((stream, session), now):
            return
        if len(self._unknown.setdefault(stream, {})) < MAX_SESSIONS:
            self._unknown[stream][session] = None


def _starts_with(tokens: Sequence[int], prefix: Sequence[int]) -> bool:
    return len(prefix) <= len(tokens) and list(prefix) == list(tokens[: len(prefix)])


def resend(tree: TokenTree) -> None:
    """Marks everything below the root as not sent."""
    tree.sent[ROOT + 1 : tree.size] = False
