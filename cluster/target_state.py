"""The target's side of speculation as a pure state machine: events in, messages out, no clock, socket or tensor inside.

Every session has a mirror of the tree that its draft grows. Growth is grafted where it fits what was committed since, a
commit moves the mirror's root, and the messages to each draft are collected until the loop sends them.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from engine.drafters.ngram import DOUBTFUL, Earned, Lookup
from engine.drafters.past import Past
from engine.prefix import HandleChain
from engine.tree import ROOT, TokenTree
from engine.types import Close, Commit, Down, Growth, NeedPrefix, Open, Renew, SamplingParams, Up

COMMIT_TAIL = 16  # tokens a commit repeats, so that lost ones are made up for
MIRROR_NODES = 2048
RENEW_EVERY_S = 5.0  # so often drafts are told which sessions still live
_MOST_ASKED = 8  # a draft that asks for a prefix and never grows anything is told it after 1, 2, 4... 256 tokens more
SESSION_BITS = 40  # of a session id; the bits above name the replica that minted it


@dataclass
class Counters:
    """What happened to growth, and on its way."""

    grown: int = 0  # nodes grafted
    dropped: int = 0  # growth messages that fitted nothing: late, foreign or nonsense
    lost: int = 0  # wire messages that links lost, full ones or to damage
    healed: int = 0  # commits that asked the draft to send its subtree again
    attached: int = 0  # times a session was given to a draft
    reattached: int = 0  # of them, since a draft left or joined; not since drafts were left alone, or no longer
    reopened: int = 0  # times a draft asked for a prefix


@dataclass
class _Session:
    params: SamplingParams
    prompt: int  # how many of the tokens are the prompt
    tokens: list[int]
    _chain: HandleChain  # follows the tokens where a handle is asked for
    mirror: TokenTree
    lookup: Lookup
    alone: bool  # nobody guesses for it
    begun: int  # tokens that it was opened with
    draft: int | None = None
    opening: bool = False  # the draft gets its prefix with the next messages
    again: int = 0  # tokens that it must have before the draft may ask for its prefix again
    asked: int = 0  # how often the draft did, since growth fitted

    @property
    def chain(self) -> HandleChain:
        """The handles of its tokens."""
        self._chain.extend(self.tokens[len(self._chain) :])
        return self._chain


class TargetState:
    """All sessions of one target replica, and the drafts they are given to."""

    def __init__(
        self,
        vocab_size: int,
        replica: int = 0,
        lookup: int = 0,
        mirror_nodes: int = MIRROR_NODES,
        earlier: int = 0,
    ) -> None:
        """replica: distinguishes this replica's session ids from those of others on the same draft.

        lookup: how many tokens the mirrors get at once where the text repeats itself, before the draft has said anything.
        mirror_nodes: of each mirror; what doesn't fit is dropped.
        earlier: tokens of outputs that have ended in which is looked up too; 0: none.
        """
        self._mirror_nodes = mirror_nodes
        self._lookup = lookup
        self.doubtful = DOUBTFUL  # what is looked up and right less often stays out of the mirrors
        self._earned = Earned()
        self._earlier = Past(earlier) if earlier else None
        self._vocab_size = vocab_size
        self._replica = replica
        self._next_session = replica << SESSION_BITS
        self._sessions: dict[int, _Session] = {}
        self._drafts: dict[int, list[Down]] = {}  # messages not taken yet
        self._alone: Set[int] = frozenset()  # drafts that get no sessions
        self.counters = Counters()

    # events

    def draft_joined(self, draft: int) -> None:
        """A draft can take sessions; those without one go to it, unless it is left alone from the start."""
        self._drafts[draft] = []
        self.counters.reattached += self._attach_those_without()

    def draft_left(self, draft: int) -> None:
        """A draft is gone: its sessions go to another, if there is one. Mirrors stay, their nodes are as good as before."""
        self._drafts.pop(draft, None)
        self._alone -= {draft}
        self._leave(draft)
        self.counters.reattached += self._attach_those_without()

    def drafts_left_alone(self, drafts: Set[int]) -> None:
        """These, of all drafts, get no sessions until others are named. What they have goes to the rest, if there is one."""
        if drafts == self._alone:
            return
        begun, self._alone = drafts - self._alone, frozenset(drafts)
        for draft in begun:
            if left := self._leave(draft):
                self._drafts[draft].append(Close(tuple(left)))
        self._attach_those_without()

    def session_opened(
        self, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None, alone: bool = False
    ) -> int:
        """A sequence starts whose first `prompt` tokens, or all, are its prompt; the new session's id.

        alone: no draft gets it, and nothing is looked up.
        """
        session = self._next_session
        self._next_session += 1
        prompt = len(tokens) if prompt is None else prompt
        mirror = TokenTree(tokens[-1], self._mirror_nodes, params.temperature == 0)
        count = 0 if alone else self._lookup
        lookup = Lookup(tokens, params.temperature == 0, self._earned, count, self._earlier)
        lookup.hang(mirror, self.doubtful)
        held = _Session(params, prompt, list(tokens), HandleChain(), mirror, lookup, alone, len(tokens))
        self._sessions[session] = held
        if not alone:
            self._attach(session, held)
        return session

    def tokens_committed(self, session: int, tokens: Sequence[int]) -> bool:
        """A step committed tokens (at least one); whether the mirror holds a child below the new root: a hit.

        The draft is told what is there without looking up: where that is nothing, its growth is needed as before.
        """
        held = self._sessions[session]
        held.tokens.extend(tokens)
        hit = held.mirror.commit(tokens).children > 0
        held.lookup.commit(tokens)
        held.lookup.hang(held.mirror, self.doubtful)
        if held.draft is not None:
            tail = held.tokens[-max(len(tokens), COMMIT_TAIL) :]
            self._drafts[held.draft].append(Commit(session, held.chain.handle, tuple(tail), hit))
            self.counters.healed += not hit
        return held.mirror.size > 1

    def not_told(self, message: Down) -> None:
        """No bytes may carry a message, as with too long a prefix: no draft gets its session, which may have ended."""
        if isinstance(message, (Open, Commit)) and (held := self._sessions.get(message.session)):
            held.alone, held.draft = True, None

    def session_closed(self, session: int) -> None:
        """A sequence ended."""
        held = self._sessions.pop(session)
        if held.draft is not None:
            self._drafts[held.draft].append(Close((session,)))
        if self._earlier is not None and len(held.tokens) > held.begun:
            self._earlier.begin()
            self._earlier.extend(held.tokens[held.begun :])

    def received(self, draft: int, message: Up) -> None:
        """A draft said something; what makes no sense is counted and dropped."""
        if isinstance(message, NeedPrefix):
            for session in message.sessions:
                held = self._sessions.get(session)
                if held is not None and held.draft == draft and not held.opening and len(held.tokens) >= held.again:
                    self.counters.reopened += 1
                    held.again = len(held.tokens) + (1 << min(held.asked, _MOST_ASKED))
                    held.asked += 1
                    self._open(session, held)
        else:
            self.counters.dropped += not self._graft(draft, message)

    def renewal_due(self) -> None:
        """Time to tell every draft which sessions still live."""
        for draft, messages in self._drafts.items():
            live = tuple(session for session, held in self._sessions.items() if held.draft == draft)
            if live:
                messages.append(Renew(live))

    # what the loop asks for

    def mirror(self, session: int) -> TokenTree:
        """The session's mirror; its root is the last committed token."""
        return self._sessions[session].mirror

    def tokens(self, session: int) -> list[int]:
        """The session's committed tokens."""
        return self._sessions[session].tokens

    def hit(self, session: int) -> bool:
        """Whether the mirror holds a child below the root."""
        return self._sessions[session].mirror.size > 1

    def attached(self, session: int) -> bool:
        """Whether a draft works for this session."""
        return self._sessions[session].draft is not None

    def draft_of(self, session: int) -> int | None:
        """The draft that works for this session."""
        return self._sessions[session].draft

    def take_messages(self) -> dict[int, list[Down]]:
        """The messages for each draft since the last call."""
        taken = {draft: messages for draft, messages in self._drafts.items() if messages}
        for draft, messages in taken.items():
            self._drafts[draft] = []
            for message in messages:
                if isinstance(message, Open) and message.session in self._sessions:
                    self._sessions[message.session].opening = False
        return taken

    def check(self) -> None:
        """Raises AssertionError unless the state is consistent."""
        for held in self._sessions.values():
            held.mirror.check()
            assert held.mirror.token[ROOT] == held.tokens[-1], "a mirror's root is not the last committed token"
            assert held.chain.handle.length == len(held.tokens)
            assert held.draft is None or held.draft in self._drafts, "a session is with a draft that left"

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self._sessions)

    def _leave(self, draft: int) -> list[int]:
        """The sessions that were with a draft; now they are with none."""
        left = [session for session, held in self._sessions.items() if held.draft == draft]
        for session in left:
            self._sessions[session].draft = None
        return left

    def _attach_those_without(self) -> int:
        """Gives sessions to drafts, if there are any; how many."""
        before = self.counters.attached
        for session, held in self._sessions.items():
            if held.draft is None and not held.alone:
                self._attach(session, held)
        return self.counters.attached - before

    def _attach(self, session: int, held: _Session) -> None:
        """Gives a session to the draft with the fewest, of those that are not left alone.

        Each replica begins with another draft, or all would begin with the first.
        """
        order = [draft for draft in self._drafts if draft not in self._alone]
        if order:
            first = self._replica % len(order)
            loads = dict.fromkeys(order[first:] + order[:first], 0)
            for other in self._sessions.values():
                if other.draft is not None:
                    loads[other.draft] += 1
            held.draft = min(loads, key=lambda draft: loads[draft])
            self.counters.attached += 1
            held.again = held.asked = 0
            self._open(session, held)

    def _open(self, session: int, held: _Session) -> None:
        assert held.draft is not None
        held.opening = True
        self._drafts[held.draft].append(Open(session, tuple(held.tokens), held.params, held.prompt))

    def _graft(self, draft: int, growth: Growth) -> bool:
        """Merges growth into its session's mirror, unless its draft is left alone; whether anything of it fitted."""
        held = self._sessions.get(growth.session)
        if held is None or draft in self._alone or not held.chain.names(growth.base):
            return False
        behind = len(held.tokens) - growth.base.length
        if not behind <= len(growth.tokens) <= behind + self._mirror_nodes:
            return False  # it ends before the root, or is more than there is room for
        committed = held.tokens[growth.base.length :]
        piece = growth.parents, growth.tokens, growth.confidences
        grafted = held.mirror.graft(committed, *piece, told=True, vocab_size=self._vocab_size)
        self.counters.grown += grafted
        if grafted:
            held.again = held.asked = 0
        return grafted > 0
