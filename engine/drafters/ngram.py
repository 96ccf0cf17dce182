"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens is the guess. No model.

Source: Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.compiled import compiled
from engine.drafters.past import Chains, Past, follow, matches
from engine.drafters.votes import NOTHING
from engine.tree import ROOT, Moved, TokenTree
from engine.tree_loops import Nodes, hang
from engine.types import IntArray, SamplingParams

Shares = npt.NDArray[np.float64]

LONGEST = 4  # tokens that a match is looked for with
_LONGEST_SHARED = 8  # the same where other texts are looked through: short matches there are many, and wrong
_TRUST = 0.3  # in a lookup, before anything is known
DOUBTFUL = 0.2  # a lookup that is right less often stays out of the tree
_AT_ONCE = 4  # nodes looked up in a step
_PLACES = 16  # looked at in other texts
_ROOM = 4  # chains that fit in a tree
_LEARN = 0.05  # weight of the newest lookup
_IN_VAIN = 8  # lookups of no use in a row in a session, after which it looks up rarely
_LOOK_AGAIN = 8  # then: every so many commits
_FIRST_ROOM = 256  # tokens behind a text's first ones
_NO_OTHERS = Past(0)


class GrowingText:
    """A text, and where its last tokens stood before."""

    def __init__(self, tokens: Sequence[int], longest: int = LONGEST) -> None:
        """longest: tokens that a match is looked for with."""
        self.longest = longest
        self.count = 0  # of tokens
        self.tokens = np.empty(_FIRST_ROOM + len(tokens), np.int32)  # valid up to `count`
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        before, self.count = self.count, self.count + len(tokens)
        if self.count > len(self.tokens):
            self.tokens = np.concatenate([self.tokens[:before], np.empty(self.count, np.int32)])
        self.tokens[before : self.count] = tokens

    def lookup(self, count: int, path: Sequence[int] = ()) -> tuple[int, list[int]]:
        """The length of the longest match, 0 if there is none, and up to `count` tokens that followed it.

        path: as if the text went on with these.
        """
        last = np.concatenate([self.tokens[: self.count][-self.longest :], np.asarray(path, np.int32)])
        matched, end = _longest_match(self.tokens, self.count, last[-self.longest :])
        followed: list[int] = self.tokens[end : min(end + count, self.count)].tolist()
        return matched, followed if matched else []


class Earned:
    """How often lookups were right lately, by whether the session is greedy and by the length of the match."""

    def __init__(self) -> None:
        self._right = np.full((2, _LONGEST_SHARED + 1), _TRUST)  # not greedy, greedy

    def right(self, greedy: bool) -> Shares:
        """By the length of the match."""
        rates: Shares = self._right[int(greedy)]
        return rates

    def learn(self, greedy: bool, matched: int, right: bool) -> None:
        """A lookup was right, or not."""
        rates = self.right(greedy)
        rates[matched] += _LEARN * (right - rates[matched])


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
        self._text = GrowingText(tokens, LONGEST if others is None else _LONGEST_SHARED)
        self._others = _NO_OTHERS if others is None else others
        self._greedy = greedy
        self._earned = earned
        self._count = count
        self._guess: tuple[int, int, bool] | None = None  # tokens matched, the token that followed; whether it was hung
        self._vain = 0  # lookups since the last one of use, whose guess was hung and right
        self._commits = 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes what came, and compares it with what the last lookup said."""
        if not self._count:
            return
        if self._guess is not None:
            matched, guessed, hung = self._guess
            right = guessed == tokens[0]
            self._earned.learn(self._greedy, matched, right)
            if right:  # one that was not hung: perhaps the next one is
                self._vain = 0 if hung else min(self._vain, _IN_VAIN - 1)
            self._guess = None
        self._commits += 1
        self._text.extend(tokens)

    def hang(self, tree: TokenTree, doubtful: float = DOUBTFUL) -> None:
        """Hangs what followed the last tokens earlier below the root, unless lookups are right less often than `doubtful`.

        Looking takes time too: where one lookup after the other was of no use, it is only done now and then, and not at all
        where nothing is sure enough.
        """
        if self._count and doubtful < math.inf and (self._vain < _IN_VAIN or self._commits % _LOOK_AGAIN == 0):
            text = self._text.tokens, self._text.count, self._text.longest
            right = self._earned.right(self._greedy)
            found = _hang(text, self._others.chains, right, doubtful, self._count, tree.nodes, tree.size)
            matched, guess, hung, tree.size = found
            self._guess = (matched, guess, hung) if matched else None
            self._vain += 1


@compiled
def _longest_match(tokens: IntArray, count: int, last: IntArray) -> tuple[int, int]:
    """Of the first `count` tokens: how many of `last`, from its end on, stand together in them, and where the latest such
    place ends, before the last token. Zeros where there is none.
    """
    newest = last[len(last) - 1]
    matched, found = 0, 0
    for end in range(count - 1, 0, -1):
        if tokens[end - 1] != newest:
            continue
        length = 1
        while length < min(len(last), end) and tokens[end - 1 - length] == last[len(last) - 1 - length]:
            length += 1
        if length > matched:
            matched, found = length, end
            if matched == len(last):
                break
    return matched, found


@compiled
def _hang(
    text: tuple[IntArray, int, int],
    others: Chains,
    right: Shares,
    doubtful: float,
    most: int,
    nodes: Nodes,
    size: int,
) -> tuple[int, int, bool, int]:
    """Looks up to `most` tokens up, in the session's own text or where others match longer, and hangs them below the root.

    text: tokens, how many of them there are, how long matches are at most. Returns the length of the match (0: none), the
    first token that followed, whether it was hung, and the tree's new size.
    """
    tokens, count, longest = text
    last = tokens[max(0, count - longest) : count]
    matched, end = _longest_match(tokens, count, last)
    followed = tokens[end : min(end + most, count)]
    places, lengths = np.empty(_PLACES, np.int64), np.empty(_PLACES, np.int32)
    found = matches(others, last, places, lengths)
    if found:
        best = np.argmax(lengths[:found])
        if lengths[best] > matched:
            behind = follow(others, places[best : best + 1], most)[0]
            if behind[0] != NOTHING:
                matched, followed = lengths[best], behind[behind != NOTHING]
    if matched == 0:
        return 0, NOTHING, False, size
    confidences = np.empty(len(followed), np.float32)
    for depth in range(len(followed)):  # the first of them made the match longer for the next ones
        confidences[depth] = right[min(matched + depth, longest)]
    hung = right[matched] > doubtful
    if hung:
        size = hang(nodes, size, followed, confidences)
    return matched, followed[0], hung, size


class _Session:
    def __init__(self, tokens: Sequence[int], capacity: int, longest: int, greedy: bool) -> None:
        self.text = GrowingText(tokens, longest)
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
        held.text.extend(tokens)
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
            matched, tokens = held.text.lookup(self._length, tree.token[path[1:]].tolist())
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
