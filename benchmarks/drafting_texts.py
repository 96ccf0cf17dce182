"""The three workloads of the drafting benchmark: real text, chosen and edited by a seed.

code        held-out prompts as they are.
edit        a held-out piece of code, then the beginning of a copy of it in which one name is another. What follows would be
            the rest of the copy; a small model copies little, so of all such prompts those count whose plain continuation
            repeats the prompt most. `repeated` of a row says how much that is.
documents   a piece of a held-out file of the standard library, then a later piece of the same file that has much in common
            with it, cut in the middle. Drafters that take documents get the first piece by itself as well.
"""

import builtins
import json
import keyword
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from engine.decode import decode
from engine.runner import ModelRunner
from engine.train import corpus_files, line_pieces, read_texts
from engine.types import GenerationRequest, SamplingParams

Tokens = tuple[int, ...]

GRAM = 4  # tokens in a row that count as a repetition
_CANDIDATES = 12  # edited prompts looked at for each that is taken
_FILES = 20  # held-out files that documents come from
_DOCUMENT, _PROMPT = 128, 64  # tokens at most; with the answer, near what the bundled pair was trained on
_LOOK = 32  # tokens of plain continuation that say how repetitive a prompt is
_BATCH = 16
_NAME = re.compile(r"\b[A-Za-z_]\w{2,}\b")
_NEW_NAMES = ("current", "entry", "first", "item", "other", "source", "value")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, and the documents that a retrieving drafter is given with it."""

    prompt: Tokens
    documents: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class Source:
    """What workloads are made from. `prompts`: a file with one JSON string a line."""

    target: ModelRunner
    tokenizer: PreTrainedTokenizerFast
    prompts: Path

    def texts(self) -> list[str]:
        """The held-out prompts."""
        return [json.loads(line) for line in self.prompts.read_text().splitlines()]

    def ids(self, text: str) -> Tokens:
        """The text's tokens."""
        return tuple(self.tokenizer(text)["input_ids"])


def grams(tokens: Sequence[int]) -> set[Tokens]:
    """Every run of GRAM tokens."""
    return {tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)}


def repeated(prompt: Sequence[int], output: Sequence[int]) -> float:
    """How many runs of GRAM tokens the output has in common with the prompt, per token; one that comes often counts once."""
    tokens = [*prompt, *output]
    return len(grams(prompt) & grams(tokens[len(prompt) - GRAM + 1 :])) / max(1, len(output))


def code(source: Source, count: int, rng: random.Random) -> list[Item]:
    """Held-out prompts."""
    texts = source.texts()
    return [Item(source.ids(text)) for text in rng.sample(texts, min(count, len(texts)))]


def edit(source: Source, count: int, rng: random.Random) -> list[Item]:
    """Code, and the beginning of an edited copy of it: the most repetitive prompts of this kind."""
    edited = [(text, renamed(text, rng)) for text in source.texts() if "def " in text]
    prompts = [source.ids(f"{text}\n\n{beginning(copy)}") for text, copy in edited if copy != text]
    found = rng.sample(prompts, min(_CANDIDATES * count, len(prompts)))
    order = sorted(zip(continuations(source.target, found), found, strict=True), reverse=True)
    return [Item(prompt) for _, prompt in order[:count]]


def renamed(text: str, rng: random.Random) -> str:
    """The text with one of its names replaced everywhere; the same text if no name occurs twice."""
    reserved = {*keyword.kwlist, *dir(builtins), "self"}
    counts = Counter(name for name in _NAME.findall(text) if name not in reserved)
    names = sorted(name for name, n in counts.items() if n > 1)
    if not names:
        return text
    old, new = rng.choice(names), rng.choice(_NEW_NAMES)
    return re.sub(rf"\b{old}\b", new, text)


def beginning(text: str) -> str:
    """The first third of the lines, and half of the next one."""
    lines = text.splitlines(keepends=True)
    whole = len(lines) // 3
    return "".join(lines[:whole]) + lines[whole][: len(lines[whole]) // 2].rstrip()


def continuations(target: ModelRunner, prompts: list[Tokens]) -> list[float]:
    """How much of each prompt's plain continuation repeats the prompt."""
    params = SamplingParams(max_tokens=_LOOK, ignore_eos=True)
    shares = []
    for start in range(0, len(prompts), _BATCH):
        batch = [GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts[start : start + _BATCH])]
        shares += [repeated(made.request.prompt, made.tokens) for made in decode(target, batch)]
    return shares


def documents(source: Source, count: int, rng: random.Random) -> list[Item]:
    """Pieces of held-out files behind earlier pieces that have much in common with them."""
    files = corpus_files()[1]
    texts = read_texts(sorted(rng.sample(files, min(_FILES, len(files)))))
    each = 2 * count // _FILES + 1  # of a file: some are tables that would win everywhere
    pairs = [pair for text in texts for pair in sorted(related(source, text), reverse=True)[:each]]
    chosen = rng.sample(pairs, min(count, len(pairs)))
    return [Item((*document, *prompt), (document,)) for _, document, prompt in chosen]


def related(source: Source, text: str) -> Iterator[tuple[float, Tokens, Tokens]]:
    """(share in common, document, prompt) for every piece of the text that has others before it."""
    pieces = [source.ids(piece) for piece in line_pieces(text, source.tokenizer, _DOCUMENT)]
    known = [grams(piece) for piece in pieces]
    for at in range(1, len(pieces)):
        common = [len(known[at] & before) for before in known[:at]]
        best = max(range(at), key=common.__getitem__)
        prompt = pieces[at][: min(_PROMPT, len(pieces[at]) // 2)]
        yield common[best] / len(known[at]), pieces[best], prompt


WORKLOADS: dict[str, Callable[[Source, int, random.Random], list[Item]]] = {
    "code": code,
    "edit": edit,
    "documents": documents,
}
