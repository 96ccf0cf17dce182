"""ModelRunner: transformers checkpoints with our KV pool and tree attention.

The model's own code runs unchanged; an attention function registered with transformers' AttentionInterface writes keys
and values to the pool and lets every row see its own path: the committed prefix, then its ancestors in the tree.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.attention import Heads, Layout, Part, SequenceRows
from engine.checkpoint import ModelError, check_checkpoint
from engine.cpu import fused_decoder, speed_up
from engine.kv import KVPool

Dtype = Literal["auto", "float32", "bfloat16"]
ATTENTION = "paceline"
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError, StrictDataclassError)
_BUCKETS = (
    2,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
)  # row counts the model is called with, two are as fast as one; above, multiples of 64


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
        self.max_length = _max_length(config)
        self._heads = _heads(config)
        layers = int(config.num_hidden_layers)
        self.pool = KVPool(layers, self._heads.kv, self._heads.dim, kv_tokens, self.dtype, device)
        self._decoder = fused_decoder(self.model, self.pool, self._heads) if device == "cpu" else None

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
        layout = Layout(self.pool, self._heads, batch, self.invariant)
        wanted = [i for rows, start in zip(batch, layout.starts, strict=True) for i in _wanted(rows, start)]
        total = len(layout.tokens)
        size = self._rows if self.invariant else total
        hidden = [self._hidden(layout, start, min(start + size, total)) for start in range(0, total, size)]
        states = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return self._logits(states if len(wanted) == total else states[wanted])

    def _hidden(self, layout: Layout, start: int, stop: int) -> torch.Tensor:
        """Final hidden states [stop - start, hidden_size] of some consecutive rows, padded to a bucket."""
        padding = self.called_with(stop - start) - (stop - start)
        tokens = torch.tensor([*layout.tokens[start:stop], *[0] * padding], device=self.device)
        positions = torch.tensor([*layout.positions[start:stop], *[0] * padding], device=self.device)
        part = layout.part(start, stop, padding)
        if self._decoder is not None:
            return self._decoder(tokens, positions, part)[: stop - start]
        base = self.model.base_model
        out = base(input_ids=tokens[None], position_ids=positions[None], use_cache=False, paceline=part)
        states: torch.Tensor = out.last_hidden_state[0, : stop - start]
        return states

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output head on [n, hidden_size], called with bucketed row counts."""
        head = self.model.get_output_embeddings()
        n = len(hidden)
        if n == 0:
            return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        size = self._rows if self.invariant else self.called_with(n)
        if n == size:
            logits: torch.Tensor = head(hidden)
        else:
            hidden = F.pad(hidden, (0, 0, 0, -n % size))
            logits = torch.cat([head(hidden[i : i + size]) for i in range(0, len(hidden), size)])
        return logits[:n].float()

    def called_with(self, rows: int) -> int:
        """The number of rows, padding included, that the model computes for this many; 0 for 0."""
        if self.invariant:
            return -(-rows // self._rows) * self._rows
        return next((bucket for bucket in (0, *_BUCKETS) if bucket >= rows), -(-rows // 64) * 64)


def _max_length(config: Any) -> int:
    """Positions at which every token may see all before it: a sliding window is no different until it is full."""
    return min(int(config.max_position_embeddings), int(getattr(config, "sliding_window", None) or sys.maxsize))


def _heads(config: Any) -> Heads:
    query = int(config.num_attention_heads)
    kv = int(getattr(config, "num_key_value_heads", None) or query)
    return Heads(kv, query // kv, int(getattr(config, "head_dim", None) or config.hidden_size // query))


def _wanted(rows: SequenceRows, start: int) -> range:
    return range(start + rows.wanted, start + len(rows.tokens))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    paceline: Part,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paceline.write_kv(layer, key[0], value[0])
    return paceline.attend(layer, query[0], scaling)[None], None
