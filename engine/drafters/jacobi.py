"""Jacobi decoding: what the target chose behind wrong guesses is the next guess. No model but the target itself.

Sources: Santilli et al. 2023 (https://arxiv.org/abs/2305.10427) for the iteration; Lookahead Decoding, Fu et al. 2024
(https://arxiv.org/abs/2402.02057), for the pool of n-grams seen along it. Noise belongs to positions here, so the target's
choice is a function of the tokens before at any temperature, and sampled sessions iterate just as well.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from engine.drafters.votes import NOTHING, hang_votes
from engine.tree import ROOT, Moved, TokenTree
from engine.types import IntArray, SamplingParams

GRAM = 4  # tokens of an n-gram in the pool
_POOLED = 0.5  # confidence in what the pool agrees on
_GUESSED = 0.3  # in the next token of the trajectory


class Pool:
    """The latest n-grams, by their first token: at most `each` for each of the `tokens` latest ones."""

    def __init__(self, tokens: int, each: int) -> None:
        self._tokens, self._each = tokens, each
        self._by_token: dict[
            int, dict[tuple[int, ...], int]
        ] = {}  # first token -> the others -> times seen, oldest first

    def add(self, gram: Sequence[int]) -> None:
        """Takes an n-gram, or counts it once more."""
        first, *others = gram
        behind = self._by_token.pop(first, {})
        behind[tuple(others)] = behind.pop(tuple(others), 0) + 1
        self._by_token[first] = behind
        if len(behind) > self._each:
            del behind[next(iter(behind))]
        if len(self._by_token) > self._tokens:
            del self._by_token[next(iter(self._by_token))]

    def behind(self, token: int) -> Mapping[tuple[int, ...], int]:
        """What was seen behind a token, and how often."""
        return self._by_token.get(token, {})

    def check(self) -> None:
        """Raises AssertionError unless the pool is as small as it must be."""
        assert len(self._by_token) <= self._tokens, "too many tokens"
        for behind in self._by_token.values():
            assert 0 < len(behind) <= self._each, "too many n-grams of a token, or none"
            assert all(len(others) == GRAM - 1 and count > 0 for others, count in behind.items())


class _Session:
    def __init__(self, tokens: Sequence[int], pool: Pool, greedy: bool) -> None:
        self.last: list[int] = []  # tokens of the text: what fills guesses up, and begins n-grams
        self.pool = pool
        # The guess for each position behind the root: the token, behind those that it came of in earlier steps.
        self.guess: list[tuple[int, ...]] = []
        self.tree = TokenTree(tokens[-1], greedy=greedy)
        self.fresh = True  # the root moved since the tree was grown

    def read(self, tokens: Sequence[int], kept: int) -> None:
        """Takes committed tokens and their n-grams."""
        text = [*self.last[-(GRAM - 1) :], *tokens]
        for start in range(len(text) - GRAM + 1):
            self.pool.add(text[start : start + GRAM])
        self.last = [*self.last, *tokens][-kept:]


class JacobiDrafter:
    """Implements Drafter and Learner: a chain of `length` guesses that the target corrects, and `nodes` from n-grams.

    All of it is a session's own: its text, and what the target chose for it. A session holds at most `tokens` x `each`
    n-grams of GRAM tokens.
    """

    def __init__(self, length: int = 8, nodes: int = 16, tokens: int = 1024, each: int = 8) -> None:
        self._length, self._nodes = length, nodes
        self._tokens, self._each = tokens, each
        self._kept = max(length, GRAM)
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        held = _Session(tokens, Pool(self._tokens, self._each), params.temperature == 0)
        held.read(tokens[-self._tokens * self._each :], self._kept)
        self._sessions[session] = held

    def learn(self, session: int, tree: TokenTree, nodes: IntArray, choices: Sequence[int]) -> None:
        """See Learner."""
        held = self._sessions[session]
        chosen = dict(zip([ROOT, *nodes.tolist()], choices, strict=True))
        chain = [ROOT, *tree.along([trail[-1] for trail in held.guess])]
        corrected: list[tuple[int, ...]] = []
        for trail, node in zip([(held.last[-1],), *held.guess], chain, strict=False):
            if chosen.get(node, NOTHING) == NOTHING:  # not verified, or nothing is allowed there
                break
            corrected.append((*trail, chosen[node])[-GRAM:])
            if len(corrected[-1]) == GRAM:
                held.pool.add(corrected[-1])
        held.guess[: len(corrected)] = corrected

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        held.read(tokens, self._kept)
        held.guess = held.guess[len(tokens) :]
        held.fresh = True
        return held.tree.commit(tokens)

    def grow(self) -> list[int]:
        """See Drafter."""
        grown = [session for session, held in self._sessions.items() if held.fresh]
        for session in grown:
            held = self._sessions[session]
            held.fresh = False
            held.tree.reset(held.last[-1])  # older guesses for the same positions would stand in the way
            seen = held.pool.behind(held.last[-1])
            rows = np.asarray(list(seen), np.int32).reshape(len(seen), GRAM - 1)
            votes = np.asarray(list(seen.values()), np.float32)
            hang_votes(held.tree, rows, votes, self._nodes, np.full(GRAM - 1, _POOLED, np.float32))
            self._fill(held)
            held.tree.hang([trail[-1] for trail in held.guess], [_GUESSED] * self._length)
        return grown

    def _fill(self, held: _Session) -> None:
        """Guesses for the positions that have none: n-grams, one behind the other, else tokens of the text itself."""
        while len(held.guess) < self._length:
            seen = held.pool.behind(held.guess[-1][-1] if held.guess else held.last[-1])
            filler = held.last[len(held.guess) % len(held.last)]
            likeliest = max(seen, key=lambda others: seen[others]) if seen else (filler,)
            held.guess += [(token,) for token in likeliest]
        del held.guess[self._length :]

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
            held.pool.check()
            assert held.tree.token[ROOT] == held.last[-1], "the tree is of another text"
            assert len(held.last) <= self._kept, "too much of the text"
            assert len(held.guess) <= self._length, "too many guesses"
            assert all(0 < len(trail) <= GRAM for trail in held.guess), "a guess that came of nothing, or of too much"
