"""What the tests of `cluster` share: waiting for events, and a draft and a target without models on a lossy link."""

import hashlib
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import numpy as np

from cluster.draft_state import CloseSession, Command, CommitTokens, DraftState, OpenSession, resend
from cluster.link import Link
from cluster.target_state import TargetState
from engine.tree import Moved, TokenTree
from engine.types import Down, Growth, IntArray, KVHandle, SamplingParams, Up
from engine.verify import walk
from tests.faulty_link import FaultyLink, nonsense

PATIENCE_S = 120.0  # far more than anything waited for takes, on a slow machine too
VOCAB = 16
Out = TypeVar("Out")
In = TypeVar("In")


def until(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S, every_s: float = 0.005) -> None:
    """Waits for an event that can only be asked for."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(every_s)


def truth(tokens: Sequence[int]) -> int:
    """What the target without a model chooses after these tokens."""
    return hashlib.blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def row(*tokens: int) -> IntArray:
    """The tokens of a sequence, as an engine shows them."""
    return np.asarray(tokens, np.int32)


def faulty(link: Link[Out, In], seed: int) -> Link[Out, In]:
    """An end that drops, doubles, delays and invents messages."""
    return FaultyLink(link, seed, drop=0.2, duplicate=0.2, delay=0.3, nonsense=0.1)


def path_to(tree: TokenTree, node: int) -> list[int]:
    """The tokens from the root's child to a node."""
    tokens: list[int] = tree.token[tree.lineage(node)][1:].tolist()
    return tokens


def growth(session: int, base: KVHandle, *nodes: tuple[int, int, float]) -> Growth:
    """nodes: (parent, token, confidence)."""
    parents, tokens, confidences = zip(*nodes, strict=True) if nodes else ((), (), ())
    return Growth(
        session, base, np.array(parents, np.int32), np.array(tokens, np.int32), np.array(confidences, np.float32)
    )


class GuessingDrafter:
    """A drafter without a model: guesses what the target will choose, and something else beside. Implements Drafter."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self._trees: dict[int, TokenTree] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        assert session not in self.tokens
        self.tokens[session] = list(tokens)
        self._trees[session] = TokenTree(tokens[-1], 64)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        self.tokens[session] += tokens
        return self._trees[session].commit(tokens)

    def grow(self) -> list[int]:
        return [session for session in self.tokens if self._expand(session)]

    def tree(self, session: int) -> TokenTree:
        return self._trees[session]

    def close(self, session: int) -> None:
        self.tokens.pop(session, None)
        self._trees.pop(session, None)

    def check(self) -> None:
        for session, tree in self._trees.items():
            tree.check()
            assert tree.token[0] == self.tokens[session][-1]

    def _expand(self, session: int) -> bool:
        tree = self._trees[session]
        nodes = tree.frontier(2, max_depth=6) if tree.size + 4 <= tree.capacity else []
        for node in nodes:
            guess = truth([*self.tokens[session], *path_to(tree, node)])
            tree.add(node, guess, 0.8)
            tree.add(node, (guess + 1) % VOCAB, 0.2)
            tree.expanded[node] = True
        return bool(nodes)


class DraftSide:
    """A draft's state machine with its loop around it."""

    def __init__(self) -> None:
        self.state = DraftState()
        self.drafter = GuessingDrafter()
        self.stream = 0

    def apply(self, commands: Sequence[Command]) -> None:
        """Does what the state machine says; every command must make sense to the drafter."""
        for command in commands:
            match command:
                case OpenSession():
                    self.drafter.open(command.key, command.tokens, command.params, command.prompt)
                case CommitTokens():
                    moved = self.drafter.commit(command.key, command.tokens)
                    if command.resend and moved.children:
                        resend(self.drafter.tree(command.key))
                case CloseSession():
                    assert command.key in self.drafter.tokens
                    self.drafter.close(command.key)

    def say(self) -> list[Up]:
        """Everything there is to tell the target."""
        growths = [self.state.growth(key, self.drafter.tree(key)) for key in self.drafter.tokens]
        return [*self.state.questions(self.stream), *(piece for piece in growths if piece is not None)]

    def check(self) -> None:
        """Audits both, and that they hold the same sessions."""
        self.state.check()
        self.drafter.check()
        assert self.state.sessions == len(self.drafter.tokens)


