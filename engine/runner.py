"""ModelRunner: transformers checkpoints with our KV pool and tree attention.

The model's own code runs unchanged; an attention function registered with transformers' AttentionInterface writes keys
and values to the pool and lets every row see its own path: the committed prefix, then its ancestors in the tree.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers  # imports what is named when it is first used: the half of it that models need takes 2 to 3 s
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine import torch_calls
from engine.attention import Current, Heads, Layout, Part, SequenceRows, chain_rows
from engine.checkpoint import ModelError, architecture, check_checkpoint, context_length, hidden_size, stored_numbers
from engine.choice import Weights, check_weights
from engine.compiled_pass import CompiledDecoder, Passed, compiles
from engine.cpu import has_fast_bf16
from engine.fused import compile_layers, is_fusable, is_fused, is_one_call, speed_up
from engine.head import output_head
from engine.kv import KVPool
from engine.layers import first_layers
from engine.probe import PROBE, Unsupported, probe, refusing, register_probe
from engine.quantized import why_not
from engine.recorded import FusedDecoder, fused_decoder
from engine.sampling import NO_KEYS, best, filters
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.graphs import GraphedDecoder

Dtype = Literal["auto", "float32", "bfloat16"]
ATTENTION = "paceline"
UNCOMPILED = "paceline-uncompiled"  # the same in a compiled model
_LOAD_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    ImportError,  # of what reads quantized weights
    SafetensorError,
    StrictDataclassError,
)
# Features; on CPUs, passes of smaller models in bfloat16 that are not one compiled call are mostly overhead per operation.
_WORTH_BF16 = 1024
# Row counts that models are called with which make something of each, as by recording; above 240, multiples of 64.
_BUCKETS = (2, 4, 6, 8, 12, *range(16, 64, 8), *range(64, 256, 16))


def pick_dtype(name: Dtype, device: str, features: int, one_call: bool = False) -> torch.dtype:
    """The dtype of a model on a device; "auto" is bfloat16 where it is arithmetic, not emulation, and pays; else float32.

    features: between layers. one_call: whether a pass in bfloat16 is one compiled call (engine.fused.is_one_call).
    """
    if name == "auto":
        pays = device != "cpu" or features >= _WORTH_BF16 or one_call
        return torch.bfloat16 if pays and has_fast_bf16(device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


class ModelRunner:
    """A causal language model on one device, with a KV pool for many sequences.

    invariant: a row's bits depend on its own path only, not on what else is in the pass: the model is always called with
    `invariant_rows` rows, and each row's keys are read in position order. compile: by torch.compile, all but
    the attention; it takes a C++ compiler, on GPUs Triton and a C compiler, and a quarter of a minute to a minute.
    weights: "int8" and "int4" round those of layers to so many bits, which changes the output a little: for drafts. "auto"
    does so where a pass takes less time for it, "full" never.
    Raises ModelError for a checkpoint that can't be loaded, run or compiled, and for a device that isn't there.
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
        compile: bool = False,
        weights: Weights = "full",
    ) -> None:
        self.path = Path(path)
        values = check_checkpoint(self.path)
        self._architecture = architecture(values)
        _check_device(device)
        self.device = device
        for_cpu = device == "cpu" and not compile  # torch.compile can't see into what we have for CPUs
        one_call = for_cpu and is_one_call(values, stored_numbers(self.path))
        rounds = weights in ("auto", "int8") and one_call and not invariant and torch_calls.bytes_available()
        if weights == "auto":
            weights = "int8" if rounds and dtype != "float32" else "full"
        self.dtype = pick_dtype(dtype, device, hidden_size(values), one_call and (rounds or weights == "full"))
        check_weights(weights, self.path, device != "cpu", dtype, compile)
        if reason := why_not(weights, device, invariant):
            raise ModelError(f"{self.path} can't be run with {weights} weights {reason}")
        self.invariant = invariant
        self._rows = invariant_rows
        self.model = self._load()
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        known = getattr(config, "max_position_embeddings", None)  # some settings have it by another name
        self.max_length = context_length({"max_position_embeddings": known} | config.to_dict())
        self.layers = int(config.num_hidden_layers)
        self._current = Current()
        self.hidden = torch.zeros(0)  # final states of the last pass's wanted rows, [wanted rows, hidden_size]
        try:
            self._heads = self._probe(self.layers)
            fuse = set(self._heads.windows) == {None}
            join = not compile or (fuse and is_fusable(self.model.base_model))
            speed_up(self.model, fuse, weights, for_cpu, join)
            self._head = output_head(self.model)
        except Unsupported as error:
            raise ModelError(f"{self.path} can't be run: {self._architecture} {error}") from error
        paged = for_cpu and compiles(self.model.base_model)
        self.pool = KVPool(self.layers, self._heads.kv, self._heads.dim, kv_tokens, self.dtype, device, paged=paged)
        self._last = (
            min(self.max_length, self.pool.capacity) - 1
        )  # position: guesses may lie beyond, what is chosen does not
        self._decoder = self._fast_decoder() if for_cpu else None
        self._graphs: GraphedDecoder | None = None
        if compile:
            self._compile()
        if device.startswith("cuda") and invariant:
            # cuDNN's attention, which torch prefers on newer GPUs, plans anew for each number of rows that attend in a call:
            # nothing promises that each keeps its bits. For the whole process.
            torch.backends.cuda.enable_cudnn_sdp(False)
        elif device.startswith("cuda"):
            self._graphs = self._graphed()

    def _load(self) -> Any:
        register_probe()
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=self.dtype,
                attn_implementation=PROBE,
                local_files_only=True,
                trust_remote_code=False,
                # One row at a time, whichever experts the rows beside it go to.
                experts_implementation="batched_mm" if self.invariant else None,
                output_loading_info=True,
            )
        except _LOAD_ERRORS as error:
            reason = " ".join(str(error).split())[:300]
            if error.args == (PROBE,):
                reason = "it does not use transformers' attention interface"
            raise ModelError(f"{self.path} can't be loaded: {self._architecture}: {reason}") from error
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):  # transformers would make them up
            raise ModelError(f"{self.path} can't be loaded: {len(missing)} weights are missing, {missing[0]} first")
        if unused := _without_a_place(model, loading["unexpected_keys"]):
            reason = f"by its settings {len(unused)} of its weights are for nothing, {unused[0]} first"
            raise ModelError(f"{self.path} can't be loaded: {reason}")
        if self.invariant and _mixes_experts(model):
            raise ModelError(f"{self.path} can't be run: {self._architecture} has experts that have no invariant mode")
        return model.to(self.device).eval().requires_grad_(False)

    @torch.inference_mode()
    def _probe(self, layers: int) -> Heads:
        """Finds out what the model's attention is like, and gives it ours."""
        transformers.AttentionInterface.register(ATTENTION, _attend)
        heads = probe(self.model, layers, self.max_length, self._current)
        self.model.set_attn_implementation(ATTENTION)
        return heads

    def _fast_decoder(self) -> CompiledDecoder | FusedDecoder | None:
        """A faster way through the layers than transformers' own, for models that we know."""
        if self.pool.paged:
            return CompiledDecoder(self.model, self.pool, self._head, self._last)
        return fused_decoder(self.model, self.pool, self._heads)

    def _graphed(self) -> "GraphedDecoder":
        """On GPUs: passes are recorded."""
        from engine.graphs import GraphedDecoder  # needs Triton, which comes with torch for GPUs alone

        return GraphedDecoder(self.model.base_model, self._head, self.pool, self._heads, self._current)

    def _compile(self) -> None:
        """Compiles the model for any number of rows, with our attention left as it is: its keys grow with every step."""
        transformers.AttentionInterface.register(UNCOMPILED, torch.compiler.disable(_attend))
        self.model.set_attn_implementation(UNCOMPILED)
        lease = self.pool.lease(4)
        try:
            with warnings.catch_warnings():  # torch's compiler uses what torch deprecates
                warnings.simplefilter("ignore", DeprecationWarning)
                base = self.model.base_model
                compile_layers(base) if is_fused(base) else base.compile(dynamic=True)
                self.forward([chain_rows(lease, 0, [0] * 4)])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{self.path} can't be compiled: {self._architecture}: {reason}") from error
        finally:
            self.pool.release(lease)

    def first_layers(self, count: int) -> "ModelRunner":
        """A runner of this model's first layers, with its final norm and output layer: the same weights, the same pool.

        In pages of that pool it writes the part of those layers only. It is never invariant. Raises ModelError.
        """
        first = copy.copy(self)
        first.invariant, first.layers = False, count
        lease = self.pool.lease(2)
        try:
            first.model = first_layers(self.model, count)
            if self._decoder is not None:
                first._decoder = first._fast_decoder()
            if self._graphs is not None:
                first._graphs = first._graphed()
            with refusing("can't be run without its last layers"):
                first.forward([chain_rows(lease, 0, [0, 0])])
        except Unsupported as error:
            raise ModelError(f"{self.path} can't exit early: {self._architecture} {error}") from error
        finally:
            self.pool.release(lease)
        return first

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceRows]) -> torch.Tensor:
        """Runs all rows in order and writes their KV; returns the wanted rows' logits, float32 [wanted rows, vocab_size]."""
        layout = self._layout(batch)
        wanted = _wanted(batch, layout)
        if graphs := self._graphs_for(batch):
            self.hidden, logits = graphs.states_and_logits(layout, np.array(wanted, np.int64))
            return logits
        total = layout.rows
        size = self._rows if self.invariant else total
        hidden = [self._hidden(layout, start, min(start + size, total)) for start in range(0, total, size)]
        states = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        self.hidden = chosen = states if len(wanted) == total else states[wanted]
        return self.logits(chosen)

    @torch.inference_mode()
    def best(
        self, batch: Sequence[SequenceRows], params: Sequence[SamplingParams], keys: torch.Tensor | None, count: int
    ) -> Passed:
        """`forward`, and the `count` best tokens of each wanted row; params and keys: as in `engine.sampling.best`."""
        decoder = self._graphs_for(batch) or self.choosing
        if decoder is None or any(map(filters, params)):
            logits = self.forward(batch)
            finite = math.isfinite(logits.sum().item())
            return Passed(self.hidden, logits, finite, best(logits, params, keys, count))
        layout = self._layout(batch)
        wanted = np.array(_wanted(batch, layout), np.int64)
        temperatures = np.array([row.temperature for row in params], np.float32)
        passed = decoder.best(layout, wanted, temperatures, NO_KEYS if keys is None else keys.numpy(), count)
        self.hidden = passed.states
        return passed

    def _graphs_for(self, batch: Sequence[SequenceRows]) -> "GraphedDecoder | None":
        return self._graphs if self._graphs is not None and self._graphs.suits(batch) else None

    @torch.inference_mode()
    def record(self, count: int) -> None:
        """On GPUs: records passes of all sizes, which choose `count` tokens after each row, before any is waited for."""
        if self._graphs is not None:
            self._graphs.record(count)

    @property
    def choosing(self) -> CompiledDecoder | None:
        """What computes passes and chooses tokens in one compiled call, if there is such a thing for this model."""
        decoder = self._decoder
        return decoder if isinstance(decoder, CompiledDecoder) and decoder.chooses and not self.invariant else None

    def _layout(self, batch: Sequence[SequenceRows]) -> Layout:
        return Layout(self.pool, self._heads, batch, self.invariant, self._last)

    def _hidden(self, layout: Layout, start: int, stop: int) -> torch.Tensor:
        """Final hidden states [stop - start, hidden_size] of some consecutive rows, padded as `called_with` says."""
        padding = self.called_with(stop - start) - (stop - start)
        if isinstance(self._decoder, CompiledDecoder):
            return self._decoder(layout, (start, stop, padding))[: stop - start]
        tokens, positions = layout.inputs(start, stop, padding)
        if self._decoder is not None:
            return self._decoder(tokens, positions, layout, (start, stop, padding))[: stop - start]
        self._current.part = layout.part(start, stop, padding)
        base = self.model.base_model
        out = base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states: torch.Tensor = out.last_hidden_state[0, : stop - start]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output head on [n, hidden_size], called with as many rows as the model."""
        n = len(hidden)
        if n == 0:
            return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        size = self._rows if self.invariant else self.called_with(n)
        if n == size:
            logits = self._head(hidden)
        else:
            hidden = F.pad(hidden, (0, 0, 0, -n % size))
            parts = [self._head(hidden[i : i + size]) for i in range(0, len(hidden), size)]
            logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits[:n].float()

    def called_with(self, rows: int) -> int:
        """The number of rows, padding included, that the model computes for this many; 0 for 0."""
        if self.invariant:
            return -(-rows // self._rows) * self._rows
        if isinstance(self._decoder, CompiledDecoder):
            return max(rows, self._decoder.least_rows) if rows else 0
        if self._graphs is not None:
            return self._graphs.called_with(rows)
        return next((bucket for bucket in (0, *_BUCKETS) if bucket >= rows), -(-rows // 64) * 64)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} can't be used: {str(error).splitlines()[0]}") from error


def _without_a_place(model: Any, unread: Iterable[str]) -> list[str]:
    """Of the weights that nothing reads, biases and factors of modules that are there: these were made without them."""
    modules = {name for name, _ in model.named_modules()}
    split = {name: name.rpartition(".") for name in unread}
    return sorted(name for name, (module, _, kind) in split.items() if kind in ("weight", "bias") and module in modules)


def _mixes_experts(model: Any) -> bool:
    """Whether rows that go to the same expert are computed together, however many they are."""
    experts = any("expert" in type(module).__name__.lower() for module in model.modules())
    return experts and not model._can_set_experts_implementation()


def _wanted(batch: Sequence[SequenceRows], layout: Layout) -> list[int]:
    """Which rows of a layout logits are wanted of."""
    starts = zip(batch, layout.starts, strict=True)
    return [row for rows, start in starts for row in range(start + rows.wanted, start + len(rows.tokens))]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim].

    The layer's window, if any, is known from the probe.
    """
    part: Part = module.paceline.part
    layer = int(module.layer_idx)
    part.write_kv(layer, key[0], value[0])
    return part.attend(layer, query[0], scaling, softcap, s_aux).contiguous()[None], None
