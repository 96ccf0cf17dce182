"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens is the guess. No model.

Source: Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Sequence

import numpy as np

from engine.drafters.past import Past
from engine.drafters.votes import NOTHING
from engine.tree import ROOT, Moved, TokenTree
from engine.types import SamplingParams

LONGEST = 4  # tokens that a match is looked for with
_LONGEST_SHARED = 8  # the same where other texts are looked through: short matches there are many, and wrong
_TRUST = 0.3  # in a lookup, before anything is known
DOUBTFUL = 0.2  # a lookup that is right less often stays out of the tree
_AT_ONCE = 4  # nodes looked up in a step
_PLACES = 16  # looked at in other texts
_ROOM = 4  # chains that fit in a tree
_LEARN = 0.05  # weight of the newest lookup
_IN_VAIN = 8  # wrong guesses in a row in a session, after which it looks up rarely
_LOOK_AGAIN = 4  # then: every so many commits


class NgramIndex:
    """Where the last tokens of a growing text occurred before."""

    def __init__(self, tokens: Sequence[int], longest: int = LONGEST) -> None:
        self._tokens = list(tokens)
        self._longest = longest
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence before the last token ends
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._tokens.extend(tokens)

    def lookup(self, count: int, path: Sequence[int] = ()) -> tuple[int, list[int]]:
        """The length of the longest match, 0 if there is none, and up to `count` tokens that followed it.

        path: as if the text went on with these.
        """
        tokens, ends, longest = self._tokens, self._ends, self._longest
        for end in range(self._indexed + 1, len(tokens)):
            gram = tuple(tokens[max(0, end - longest) : end])
            for start in range(len(gram)):
                ends[gram[start:]] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        last = (*tokens[-longest:], *path)[-longest:]
        for start in range(len(last)):
            end = ends.get(last[start:], 0)
            if end:
                return len(last) - start, tokens[end : end + count]
        return 0, []


class Earned:
    """How often lookups were right lately, by whether the session is greedy and by the length of the match."""

    def __init__(self) -> None:
        self._right = {greedy: [_TRUST] * (_LONGEST_SHARED + 1) for greedy in (True, False)}

    def confidences(self, greedy: bool, matched: int, longest: int, count: int) -> list[float]:
        """That each of `count` tokens is right which followed a match of so many tokens: it grows with them to `longest`."""
        right = self._right[greedy]
        return [right[min(matched + depth, longest)] for depth in range(count)]

    def learn(self, greedy: bool, matched: int, right: bool) -> None:
        """A lookup was right, or not."""
        self._right[greedy][matched] += _LEARN * (right - self._right[greedy][matched])


class Lookup:
    """Prompt lookup beside another drafter: one session's text, and confidences that lookups have earned."""

    def __init__(
        self,
        tokens: Sequence[int],
        greedy: bool,
        earned: Earned,
        count: int,
        others: Past | None = None,
    ) -> None:
        """earned: shared by sessions. count: tokens looked up; 0: none. others: texts that are looked through as well."""
        self._longest = LONGEST if others is None else _LONGEST_SHARED
        self._index = NgramIndex(tokens, self._longest)
        self._others = others
        self._last = list(tokens[-self._longest :])
        self._greedy = greedy
        self._earned = earned
        self._count = count
        self._guess: tuple[int, int, bool] | None = None  # tokens matched, the token that followed; whether it was hung
        self._wrong = 0  # guesses since the last one that was of use, less the right ones that were not hung
        self._commits = 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes what came, and compares it with what the last lookup said."""
        if self._guess is not None:
            matched, guessed, hung = self._guess
            right = guessed == tokens[0]
            self._earned.learn(self._greedy, matched, right)
            self._wrong = min(self._wrong + 1, _IN_VAIN) if not right else 0 if hung else max(self._wrong - 1, 0)
            self._guess = None
        self._commits += 1
        self._index.extend(tokens)
        self._last = [*self._last, *tokens][-self._longest :]

    def _find(self) -> tuple[int, list[int]]:
        """The longest match, and what followed it: in the session's own text, or where others match longer."""
        matched, tokens = self._index.lookup(self._count)
        if self._others is not None:
            places, lengths = self._others.matches(np.asarray(self._last, np.int32), _PLACES)
            if len(lengths) and lengths.max() > matched:
                best = int(lengths.argmax())
                followed = self._others.follow(places[best : best + 1], self._count)[0]
                if followed[0] != NOTHING:
                    return int(lengths[best]), followed[followed != NOTHING].tolist()
        return matched, tokens

    def hang(self, tree: TokenTree, doubtful: float = DOUBTFUL) -> None:
        """Hangs what followed the last tokens earlier below the root, unless lookups are right less often than `doubtful`.

        Looking takes time too: where one guess after the other was wrong, it is only done now and then.
        """
        if self._count and (self._wrong < _IN_VAIN or self._commits % _LOOK_AGAIN == 0):
            matched, tokens = self._find()
            confidences = self._earned.confidences(self._greedy, matched, self._longest, len(tokens))
            hung = bool(tokens) and confidences[0] > doubtful
            self._guess = (matched, tokens[0], hung) if tokens else None
            if hung:
                tree.hang(tokens, confidences)


class _Session:
    def __init__(self, tokens: Sequence[int], capacity: int, longest: int, greedy: bool) -> None:
        self.index = NgramIndex(tokens, longest)
        self.tree = TokenTree(tokens[-1], capacity, greedy)  # expanded: looked up


class NgramDrafter:
    """Implements Drafter: grows a chain of at most `length` tokens where the last 1 to `longest` tokens occurred before.

    Where others hang nodes into its trees, it looks up what follows these as well.
    """

    def __init__(self, length: int = 12, longest: int = LONGEST) -> None:
        self._length = length
        self._longest = longest
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        greedy = params.temperature == 0
        self._sessions[session] = _Session(tokens, _ROOM * self._length + 1, self._longest, greedy)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        held.index.extend(tokens)
        moved = held.tree.commit(tokens)
        held.tree.expanded[ROOT] = False  # more is known now
        return moved

    def grow(self) -> list[int]:
        """See Drafter."""
        return [session for session, held in self._sessions.items() if self._look_up(held)]

    def _look_up(self, held: _Session) -> bool:
        """Hangs what followed the most probable nodes that were not looked up yet; whether there are any."""
        tree = held.tree
        nodes = tree.frontier(_AT_ONCE, tree.capacity)
        for node in nodes:
            path = tree.lineage(node)
            matched, tokens = held.index.lookup(self._length, tree.token[path[1:]].tolist())
            confidence = 1 - 0.5**matched  # the longer the match, the surer
            tree.expanded[node] = True
            for token in tokens:
                node = tree.add(node, token, confidence)
                if node < 0:
                    break
                tree.expanded[node] = True
        return bool(nodes)

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)

    def check(self) -> None:
        """See Drafter."""
        for held in self._sessions.values():
            held.tree.check()
