"""A drafter with another tokenizer than the target's: guesses cross as text.

The target's tokens become text, the text the draft's tokens; what the draft guesses becomes text again and then the target's
tokens, a chain. Noise is one number for each token of a vocabulary, so that two of them can't share it: where the target
samples, the draft's likeliest is proposed. How the last few characters are cut into tokens changes as text is added, so that
the draft's prefix ends a little before the text does; the rest hangs in the draft's tree as a path that is certain.
Source: Timor et al. 2025 (https://arxiv.org/abs/2502.05202), and "universal assisted generation" in transformers.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine import tree_loops as loops
from engine.drafters import Drafter
from engine.kv import PoolExhausted
from engine.text import UNFINISHED, TextStream
from engine.tree import ROOT, Moved, TokenTree
from engine.types import SamplingParams

_TAIL = 4  # draft tokens at the end of the text that may still be cut otherwise
_PARTS = 4  # tokens that a character can be cut into
_CONTEXT = 16  # characters before a text that a tokenizer sees: many treat a beginning otherwise
_CUT_OFF = 0.5  # that the last token of a guess would not go on
_GUESSES = 4  # of full length that the tree has room for


class _Session:
    """The text of one sequence, and the part of it that the draft holds as a prefix."""

    def __init__(self, root: int, greedy: bool, length: int, stream: TextStream) -> None:
        self.tree = TokenTree(root, _GUESSES * length + 1, greedy)  # of the target's tokens
        self.stream = stream
        self.whole = True  # the text ends with a whole character
        self.before = ""  # the last characters of the text that the draft holds
        self.settled: list[int] = []  # its last tokens of that, from a whole character on
        self.text = ""  # what comes behind it
        self.tail: list[int] = []  # the same as the draft's tokens


class OtherTokenizerDrafter:
    """Implements Drafter with another one over the vocabulary of another tokenizer, which nobody else may use."""

    def __init__(
        self,
        inner: Drafter,
        draft_tokenizer: PreTrainedTokenizerFast,
        target_tokenizer: PreTrainedTokenizerFast,
        length: int = 12,
    ) -> None:
        """inner: goes on below what others hang into its trees, as a ModelDrafter does, and deeper than `length` by 8.

        length: draft tokens of a guess.
        """
        self._inner = inner
        self._stream = partial(TextStream, target_tokenizer, special=True)
        self._draft, self._target = draft_tokenizer.backend_tokenizer, target_tokenizer.backend_tokenizer
        self._length = length
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self.close(session)
        held = _Session(tokens[-1], params.temperature == 0, self._length, self._stream())
        self._read(held, tokens)
        prefix = self._settle(held) or [0]  # a drafter needs a token; any does where there is no text yet
        self._inner.open(session, prefix, SamplingParams())
        self._sessions[session] = held

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter. Raises PoolExhausted, after which the session must be closed."""
        held = self._sessions[session]
        self._read(held, tokens)
        if settled := self._settle(held):
            try:
                self._inner.commit(session, settled)
            except PoolExhausted:
                self.close(session)
                raise
        return held.tree.commit(tokens)

    def grow(self) -> list[int]:
        """See Drafter."""
        for session, held in self._sessions.items():
            _insist(self._inner.tree(session), held.tail)
        grown = self._inner.grow()
        for session in grown:
            self._translate(session)
        return grown

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        if self._sessions.pop(session, None) is not None:
            self._inner.close(session)

    def check(self) -> None:
        """See Drafter."""
        self._inner.check()
        for session, held in self._sessions.items():
            held.tree.check()
            assert held.tail == self._encode(held).ids, "the draft's tokens are not the text's"
            assert len(held.tail) <= _TAIL + _PARTS, "text piles up before the draft"
            self._inner.tree(session).check()

    def _encode(self, held: _Session) -> "_Cut":
        return _cut(self._draft, held.before, held.text)

    def _read(self, held: _Session, tokens: Sequence[int]) -> None:
        """Adds tokens' text."""
        for token in tokens:
            piece = held.stream.push(token)
            held.text += piece
            held.whole = bool(piece)

    def _settle(self, held: _Session) -> list[int]:
        """Cuts the text anew, and takes from its beginning the draft's tokens that will not change any more."""
        cut = self._encode(held)
        settled = len(cut.ids) - _TAIL
        while settled > 0 and cut.starts[settled] < cut.ends[settled - 1]:
            settled -= 1  # a character is more than one token
        if settled <= 0:
            held.tail = cut.ids
            return []
        at = cut.ends[settled - 1]
        held.before, held.text = (held.before + held.text[:at])[-_CONTEXT:], held.text[at:]
        first = max(0, settled - _TAIL)
        while first > 0 and cut.starts[first] < cut.ends[first - 1]:
            first -= 1  # with all of a character, or decoders make nothing of it
        held.settled = cut.ids[first:settled]
        held.tail = self._encode(held).ids
        return cut.ids[:settled]

    def _translate(self, session: int) -> None:
        """Hangs what the draft thinks likeliest behind the text into the session's tree."""
        held = self._sessions[session]
        tokens, confidences = _likeliest(self._inner.tree(session), held.tail, self._length)
        if not tokens or not held.whole:
            return
        known = len(self._draft.decode(held.settled, skip_special_tokens=False))
        path = [*held.settled, *held.tail]
        pieces = [
            self._draft.decode([*path, *tokens[:n]], skip_special_tokens=False)[known:] for n in range(len(tokens) + 1)
        ]
        ends = [len(piece.rstrip(UNFINISHED)) - len(held.text) for piece in pieces]  # of each draft token
        if not pieces[-1].startswith(held.text) or ends[-1] <= 0:
            return
        guess = pieces[-1][len(held.text) : len(held.text) + ends[-1]]
        ids, stops = self._as_targets(held, guess)
        held.tree.hang(ids, _shared_out(stops, ends, confidences))

    def _as_targets(self, held: _Session, guess: str) -> tuple[list[int], list[int]]:
        """A guess as the target's tokens, and where in it each one ends."""
        cut = _cut(self._target, (held.before + held.text)[-_CONTEXT:], guess)
        return cut.ids, cut.ends


