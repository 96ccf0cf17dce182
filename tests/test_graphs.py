"""Passes as GPUs run them: the kernels, what they are told, and that they can be recorded.

Where there is no GPU, Triton's interpreter runs the kernels (conftest.py asks for it), in float32: its products of bfloat16
are wrong (3.9). Nothing is recorded then.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import noise, sampling
from engine.attention import Heads, Layout, SequenceRows, chain_rows
from engine.fused import is_fused, speed_up
from engine.gpu_attention import DevicePart, is_wide, room, tell
from engine.graphs import GraphedDecoder, _Kind
from engine.kv import KVPool
from engine.runner import Dtype, ModelRunner
from engine.types import SamplingParams
from tests.families import FAMILIES, VOCABULARY, save, text
from tests.rows import assert_close, grown, leased, prefill, tree_rows

DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
WINDOWED = dict(sliding_window=40)  # shorter than the text
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},  # heads that share nothing
    "gemma2": WINDOWED,  # and caps
    "gpt_oss": WINDOWED,  # and sinks
}
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)


def taken(runner: ModelRunner, batch: Sequence[SequenceRows]) -> torch.Tensor:
    """Logits of a pass that is known to go this way."""
    assert runner._graphs is not None
    assert runner._graphs.suits(batch)
    return runner.forward(batch).cpu()


def recorder(runner: ModelRunner) -> GraphedDecoder:
    """Of a runner that has none, as on CPUs."""
    return GraphedDecoder(runner.model.base_model, runner._head, runner.pool, runner._heads, runner._current)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a runner of a family as it is on GPUs: of torch's own operations, and with pages in their order."""
    monkeypatch.setattr("engine.runner.speed_up", lambda model, fuse, *others: speed_up(model, fuse, for_cpu=False))
    monkeypatch.setattr("engine.runner.fused_decoder", lambda *arguments: None)
    if DEVICE == "cpu":
        monkeypatch.setattr("engine.gpu_attention._PROGRAMS", 16)  # the interpreter runs one after the other

    def make(name: str, dtype: Dtype = "float32", **settings: Any) -> ModelRunner:
        layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 2}
        folder = save(name, FAMILIES[name] | layers | settings, tmp_path / name)
        runner = ModelRunner(folder, device=DEVICE, dtype=dtype, kv_tokens=512)
        if runner._graphs is None:
            runner._graphs = recorder(runner)
        return runner

    return make


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_texts_and_of_a_tree_are_the_models_own(name: str, made: Any) -> None:
    runner, prompt, tree = made(name, **KINDS[name]), text(45), grown(7, seed=1, vocab_size=VOCABULARY)
    assert is_fused(runner.model.base_model) == (name == "llama")
    model = AutoModelForCausalLM.from_pretrained(runner.path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def own(tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    with leased(runner, 64, 64) as (lease, other):
        chunks = [chain_rows(lease, 0, prompt[:32], wanted=0), chain_rows(lease, 32, prompt[32:], wanted=0)]
        assert_close(torch.cat([taken(runner, [chunk]) for chunk in chunks]), own(prompt))
        slots = np.random.default_rng(0).permutation(lease.slots[45 : 45 + tree.size])
        batch = [chain_rows(other, 0, text(5, seed=1), wanted=2), tree_rows(lease, 45, tree, slots)]
        logits = taken(runner, batch)
        assert_close(logits[:3], own(text(5, seed=1))[-3:])
        for node in range(tree.size):
            assert_close(logits[3 + node], own([*prompt, *tree.token[tree.lineage(node)].tolist()])[-1])


@pytest.mark.parametrize("count", [1, 16])
def test_the_best_tokens_are_those_of_the_logits_with_their_noise(count: int, made: Any) -> None:
    runner, tree = made("llama"), grown(9, seed=3, vocab_size=VOCABULARY)
    params = [SamplingParams(temperature=each) for each in (0, 1, 0.7, 0, 1.3, 1, 0, 0, 1, 0.2)]
    keys = noise.keys_of([(3, position) for position in range(tree.size)])
    with leased(runner, 32) as (lease,):
        rows = tree_rows(lease, 0, tree, lease.slots[: tree.size])
        for own, drawn in ((params, keys), ([SamplingParams(temperature=0)] * tree.size, None)):
            passed = runner.best([rows], own, drawn, count)
            expected = sampling.best(passed.logits, own, drawn, count)
            assert passed.finite
            np.testing.assert_array_equal(passed.best.tokens, expected.tokens)
            np.testing.assert_allclose(passed.best.scores, expected.scores, rtol=1e-5)
            torch.testing.assert_close(runner.forward([rows]), passed.logits)


def test_what_is_not_finite_is_seen(made: Any) -> None:
    runner = made("llama")
    with leased(runner, 8) as (lease,):
        rows, params = chain_rows(lease, 0, [5, 6], 0), [SamplingParams(temperature=0)] * 2
        assert runner.best([rows], params, None, 1).finite
        runner.model.get_input_embeddings().weight[6] = torch.nan
        assert not runner.best([rows], params, None, 1).finite


def test_trees_that_a_window_is_too_short_for_go_another_way(made: Any) -> None:
    runner, tree = made("gemma2"), grown(15, seed=1, vocab_size=VOCABULARY)  # 16 rows are not filled up
    with leased(runner, 64) as (lease,):
        prefill(runner, lease, text(20))
        rows = tree_rows(lease, 20, tree, lease.slots[20 : 20 + tree.size])
        assert not runner._graphs.suits([rows])
        logits, runner._graphs = runner.forward([rows]), None
        assert torch.equal(runner.forward([rows]), logits)


@pytest.mark.parametrize(("dim", "fold"), [(40, 3), (128, 1)])
@pytest.mark.parametrize("rows", [3, 20])  # of the first sequence: narrow and wide blocks
def test_attention_in_half_precision_is_close_to_that_in_single(dim: int, fold: int, rows: int) -> None:
    """bfloat16 on a GPU; where kernels are interpreted float16, which goes the same ways."""
    heads, kv, padding = Heads(2, fold, dim, (None,)), 2, 32
    pools = [KVPool(1, kv, dim, 384, dtype, DEVICE) for dtype in (HALF, torch.float32)]
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> torch.Tensor:
        return torch.randn((count, padding, dim), generator=generator).to(DEVICE, HALF)

    pools[0].data.copy_(torch.randn(pools[0].data.shape, generator=generator))
    pools[1].data.copy_(pools[0].data)
    query, key, value = random(kv * fold), random(kv), random(kv)
    leases = [pools[0].lease(64), pools[0].lease(96)]
    batch = [chain_rows(leases[0], 40, [0] * rows), chain_rows(leases[1], 70, [0])]
    layout, single = (Layout(pool, heads, batch, invariant=False) for pool in pools)
    told = np.zeros(room(batch, padding), np.int32)
    part = DevicePart(heads, pools[0].data, torch.from_numpy(told).to(DEVICE), padding, is_wide(layout))
    used = tell(layout, padding, part.block_rows, told)
    assert used <= len(told)
    part.told.copy_(torch.from_numpy(told))
    part.write_kv(0, key, value)
    count = layout.rows
    reference = single.part(0, count, 0)
    reference.write_kv(0, key[:, :count].float(), value[:, :count].float())
    out, expected = part.attend(0, query, None), reference.attend(0, query[:, :count].float(), None)
    torch.testing.assert_close(out[:count].float(), expected, rtol=0.01, atol=0.01)
    assert not out[count:].any(), "padding sees nothing"
    written = np.concatenate([rows.slots for rows in batch])
    assert torch.equal(pools[0].data[0, :, :, written].float(), pools[1].data[0, :, :, written])


class _Nothing:
    """A part of a pass in which attention gives anything at all."""

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def attend(self, layer: int, query: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.empty_like(query.transpose(0, 1))


def run_without_numbers(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass on a device that only knows shapes: asking for a number fails, and so does what is left on the CPU."""
    runner.model.to("meta")
    runner.pool.data = runner.pool.data.to("meta")
    monkeypatch.setattr(GraphedDecoder, "_part", lambda self, kind: _Nothing())
    with torch.inference_mode():
        recorder(runner)._compute(_Kind(8, False, 16, True))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_passes_do_not_wait_for_what_they_compute(name: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they could not be recorded."""
    run_without_numbers(made(name, "bfloat16"), monkeypatch)


def test_a_model_whose_rotations_depend_on_positions_waits(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="item"):
        run_without_numbers(made("llama", rope_parameters=DYNAMIC), monkeypatch)


def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory() -> None:
    command, environment = [sys.executable, "-m", "tests.gpu_compiled"], os.environ | {"TRITON_INTERPRET": "0"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    assert [name for name, _ in lines] == ["store", "attend", "join"] * 3
    assert max(int(shared) for _, shared in lines) <= 163 * 1024  # of an A100
