"""Passes of a model on a GPU, each a recording of all that it launches (a CUDA graph).

Launched one by one from Python, a small batch's operations take longer to launch than to run. A recording does for one
number of rows, so passes are filled up to one of a few; whatever else differs is read on the device.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention import Current, Heads, Layout, Longs, SequenceRows
from engine.compiled_pass import Passed
from engine.gpu_attention import DevicePart, Places, is_wide, room, tell, tell_choices
from engine.kv import SCRATCH_SLOT, KVPool
from engine.noise import Keys
from engine.sampling import Best, best_on_device
from engine.types import FloatArray

logger = logging.getLogger(__name__)
ROWS = (8, 16, 32, 64, 128, 256)  # of recordings; passes of more are not recorded
_TRIES = 2  # before a recording: kernels are compiled and loaded
_RECORDING = threading.Lock()  # torch has one stream for all recordings of a process


class _Kind(NamedTuple):
    """Passes that one recording does for."""

    rows: int
    wide: bool  # see gpu_attention
    best: int  # tokens chosen after each row; 0: none
    noisy: bool  # whether noise takes part


@dataclass(slots=True)
class _Results:
    """Of a pass, on the device; the next one overwrites them."""

    states: torch.Tensor  # [rows, hidden_size]
    logits: torch.Tensor  # float32 [rows, vocab_size]
    chosen: torch.Tensor  # float32 [1 + 2 * count, rows]: sums of logits, tokens as bits, scores


class GraphedDecoder:
    """A model whose passes over its pool are recorded. Others' passes go on meanwhile, but for the time of a recording."""

    def __init__(
        self, base: Any, head: Callable[[torch.Tensor], torch.Tensor], pool: KVPool, heads: Heads, current: Current
    ) -> None:
        """base: the model without its output layer, whose attention takes what it needs from `current`; head: that layer."""
        self._base, self._head, self._pool, self._heads, self._current = base, head, pool, heads, current
        self._device = pool.data.device
        self.records = self._device.type == "cuda"
        most = max(ROWS)
        pages = most * pool.pages
        size = min(Places(most).end + pages, 1 << 22)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self.records)
        self._numbers = self._host.numpy()
        self._told = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._copied = torch.cuda.Event() if self.records else None
        self._recordings: dict[_Kind, tuple[torch.cuda.CUDAGraph, _Results]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.records else None

    @staticmethod
    def called_with(rows: int) -> int:
        """How many rows a pass computes for so many."""
        return next((each for each in (0, *ROWS) if each >= rows), -(-rows // ROWS[-1]) * ROWS[-1])

    def record(self, count: int) -> None:
        """Records all passes of up to ROWS[-1] rows that choose `count` tokens after each row or none: seconds.

        The largest first: what it computes in is enough for the others.
        """
        for rows, wide in product(reversed(ROWS), (True, False)):
            self._told.zero_()  # rows of no block
            for kind in (_Kind(rows, wide, 0, False), _Kind(rows, wide, count, False), _Kind(rows, wide, count, True)):
                self._run(kind)
        self._pool.data[:, :, :, SCRATCH_SLOT] = 0  # such rows have written there what nobody has computed

    def suits(self, batch: Sequence[SequenceRows]) -> bool:
        """Whether a pass can go this way: what it is told has room, and windows are longer than what is behind prefixes."""
        rows = sum(len(each.tokens) for each in batch)
        behind = max(len(each.tree_slots) for each in batch)
        windows = [window for window in self._heads.windows if window is not None]
        fits = room(batch, self.called_with(rows)) <= len(self._numbers)
        return fits and all(behind <= window for window in windows)

    def states_and_logits(self, layout: Layout, wanted: Longs) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the wanted rows: final states [n, hidden_size] and logits, float32 [n, vocab_size]."""
        results = self._pass(layout, wanted, np.zeros(len(wanted), np.float32), np.zeros(0, np.int64), 0)
        return self._of(wanted, results)

    def best(self, layout: Layout, wanted: Longs, temperatures: FloatArray, keys: Keys, count: int) -> Passed:
        """See CompiledDecoder.best."""
        results = self._pass(layout, wanted, temperatures, keys, count)
        states, logits = self._of(wanted, results)
        chosen = results.chosen.cpu().numpy()[:, wanted]
        tokens, scores = chosen[1 : 1 + count].view(np.int32), chosen[1 + count :]
        best = Best(np.ascontiguousarray(tokens.T), np.ascontiguousarray(scores.T), np.ones(len(wanted), np.bool_))
        return Passed(states, logits, bool(np.isfinite(chosen[0]).all()), best)

    def _of(self, wanted: Longs, results: _Results) -> tuple[torch.Tensor, torch.Tensor]:
        first, n = (int(wanted[0]), len(wanted)) if len(wanted) else (0, 0)
        if n and int(wanted[-1]) == first + n - 1:  # no index has to be sent
            part = slice(first, first + n)
            return results.states[part].clone(), results.logits[part].clone()
        index = torch.from_numpy(wanted).to(self._device)
        return results.states[index], results.logits[index]

    def _pass(self, layout: Layout, wanted: Longs, temperatures: FloatArray, keys: Keys, count: int) -> _Results:
        kind = _Kind(self.called_with(layout.rows), is_wide(layout), count, len(keys) > 0)
        if self._copied is not None:
            self._copied.synchronize()
        used = tell(layout, kind.rows, self._part(kind).block_rows, self._numbers)
        tell_choices(kind.rows, wanted, temperatures, keys, self._numbers)
        self._told[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self._run(kind)

    def _part(self, kind: _Kind) -> DevicePart:
        return DevicePart(self._heads, self._pool.data, self._told, kind.rows, kind.wide)

    def _run(self, kind: _Kind) -> _Results:
        """Of what was told."""
        if kind not in self._recordings and self.records and kind.rows <= ROWS[-1]:
            self._record(kind)
        if kind not in self._recordings:
            return self._compute(kind)
        graph, results = self._recordings[kind]
        graph.replay()
        return results

    def _record(self, kind: _Kind) -> None:
        """Gives up for good with a model that waits for what it computed: such a thing can't be recorded."""
        before, stream = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(_TRIES):
                self._compute(kind)
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _RECORDING,
                torch.cuda.stream(before),  # which a recording that fails does not go back to by itself
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                results = self._compute(kind)
        except RuntimeError as error:
            self.records = False
            reason = " ".join(str(error).split())[:300]
            logger.warning("%s can't be recorded, and runs slower: %s", type(self._base).__name__, reason)
        else:
            self._recordings[kind] = graph, results

    def _compute(self, kind: _Kind) -> _Results:
        told, at = self._told, Places(kind.rows)
        self._current.part = self._part(kind)
        tokens, positions = told[at.tokens].long(), told[at.positions].long()
        out = self._base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states = out.last_hidden_state[0]
        logits = self._head(states).float()
        sums = logits.sum(-1)[None]
        if kind.best == 0:
            return _Results(states, logits, sums)
        temperatures = told[at.temperatures].view(torch.float32)
        noisy = temperatures > 0
        keys = told[at.keys].view(torch.int64) if kind.noisy else None
        values = logits / torch.where(noisy, temperatures, 1.0)[:, None]
        best, scores = best_on_device(values, noisy, keys, kind.best)
        return _Results(states, logits, torch.cat([sums, best.T.int().view(torch.float32), scores.T]))
