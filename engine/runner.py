"""ModelRunner: transformers checkpoints with our KV pool and tree attention.

The model's own code runs unchanged; an attention function registered with transformers' AttentionInterface writes keys
and values to the pool and lets every row see its own path: the committed prefix, then its ancestors in the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.checkpoint import ModelError, check_checkpoint
from engine.cpu import speed_up
from engine.kv import SCRATCH_SLOT, KVPool, Lease
from engine.types import BoolArray, IntArray

Dtype = Literal["auto", "float32", "bfloat16"]
ATTENTION = "paceline"
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError, StrictDataclassError)
_BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # row counts the model is called with; above, multiples of 64
_KEY_BUCKET = 64  # invariant mode: a row at position p attends over p + 1 keys rounded up to this


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a forward pass: n rows, parents before children.

    Row i sees the first `prefix` slots of the lease in position order, then the `tree_slots` its row of `visible` names.
    """

    lease: Lease
    prefix: int  # committed tokens whose KV is in the pool, seen by every row
    tokens: Sequence[int]  # [n]
    positions: Sequence[int]  # [n]
    slots: IntArray  # [n]: where the rows' own KV goes
    tree_slots: IntArray  # [m]: slots behind the prefix that any row sees, its own included; ancestors come first
    visible: BoolArray  # [n, m]
    wanted: int = 0  # logits are returned for rows from this one on


def chain_rows(lease: Lease, start: int, tokens: Sequence[int], wanted: int | None = None) -> SequenceRows:
    """Rows of consecutive committed tokens at positions `start`...; by default logits of the last one only."""
    n = len(tokens)
    slots = lease.slots[start : start + n]
    return SequenceRows(
        lease=lease,
        prefix=start,
        tokens=tokens,
        positions=range(start, start + n),
        slots=slots,
        tree_slots=slots,
        visible=np.tri(n, dtype=np.bool_),
        wanted=n - 1 if wanted is None else wanted,
    )


def pick_dtype(name: Dtype, device: str) -> torch.dtype:
    """The dtype for a device; "auto" is bfloat16 where it is arithmetic and not emulation, else float32."""
    if name == "auto":
        fast = device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


