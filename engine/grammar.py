"""Output that follows a grammar: which tokens may come next, at the end of a text or at any node of a token tree.

xgrammar compiles and matches (Dong et al. 2024, https://arxiv.org/abs/2411.15100); its matcher goes down a path of the tree
and rolls back.
"""

import re
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from weakref import WeakValueDictionary

import torch
import xgrammar
from transformers import PreTrainedTokenizerFast

from engine.types import Grammar, InvalidRequest, require

_CACHE_BYTES = 256 * 1024 * 1024  # of compiled grammars
_MOST_BEGUN = 256  # grammars that are known to be compiled
_MOST_WHITESPACE = 24  # characters in a row in JSON: small models would go on with it for ever
_ESCAPED = "acdefnrstuvwxDSW"  # letters that xgrammar knows behind a backslash; it takes others for themselves
_WHERE = re.compile(r"^(\[[\d:]+\] )?\S+\.\w+:\d+: ")  # in front of xgrammar's messages


class Vocabulary:
    """A model's tokenizer and the grammars compiled for it. `vocab_size`: of the model, which may be more."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._begun: dict[Grammar, Future[None]] = {}  # compiled on a thread, or being so
        self._thread: ThreadPoolExecutor | None = None
        self._held: WeakValueDictionary[Grammar, xgrammar.CompiledGrammar] = WeakValueDictionary()  # by others, still

    def ends(self, ends: set[int]) -> set[int]:
        """The tokens that end an output with a grammar, where these end others: a grammar may need ordinary ones as text.

        The tokenizer's own where none is left, or else those that are named like one: something has to come when the
        grammar is complete. Raises InvalidRequest where there are none either.
        """
        if added := ends & self.tokenizer.added_tokens_decoder.keys():
            return added
        own = self.tokenizer.eos_token_id
        found = {int(own)} if isinstance(own, int) else set(self._info.stop_token_ids)
        require(bool(found), "grammar", "the model names no end token")
        return found

    @cached_property
    def _info(self) -> xgrammar.TokenizerInfo:
        """Reading a vocabulary takes long, and few models are asked for grammars."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of end tokens that have to be found by their names
            return xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self._vocab_size)

    def ready(self, grammar: Grammar) -> bool:
        """Whether `compile` takes no time any more, be it to refuse; else another thread begins with it."""
        if grammar not in self._begun:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-grammar")
            if len(self._begun) == _MOST_BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[grammar] = self._thread.submit(self._try, grammar)
        return self._begun[grammar].done()

    def _try(self, grammar: Grammar) -> None:
        with suppress(InvalidRequest):  # who compiles it next hears of it
            self.compile(grammar)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises InvalidRequest for a grammar that makes no sense.

        Equal ones are compiled once, as long as somebody holds what came of it, or it is among the latest.
        """
        if (held := self._held.get(grammar)) is not None:
            return held
        self._held[grammar] = compiled = self._compile(grammar)
        return compiled

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        if self._compiler is None:
            self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        try:
            match grammar.kind:
                case "json_object" | "json_schema":
                    schema = grammar.text or '{"type": "object"}'
                    return self._compiler.compile_json_schema(schema, max_whitespace_cnt=_MOST_WHITESPACE)
                case "regex":
                    _check_regex(grammar.text)
                    return self._compiler.compile_regex(grammar.text)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.text)
        except (RuntimeError, ValueError) as error:
            message = _WHERE.sub("", " ".join(str(error).split()))
            raise InvalidRequest("grammar", f"the {grammar.kind} can't be used: {message[:300]}") from error


def _check_regex(text: str) -> None:
    """Raises InvalidRequest for what xgrammar would read as something else, with a mere warning; it refuses the rest."""
    for escape in re.findall(r"\\.", text, re.DOTALL):
        known = not (escape[1].isascii() and escape[1].isalnum()) or escape[1] in _ESCAPED
        require(known, "grammar", f"the regex can't be used: {escape} is not supported")
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "_", text, flags=re.DOTALL)  # no escapes, no sets of characters
    inner = outside.removeprefix("^").removesuffix("$")
    anchored = "^" in inner or "$" in inner
    require(not anchored, "grammar", "the regex can't be used: ^ and $ are supported at its two ends only")


class GrammarState:
    """How far one output has come in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, ends: set[int], vocab_size: int) -> None:
        """ends: the tokens that may come once the grammar is complete; see Vocabulary.ends."""
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends) or None)
        self._vocab_size = vocab_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes committed tokens; what does not follow the grammar is for the caller to prevent."""
        for token in tokens:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return

    def mask(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Sets what may not come to -inf, in place. logits: float32 [n, vocab_size], each behind its path below the end.

        Rows behind a path that breaks the grammar, which can't be reached, stay as they are.
        """
        allowed = xgrammar.allocate_token_bitmask(len(paths), self._vocab_size)
        for row, path in enumerate(paths):
            self._fill(allowed, row, path)
        xgrammar.apply_token_bitmask_inplace(logits, allowed.to(logits.device))

    def _fill(self, allowed: torch.Tensor, row: int, path: Sequence[int]) -> None:
        matcher, taken = self._matcher, 0
        for token in path:
            if matcher.is_terminated() or not matcher.accept_token(token):
                break
            taken += 1
        if taken == len(path) and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(allowed, row)
        matcher.rollback(taken)
