"""Another draft service as a drafter: the inner one of a cascade, in an actor of its own.

To the service, this is a target like others: it gets commits and sends growth, and nobody waits for it. Its guesses are as
old as the link makes them; a service that is dead or slow guesses nothing.
"""

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cluster.grpc_link import connect
from cluster.kept_links import CONNECT_TIMEOUT_S, KeptLinks
from cluster.link import Link
from cluster.linked import LinkedDrafts
from cluster.speculate import LinkOptions
from cluster.target_state import MIRROR_NODES, RENEW_EVERY_S, TargetState
from cluster.trace import Trace
from engine.tree import Moved, TokenTree
from engine.types import Down, SamplingParams, Up


@dataclass
class _Session:
    number: int  # as the service knows it
    tree: TokenTree  # what came of the mirror, and what others hung there, which the service never hears of
    seen: int = 1  # nodes of the mirror


class RemoteDrafter:
    """Implements Drafter: its trees are what a draft service grows. Its methods are for one thread, but `add_link`."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: of the tokens that it is told; guesses of others are dropped."""
        self._vocab_size = vocab_size
        self._state = TargetState(vocab_size, replica=int.from_bytes(os.urandom(2)))
        self._drafts = LinkedDrafts(self._state, Trace(), None)
        self._made: queue.SimpleQueue[Link[Down, Up]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._sessions: dict[int, _Session] = {}
        self._next_renewal = time.monotonic() + RENEW_EVERY_S
        self._committed = False  # something, since it grew last

    def add_link(self, link: Link[Down, Up]) -> None:
        """A service is there. May be called from any thread."""
        self._made.put(link)

    def keep_linked(self, address: str) -> None:
        """Connects to the service at "host:port", in the background, whenever there is no link."""
        options = LinkOptions(vocab_size=self._vocab_size)
        links = KeptLinks(lambda address: connect(address, CONNECT_TIMEOUT_S, options), self.add_link)
        keep = partial(links.keep, lambda: [address], self._closing)
        threading.Thread(target=keep, name="paceline-inner-link", daemon=True).start()

    def hang_up(self) -> None:
        """Ends all links and makes no more: the service forgets the sessions, which go on without guesses."""
        self._closing.set()
        self._drafts.close()

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self.close(session)
        number = self._state.session_opened(tokens, params, prompt)
        tree = TokenTree(tokens[-1], 2 * MIRROR_NODES, params.temperature == 0)
        self._sessions[session] = _Session(number, tree)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        self._drafts.accepted(held.number, len(self._state.mirror(held.number).along(tokens)))
        self._committed = True
        self._state.tokens_committed(held.number, tokens)
        held.seen = self._state.mirror(held.number).size
        return held.tree.commit(tokens)

    def grow(self) -> list[int]:
        """See Drafter. Takes in what has come, and says what there is to say; it waits for nothing."""
        while not self._made.empty():
            self._drafts.join(self._made.get())
        if time.monotonic() > self._next_renewal:
            self._next_renewal = time.monotonic() + RENEW_EVERY_S
            self._state.renewal_due()
        if self._committed:  # what came before the commits was judged by them
            self._committed = False
            self._drafts.stepped()
        self._drafts.receive()
        self._drafts.send()
        return [session for session, held in self._sessions.items() if self._take(held)]

    def _take(self, held: _Session) -> bool:
        """Takes over what is new in the mirror; whether there was anything."""
        mirror = self._state.mirror(held.number)
        if mirror.size == held.seen:
            return False
        held.seen = mirror.size
        return held.tree.adopt(mirror, MIRROR_NODES, known=False) > 0

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        held = self._sessions.pop(session, None)
        if held is not None:
            self._state.session_closed(held.number)

    def check(self) -> None:
        """See Drafter."""
        self._state.check()
        assert self._state.sessions == len(self._sessions), "a session is left behind"
        for held in self._sessions.values():
            held.tree.check()
            assert self._state.tokens(held.number)[-1] == held.tree.token[0], "the mirror has another root"