class World:
    """One target, some drafts, and messages on their way that chance delivers, loses, doubles, reorders and garbles."""

    def __init__(self, drafts: int = 2) -> None:
        self.target = TargetState(VOCAB)
        self.tokens: dict[int, list[int]] = {}  # by session of the target
        self.drafts = [DraftSide() for _ in range(drafts)]
        self.down: dict[int, list[Down]] = {}  # on their way, by link
        self.up: dict[int, list[Up]] = {}
        self.linked: dict[int, DraftSide] = {}  # by link
        self.now = 0.0
        self._links = 0

    def link(self, index: int) -> None:
        """A draft comes back with a new stream, after losing the old one."""
        side = self.drafts[index]
        for link in [link for link, other in self.linked.items() if other is side]:
            del self.linked[link], self.down[link], self.up[link]
            self.target.draft_left(link)
            side.apply(side.state.stream_closed(side.stream))
        side.stream += 1
        self.linked[self._links], self.down[self._links], self.up[self._links] = side, [], []
        self.target.draft_joined(self._links)
        self._links += 1

    def open(self, number: int) -> None:
        tokens = [number % VOCAB, number // VOCAB % VOCAB]
        self.tokens[self.target.session_opened(tokens, SamplingParams())] = tokens

    def close(self, session: int) -> None:
        del self.tokens[session]
        self.target.session_closed(session)

    def step(self, session: int) -> bool:
        """One target step over the whole mirror; whether that held anything."""
        tree, tokens = self.target.mirror(session), self.tokens[session]
        paths = [tree.token[tree.lineage(node)][1:].tolist() for node in range(tree.size)]
        choices = np.asarray([truth([*tokens, *path]) for path in paths], np.int32)
        chosen = choices[walk(tree, np.arange(1, tree.size, dtype=np.int32), choices)[0]].tolist()
        tokens += chosen
        held_any = self.target.hit(session)
        self.target.tokens_committed(session, chosen)
        return held_any

    def send(self) -> None:
        """Everything both sides have to say goes on its way."""
        for link, down in self.target.take_messages().items():
            self.down[link] += down
        for link, side in self.linked.items():
            self.up[link] += side.say()

    def deliver(self, link: int, random: Random, fault: str | None = None) -> None:
        """Messages of a link arrive in order, or one of them suffers a fault in either direction."""
        if fault is None:
            arriving: list[Down | Up] = [*self.down[link], *self.up[link]]
            self.down[link], self.up[link] = [], []
        else:
            way: list[Any] = random.choice([self.down[link], self.up[link]])
            if not way:
                return
            message: Down | Up = way.pop(random.randrange(len(way)))
            copies = {"drop": [], "double": [message, message], "reorder": [message]}
            arriving = copies.get(fault, [nonsense(message, random), message])
        for message in arriving:
            self._receive(link, message)

    def _receive(self, link: int, message: Down | Up) -> None:
        side = self.linked[link]
        if isinstance(message, Up):
            self.target.received(link, message)
        else:
            side.apply(side.state.received(side.stream, message, self.now))

    def check(self) -> None:
        self.target.check()
        assert self.target.sessions == len(self.tokens)
        for side in self.drafts:
            side.check()
        for tokens in self.tokens.values():
            assert all(truth(tokens[:end]) == tokens[end] for end in range(2, len(tokens)))

    def exchange(self) -> None:
        """Everything that is said arrives."""
        self.send()
        for link in self.linked:
            self.deliver(link, Random(0))

    def calm(self, rounds: int = 4) -> list[bool]:
        """Rounds without a fault; for each session, whether there was something to verify in the last step."""
        fed: list[bool] = []
        for _ in range(rounds):
            self.exchange()
            self.exchange()  # the question for a prefix, then its answer
            for side in self.drafts:
                side.drafter.grow()
                side.drafter.grow()
            self.exchange()
            fed = [self.step(session) for session in self.tokens]
            self.check()
        return fed
