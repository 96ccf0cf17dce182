"""Retrieval: what followed the last tokens in documents that were given with the deployment, or with a request. No model.

Source: REST, He et al. 2023 (https://arxiv.org/abs/2311.08252). What stands in a request's prompt needs none of this:
n-gram lookup and suffix decoding find it there.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.checkpoint import ModelError
from engine.compiled import compiled
from engine.drafters.votes import NOTHING, hang_votes
from engine.tree import ROOT, Moved, TokenTree
from engine.types import IntArray, SamplingParams, require

SORTED = 32  # tokens by which suffixes are sorted; a power of two


def load_documents(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The token ids of a text file, or of each file below a folder, by name; raises ModelError for what is no text."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise ModelError(f"no documents in {path}")
    return [_read(file, tokenizer) for file in files]


def _read(file: Path, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ModelError(f"the document {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"the document {file} is not UTF-8 text: byte {error.start} is wrong") from None
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Documents:
    """A suffix array over documents; 8 bytes a token, made once and never changed."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        """Raises InvalidRequest for negative token ids."""
        parts = [part for tokens in documents for part in (np.asarray(tokens, np.int32), [NOTHING])]
        self._tokens = np.concatenate([np.full(1, NOTHING, np.int32), *parts]).astype(np.int32)
        separators = 1 + len(parts) // 2
        require(int((self._tokens < 0).sum()) == separators, "documents", "token ids must not be negative")
        self._order = _sort(self._tokens)  # where suffixes begin, in order of their first SORTED tokens

    def matches(self, last: IntArray, count: int) -> tuple[int, IntArray]:
        """The length of the longest match of the last tokens, 0 if there is none, and where up to `count` of them end.

        A longest match that occurs more often is looked at evenly, over what follows: the likely stays the likely.
        """
        length, low, high = _longest(self._tokens, self._order, last[-SORTED:])
        found = min(count, high - low)
        if found == 0:
            return 0, np.zeros(0, np.int32)
        return length, self._order[low + np.arange(found) * (high - low) // found] + np.int32(length - 1)

    def follow(self, ends: IntArray, depth: int) -> IntArray:
        """What came behind each place, [n, depth]; from a document's end on NOTHING."""
        at = ends[:, None] + 1 + np.arange(depth)
        rows: IntArray = self._tokens[np.minimum(at, len(self._tokens) - 1)]  # the last is NOTHING
        rows[~np.logical_and.accumulate(rows != NOTHING, axis=1)] = NOTHING
        return rows

    def check(self) -> None:
        """Raises AssertionError unless every suffix stands in its place."""
        n = len(self._tokens)
        assert np.array_equal(np.sort(self._order), np.arange(n)), "a suffix is lost"
        equal = np.ones(n - 1, np.bool_)  # of neighbours, so far
        for depth in range(SORTED):
            at = self._order + depth
            token = np.where(at < n, self._tokens[np.minimum(at, n - 1)], NOTHING)
            assert not (equal & (token[:-1] > token[1:])).any(), "suffixes are out of order"
            equal &= token[:-1] == token[1:]


def _sort(tokens: IntArray) -> IntArray:
    """Where suffixes begin, sorted by their first SORTED tokens: ranks by 1, 2, 4... tokens, each made of the last."""
    _, rank = np.unique(tokens, return_inverse=True)
    width = 1
    while width < SORTED:
        behind = np.zeros(len(rank), np.int64)
        behind[:-width] = rank[width:] + 1  # nothing comes before everything
        _, rank = np.unique(rank.astype(np.int64) * (len(rank) + 1) + behind, return_inverse=True)
        width *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


@compiled
def _bound(tokens: IntArray, order: IntArray, wanted: IntArray, above: bool) -> int:
    """The first suffix not below the wanted tokens; or above them, which a suffix that begins with them is not."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        before = above  # where the suffix begins with all of them
        for i in range(len(wanted)):
            at = order[middle] + i
            token = tokens[at] if at < len(tokens) else -1
            if token != wanted[i]:
                before = token < wanted[i]
                break
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _longest(tokens: IntArray, order: IntArray, last: IntArray) -> tuple[int, int, int]:
    """The length of the longest match of the last tokens, and its range in `order`."""
    for n in range(len(last), 0, -1):
        wanted = last[len(last) - n :]
        low = _bound(tokens, order, wanted, False)
        high = _bound(tokens, order, wanted, True)
        if high > low:
            return n, low, high
    return 0, 0, 0


class _Session:
    def __init__(self, tokens: Sequence[int], greedy: bool) -> None:
        self.last = list(tokens[-SORTED:])
        self.tree = TokenTree(tokens[-1], greedy=greedy)
        self.fresh = True  # the root moved since the tree was grown


class RetrievalDrafter:
    """Implements Drafter: places in the documents where the most of the last tokens stand vote on how they go on.

    Every session sees all documents: where they belong to a request, it has a drafter for itself.
    """

    def __init__(self, documents: Documents, nodes: int = 24, depth: int = 12, places: int = 64) -> None:
        """nodes: added after each commit, at most `depth` deep. places: of a match that are looked at."""
        self._documents = documents
        self._nodes, self._depth, self._places = nodes, depth, places
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self._sessions[session] = _Session(tokens, params.temperature == 0)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter."""
        held = self._sessions[session]
        held.last = [*held.last, *tokens][-SORTED:]
        held.fresh = True
        return held.tree.commit(tokens)

    def grow(self) -> list[int]:
        """See Drafter."""
        grown = [session for session, held in self._sessions.items() if held.fresh]
        for session in grown:
            held = self._sessions[session]
            held.fresh = False
            held.tree.expanded[ROOT] = True  # looked at, whether anything was found or not
            matched, ends = self._documents.matches(np.asarray(held.last, np.int32), self._places)
            trust = 1 - 0.5 ** (matched + np.arange(self._depth, dtype=np.float32))  # the longer the match, the surer
            rows = self._documents.follow(ends, self._depth)
            hang_votes(held.tree, rows, np.ones(len(ends), np.float32), self._nodes, trust)
        return grown

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)

    def check(self) -> None:
        """See Drafter."""
        self._documents.check()
        for held in self._sessions.values():
            held.tree.check()