class ModelRunner:
    """A causal language model on one device, with a KV pool for many sequences.

    invariant: a row's bits depend on its own path only, not on what else is in the pass: the model is always called with
    `invariant_rows` rows, and each row attends to its keys gathered in position order at a length that depends on its
    position. Raises ModelError for a checkpoint that can't be loaded.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        kv_tokens: int = 16384,
        dtype: Dtype = "auto",
        device: str = "cpu",
        invariant: bool = False,
        invariant_rows: int = 8,
    ) -> None:
        self.path = Path(path)
        check_checkpoint(self.path)
        self.device = device
        self.dtype = pick_dtype(dtype, device)
        self.invariant = invariant
        self._rows = invariant_rows
        self.model = self._load()
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_length = int(config.max_position_embeddings)
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.pool = KVPool(config.num_hidden_layers, heads, head_dim, kv_tokens, self.dtype, device)
        self._fold = int(config.num_attention_heads) // heads  # query heads that share a KV head

    def _load(self) -> Any:
        AttentionInterface.register(ATTENTION, _attend)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=self.dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
        except _LOAD_ERRORS as error:
            raise ModelError(f"{self.path} can't be loaded: {' '.join(str(error).split())}") from error
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):  # transformers would make them up
            raise ModelError(f"{self.path} can't be loaded: {len(missing)} weights are missing, {missing[0]} first")
        model = model.to(self.device).eval().requires_grad_(False)
        if self.device == "cpu":
            speed_up(model)
        return model

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceRows]) -> torch.Tensor:
        """Runs all rows in order and writes their KV; returns the wanted rows' logits, float32 [wanted rows, vocab_size]."""
        layout = _Layout(self.pool, batch, self.invariant, self._fold)
        wanted = [i for rows, start in zip(batch, layout.starts, strict=True) for i in _wanted(rows, start)]
        total = len(layout.tokens)
        size = self._rows if self.invariant else total
        hidden = [self._hidden(layout, start, min(start + size, total)) for start in range(0, total, size)]
        return self._logits(torch.cat(hidden)[wanted])

    def _hidden(self, layout: "_Layout", start: int, stop: int) -> torch.Tensor:
        """Final hidden states [stop - start, hidden_size] of some consecutive rows, padded to a bucket."""
        padding = self.called_with(stop - start) - (stop - start)
        tokens = torch.tensor([[*layout.tokens[start:stop], *[0] * padding]], device=self.device)
        positions = torch.tensor([[*layout.positions[start:stop], *[0] * padding]], device=self.device)
        part = layout.part(start, stop, padding)
        base = self.model.base_model
        out = base(input_ids=tokens, position_ids=positions, use_cache=False, paceline=part)
        states: torch.Tensor = out.last_hidden_state[0, : stop - start]
        return states

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output head on [n, hidden_size], called with bucketed row counts."""
        head = self.model.get_output_embeddings()
        n = len(hidden)
        if n == 0:
            return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        size = self._rows if self.invariant else self.called_with(n)
        hidden = F.pad(hidden, (0, 0, 0, -n % size))
        logits = torch.cat([head(hidden[i : i + size]) for i in range(0, len(hidden), size)])
        return logits[:n].float()

    def called_with(self, rows: int) -> int:
        """The number of rows, padding included, that the model computes for this many; 0 for 0."""
        if self.invariant:
            return -(-rows // self._rows) * self._rows
        return next((bucket for bucket in (0, *_BUCKETS) if bucket >= rows), -(-rows // 64) * 64)


def _wanted(rows: SequenceRows, start: int) -> range:
    return range(start + rows.wanted, start + len(rows.tokens))


class _Layout:
    """Where the rows of one forward pass write and what they see; built once, used by every layer."""

    def __init__(self, pool: KVPool, batch: Sequence[SequenceRows], invariant: bool, fold: int) -> None:
        self._pool = pool
        self._batch = batch
        self._invariant = invariant
        self._fold = fold
        counts = [len(rows.tokens) for rows in batch]
        self.starts = [sum(counts[:i]) for i in range(len(counts))]
        self.tokens = [token for rows in batch for token in rows.tokens]
        self.positions = [position for rows in batch for position in rows.positions]
        self._slots = np.concatenate([rows.slots for rows in batch])

    def part(self, start: int, stop: int, padding: int) -> "_Part":
        """What the attention needs for rows start..stop and `padding` rows behind them."""
        slots = np.concatenate([self._slots[start:stop], np.full(padding, SCRATCH_SLOT, np.int32)])
        write = torch.from_numpy(slots.astype(np.int64)).to(self._pool.data.device)
        find = self._gathered if self._invariant else self._grouped
        return _Part(self._pool.data, write, find(start, stop), stop - start)

    def _grouped(self, start: int, stop: int) -> "list[_Group]":
        """One group for each sequence: its rows attend together under a mask. The fast way."""
        groups = []
        for rows, first in zip(self._batch, self.starts, strict=True):
            keys = rows.prefix + len(rows.tree_slots)
            mask = np.ones((len(rows.tokens), keys), np.bool_)
            mask[:, rows.prefix :] = rows.visible
            groups.append(_Group(range(first, first + len(rows.tokens)), self._where(rows), self._bias(mask)))
        return groups

    def _where(self, rows: SequenceRows) -> "slice | torch.Tensor":
        """The slots of all keys of a sequence: a slice where they are consecutive, so that nothing is copied."""
        expected = rows.lease.slots[rows.prefix : rows.prefix + len(rows.tree_slots)]
        if rows.lease.first is not None and np.array_equal(rows.tree_slots, expected):
            return slice(rows.lease.first, rows.lease.first + rows.prefix + len(rows.tree_slots))
        slots = np.concatenate([rows.lease.slots[: rows.prefix], rows.tree_slots])
        return torch.from_numpy(slots.astype(np.int64)).to(self._pool.data.device)

    def _bias(self, mask: BoolArray) -> "torch.Tensor | None":
        """What is added to the scores of folded heads: 0 where visible, else -inf; None where everything is visible."""
        if mask.all():
            return None
        hidden = torch.from_numpy(~np.tile(mask, (self._fold, 1))).to(self._pool.data.device)
        return torch.zeros(hidden.shape, dtype=self._pool.data.dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )

    def _gathered(self, start: int, stop: int) -> "list[_Group]":
        """Every row by itself: its keys in position order, padded to a length that its position alone decides."""
        paths: dict[int, list[tuple[int, IntArray]]] = {}
        for rows, first in zip(self._batch, self.starts, strict=True):
            for i in range(max(start - first, 0), min(stop - first, len(rows.tokens))):
                path = np.concatenate([rows.lease.slots[: rows.prefix], rows.tree_slots[rows.visible[i]]])
                length = -(-len(path) // _KEY_BUCKET) * _KEY_BUCKET
                paths.setdefault(length, []).append((first + i - start, path))
        return [self._gathered_group(length, rows) for length, rows in paths.items()]

    def _gathered_group(self, length: int, rows: list[tuple[int, IntArray]]) -> "_Group":
        index = np.full((len(rows), length), SCRATCH_SLOT, np.int64)
        mask = np.zeros((len(rows), length), np.bool_)
        for i, (_, path) in enumerate(rows):
            index[i, : len(path)] = path
            mask[i, : len(path)] = True
        where = torch.from_numpy(index).to(self._pool.data.device)
        bias = torch.zeros(mask.shape, dtype=self._pool.data.dtype).masked_fill_(torch.from_numpy(~mask), -torch.inf)
        return _Group([row for row, _ in rows], where, bias.to(where.device))


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend in one call.

    keys: a slice or [keys] when the rows share them under `bias` [query heads per KV head x rows, keys]; [rows, keys] when
    each row has its own, with `bias` of the same shape.
    """

    rows: Sequence[int]
    keys: "slice | torch.Tensor"
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one call of the model needs of the pool."""

    data: torch.Tensor  # KVPool.data
    write: torch.Tensor  # [rows]: slots of the rows' own KV
    groups: list[_Group]
    rows: int  # without padding

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the rows' own keys and values, each [kv_heads, rows, head_dim]."""
        store = self.data[layer]
        store[0].index_copy_(1, self.write, key)
        store[1].index_copy_(1, self.write, value)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """query: [heads, rows, head_dim]; returns [rows, heads, head_dim], zeros in padding rows."""
        keys, values = self.data[layer].unbind(0)
        if len(self.groups) == 1 and isinstance(self.groups[0].keys, slice) and self.rows == query.shape[1]:
            return _shared(query, keys, values, self.groups[0], scale)
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        for group in self.groups:
            own = isinstance(group.keys, torch.Tensor) and group.keys.ndim == 2
            attend = _separate if own else _shared
            rows: slice | list[int] = list(group.rows)
            if isinstance(group.rows, range):  # a slice is not copied
                rows = slice(group.rows.start, group.rows.stop)
            out[rows] = attend(query[:, rows], keys, values, group, scale)
        return out


def _shared(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, scale: float) -> torch.Tensor:
    """All rows see the same keys under a mask. Query heads that share a KV head are folded into rows: one pass over keys."""
    heads, n, dim = q.shape
    kv_heads = keys.shape[0]
    folded = q.reshape(kv_heads, heads // kv_heads * n, dim)
    k, v = keys[:, group.keys], values[:, group.keys]
    out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=group.bias, scale=scale)
    return out.view(heads, n, dim).transpose(0, 1)


def _separate(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, scale: float) -> torch.Tensor:
    """Every row is a batch entry with its own keys: the same shape and order of arithmetic whatever else is there."""
    heads, n, dim = q.shape
    kv_heads = keys.shape[0]
    folded = q.transpose(0, 1).reshape(n, kv_heads, heads // kv_heads, dim)
    k, v = (side[:, group.keys].transpose(0, 1) for side in (keys, values))  # [n, kv_heads, keys, dim]
    assert group.bias is not None
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.bias[:, None, None, :], scale=scale)
    return out.reshape(n, heads, dim)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    paceline: _Part,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paceline.write_kv(layer, key[0], value[0])
    return paceline.attend(layer, query[0], scaling)[None], None