class _Cut(NamedTuple):
    """A text as tokens, and where in it each begins and ends."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def _cut(tokenizer: Tokenizer, before: str, text: str) -> _Cut:
    """Cut with the text before it where that has a token end there."""
    encoding = tokenizer.encode(before + text, add_special_tokens=False)
    first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= len(before)), len(encoding.ids))
    if first and encoding.offsets[first - 1][1] != len(before):
        encoding, first, before = tokenizer.encode(text, add_special_tokens=False), 0, ""
    starts, ends = ([place[side] - len(before) for place in encoding.offsets[first:]] for side in (0, 1))
    return _Cut(encoding.ids[first:], starts, ends)


def _insist(tree: TokenTree, path: Sequence[int]) -> None:
    """Makes a path from the root certain, and what contradicts it impossible."""
    node = ROOT
    for token in path:
        tree.confidence[np.flatnonzero(tree.parent[: tree.size] == node)] = 0
        node = tree.add(node, token, 1.0)
        if node < 0:
            break
        tree.confidence[node] = 1.0
    loops.reweigh(tree.nodes, tree.size)


def _likeliest(tree: TokenTree, path: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The most confident child of each node behind a path, and the confidences."""
    start = tree.path(path)
    if start < 0:
        return [], []
    nodes = tree.chain(count, start=start)
    return tree.token[nodes].tolist(), tree.confidence[nodes].tolist()


def _shared_out(stops: Sequence[int], ends: Sequence[int], confidences: Sequence[float]) -> list[float]:
    """The confidence of each of the target's tokens, which end at `stops`: of the draft's tokens that begin in it.

    ends: where the text before the guess and each of the draft's tokens end.
    """
    certain = list(accumulate(confidences, mul, initial=1.0))
    begun = [certain[sum(end < stop for end in ends[:-1])] for stop in stops]
    shares = [now / before if before else 0.0 for now, before in zip(begun, [1.0, *begun], strict=False)]
    return [*shares[:-1], shares[-1] * _CUT_OFF] if shares else []
