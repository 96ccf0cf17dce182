"""A pass as one compiled call: transformers' numbers, whatever attends with whom."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import cpu, noise, sampling, torch_calls
from engine.attention import chain_rows
from engine.choice import Weights
from engine.compiled import exponential
from engine.compiled_pass import CompiledDecoder
from engine.recorded import FusedDecoder
from engine.runner import Dtype, ModelRunner
from engine.types import SamplingParams
from tests import exact
from tests.exact import Tokens
from tests.families import LLAMA, save
from tests.rows import assert_close, grown, leased, prefill, tree_rows

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "some biases": ("qwen2", {}),
    "rotations": ("llama", dict(rope_parameters=LLAMA3)),
    "rotations with a scale": ("llama", dict(rope_parameters=YARN)),
    "wide heads": ("mistral", dict(head_dim=32, sliding_window=None)),
    "a head of keys for each": ("llama", dict(num_key_value_heads=4)),
}


pytestmark = pytest.mark.skipif(
    not torch_calls.available() or "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="needs numba, and a torch with FBGEMM",
)


@pytest.fixture
def compiled(fast_target: ModelRunner) -> ModelRunner:
    assert isinstance(fast_target._decoder, CompiledDecoder)
    return fast_target


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """In bfloat16, whose weights float16 holds."""
    name, settings = KINDS[request.param]
    folder = save(name, LLAMA | settings, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for key, value in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(value)
    model.bfloat16().save_pretrained(folder)
    return folder


def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Of a hundred tokens, [100, vocab_size]."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(100)[None]).logits[0].float()
    return logits


def test_logits_are_those_of_transformers(checkpoint: Path) -> None:
    runner = ModelRunner(checkpoint, dtype="float32", kv_tokens=512)
    assert isinstance(runner._decoder, CompiledDecoder)
    expected = transformers_logits(checkpoint, torch.float32)
    for chunk in (1, 7, 64):
        with leased(runner, 100) as (lease,):
            assert_close(prefill(runner, lease, list(range(100)), chunk), expected)


@pytest.mark.skipif(not torch_calls.narrow_available(), reason="bfloat16 is emulated")
def test_in_bfloat16_logits_are_nearer_to_the_exact_ones_than_those_of_transformers(checkpoint: Path) -> None:
    runner = ModelRunner(checkpoint, dtype="bfloat16", kv_tokens=512)
    assert isinstance(runner._decoder, CompiledDecoder)
    exactly, rounded = (transformers_logits(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    for chunk in (1, 7, 64):
        with leased(runner, 100) as (lease,):
            logits = prefill(runner, lease, list(range(100)), chunk)
            assert (logits - exactly).square().mean() < (rounded - exactly).square().mean()


@pytest.fixture(
    params=["float32", "bfloat16 from caches", "bfloat16 from memory", "int8 from caches", "int8 from memory"]
)
def each_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """With all layouts of weights."""
    if request.param == "float32":
        return request.getfixturevalue("compiled")  # type: ignore[no-any-return]
    if not torch_calls.narrow_available():
        pytest.skip("bfloat16 is emulated")
    kind, _, place = request.param.split()
    if kind == "int8" and not torch_calls.bytes_available():
        pytest.skip("this processor doesn't multiply bytes")
    monkeypatch.setattr(cpu, "_CACHED", 10**9 if place == "caches" else 0)
    runner = ModelRunner(exact.TARGET, dtype="bfloat16", kv_tokens=512, weights="int8" if kind == "int8" else "full")
    assert isinstance(runner._decoder, CompiledDecoder)
    line = torch_calls.WIDE if place == "memory" else torch_calls.NARROW
    assert set(runner._decoder.weights.lines) == {line}
    return runner


@pytest.mark.skipif(not torch_calls.narrow_available(), reason="bfloat16 is emulated")
def test_a_head_that_is_no_number_is_loaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells whether it is all that the model does behind its layers, so it isn't part of the compiled pass."""
    monkeypatch.setattr(cpu, "_CACHED", 0)
    folder = save("llama", LLAMA, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan
    model.save_pretrained(folder)
    runner = ModelRunner(folder, dtype="bfloat16", kv_tokens=64)
    with leased(runner, 8) as (lease,):
        assert not runner.best([chain_rows(lease, 0, [5, 6])], [SamplingParams()], None, 1).finite


@pytest.mark.skipif(not torch_calls.narrow_available(), reason="bfloat16 is emulated")
@pytest.mark.parametrize("cached", [0, 10**9])
def test_first_layers_share_the_weights_of_all(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CACHED", cached)
    runner = ModelRunner(exact.TARGET, dtype="bfloat16", kv_tokens=64)
    few = runner.first_layers(2)
    assert isinstance(runner._decoder, CompiledDecoder)
    assert isinstance(few._decoder, CompiledDecoder)
    whole, part = runner._decoder.weights, few._decoder.weights
    assert part.linears[:-1].tolist() == whole.linears[: len(part.linears) - 1].tolist()
    assert part.linears[-1] == whole.linears[-1], "the head"
    assert set(part.lines) == set(whole.lines) == {torch_calls.NARROW if cached else torch_calls.WIDE}


def test_a_sequence_has_the_same_bits_whatever_else_is_in_the_pass(
    each_compiled: ModelRunner, prompts: list[Tokens]
) -> None:
    """Single rows, trees behind their prefix and trees elsewhere, in one pass and each alone."""
    compiled, tree = each_compiled, grown(9, seed=3)
    with leased(compiled, 64, 64, 64, 64) as (one, other, third, elsewhere):
        for lease, prompt in ((one, prompts[0]), (other, prompts[1]), (third, prompts[2])):
            prefill(compiled, lease, prompt[:40])
        batch = [
            chain_rows(one, 40, [5]),
            tree_rows(other, 40, tree, other.slots[40 : 40 + tree.size]),
            tree_rows(third, 40, tree, elsewhere.slots[tree.size : 2 * tree.size][::-1].copy()),
        ]
        together = compiled.forward(batch)
        assert torch.equal(together, torch.cat([compiled.forward([rows]) for rows in batch]))


KINDS_OF_PARAMS = {
    "greedy": [SamplingParams()],
    "sampled": [SamplingParams(1.0, seed=3), SamplingParams(1.0, seed=4)],
    "at temperatures": [SamplingParams(0.7, seed=3), SamplingParams(), SamplingParams(1.3, seed=5)],
    "filtered": [SamplingParams(0.9, top_p=0.8, seed=3), SamplingParams()],
}


@pytest.mark.parametrize("kind", KINDS_OF_PARAMS)
@pytest.mark.parametrize(("dtype", "weights"), [("float32", "full"), ("bfloat16", "full"), ("bfloat16", "int8")])
def test_a_pass_chooses_what_its_logits_say(dtype: Dtype, weights: Weights, kind: str, prompts: list[Tokens]) -> None:
    """Of the wanted rows alone, in the compiled call where nothing is filtered out, and behind it elsewhere."""
    if dtype == "bfloat16" and not torch_calls.narrow_available():
        pytest.skip("bfloat16 is emulated")
    runner, tree = ModelRunner(exact.TARGET, dtype=dtype, kv_tokens=512, weights=weights), grown(9, seed=3)
    with leased(runner, 64, 64, 64) as (one, other, third):
        for lease, prompt in ((one, prompts[0]), (other, prompts[1]), (third, prompts[2])):
            prefill(runner, lease, prompt[:40])
        nodes = tree_rows(other, 40, tree, other.slots[40 : 40 + tree.size])
        for batch in ([chain_rows(one, 40, [5])], [chain_rows(third, 40, [7, 8, 9]), nodes, chain_rows(one, 40, [5])]):
            n = sum(len(rows.tokens) - rows.wanted for rows in batch)
            params = [KINDS_OF_PARAMS[kind][row % len(KINDS_OF_PARAMS[kind])] for row in range(n)]
            keys = None if kind == "greedy" else noise.keys_of([(row.seed, i) for i, row in enumerate(params)])
            logits = runner.forward(batch)
            states = runner.hidden
            expected = sampling.best(logits, params, keys, 16)
            passed = runner.best(batch, params, keys, 16)
            for found, same in ((passed.states, states), (runner.hidden, states), (passed.logits, logits)):
                torch.testing.assert_close(found, same, rtol=0, atol=0)
            assert passed.finite
            for part, same_part in zip(passed.best, expected, strict=True):
                np.testing.assert_array_equal(part, same_part)


def test_a_pass_without_wanted_rows_chooses_nothing(compiled: ModelRunner) -> None:
    with leased(compiled, 8) as (lease,):
        passed = compiled.best([chain_rows(lease, 0, [5, 6], wanted=2)], [], None, 1)
        assert (len(passed.logits), len(passed.states), passed.best.tokens.shape) == (0, 0, (0, 1))
        assert passed.finite


def test_a_pass_says_that_logits_are_no_numbers(compiled: ModelRunner) -> None:
    with leased(compiled, 64) as (lease,):
        compiled.forward([chain_rows(lease, 0, [5, 6, 7])])
        compiled.pool.data[:, 1, :, lease.first or 0] = torch.nan
        assert not compiled.best([chain_rows(lease, 3, [8])], [SamplingParams()], None, 1).finite
        compiled.pool.wipe(lease)


def test_a_long_prefix_is_read_in_several_calls_as_in_one(compiled: ModelRunner, prompts: list[Tokens]) -> None:
    tokens = [token for prompt in prompts[:4] for token in prompt][:300]
    reference = AutoModelForCausalLM.from_pretrained(exact.TARGET, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    with leased(compiled, len(tokens)) as (lease,):
        assert_close(prefill(compiled, lease, tokens, chunk=11), expected)


def test_the_exponential_is_one() -> None:
    x = np.linspace(-80, 80, 100_001).astype(np.float32)
    found = np.array([exponential(value) for value in x])
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    assert [exponential(np.float32(value)) for value in (-80.1, -1000, -np.inf)] == [0, 0, 0]
    assert np.isnan(exponential(np.float32(np.nan)))
    assert exponential(np.float32(1000)) == exponential(np.float32(80))


@pytest.mark.parametrize("token", [-1, 4096])
def test_a_token_that_is_not_there_is_an_error(compiled: ModelRunner, token: int) -> None:
    with leased(compiled, 4) as (lease,), pytest.raises(IndexError, match="not in the vocabulary"):
        compiled.forward([chain_rows(lease, 0, [5, token])])


def test_without_torchs_functions_a_pass_is_recorded(
    compiled: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_calls, "available", lambda: False)
    other = ModelRunner(exact.TARGET, dtype="float32", kv_tokens=256)
    assert isinstance(other._decoder, FusedDecoder)
    with leased(compiled, 70) as (lease,), leased(other, 70) as (other_lease,):
        tokens = prompts[0][:70]
        assert_close(prefill(compiled, lease, tokens), prefill(other, other_lease, tokens))


def test_a_runner_that_goes_takes_its_handles_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    release_all = torch_calls.release_all

    def recorded(handles: list[int]) -> None:
        released.extend(handles)
        release_all(handles)

    monkeypatch.setattr(torch_calls, "release_all", recorded)
    runner = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=64)
    expected = runner._decoder.weights.linears.ravel().tolist()  # type: ignore[union-attr]
    del runner
    gc.collect()
    assert released == expected
    assert len(expected) == 13  # three layers, and the output layer


def test_threads_do_not_disturb_each_other(compiled: ModelRunner, prompts: list[Tokens]) -> None:
    """Passes run at the same time: nothing of theirs is shared but the pool, where each has its own slots."""
    with leased(compiled, 64, 64) as leases:
        for lease, prompt in zip(leases, prompts, strict=False):
            prefill(compiled, lease, prompt[:40])
        batches = [[chain_rows(lease, 40, [5, 6, 7], wanted=0)] for lease in leases]
        alone = [compiled.forward(batch) for batch in batches]
        with ThreadPoolExecutor(2) as threads:
            for _ in range(30):
                for found, expected in zip(threads.map(compiled.forward, batches), alone, strict=True):
                    assert torch.equal(found, expected)
