"""What several test files share: the bundled pair, loaded once, and an audit of its KV pools after every test."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything loads Triton, which then has its interpreter run kernels

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from engine.runner import ModelRunner
from engine.text import load_tokenizer
from tests import exact

settings.register_profile("paceline", deadline=None)  # machines are slow now and then
settings.load_profile("paceline")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Test machines are small, and bits are compared for one number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(exact.TARGET)


@pytest.fixture(scope="session")
def prompts() -> list[exact.Tokens]:
    """Five bundled prompts, some cut to lengths where something changes: one token, a whole prefill chunk, one more."""
    cut = [None, 1, 64, 65, 2]
    return [prompt[:length] for prompt, length in zip(exact.load_prompts(len(cut)), cut, strict=True)]


@pytest.fixture(scope="session")
def _target() -> ModelRunner:
    return ModelRunner(exact.TARGET, dtype="float32", invariant=True, kv_tokens=2048)


@pytest.fixture(scope="session")
def _fast_target() -> ModelRunner:
    return ModelRunner(exact.TARGET, dtype="float32", kv_tokens=2048)


@pytest.fixture(scope="session")
def _draft() -> ModelRunner:
    return ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=4096)


def _audited(runner: ModelRunner) -> Iterator[ModelRunner]:
    yield runner
    runner.pool.check()
    assert runner.pool.used_pages == 0, "the test left pages behind"


@pytest.fixture
def target(_target: ModelRunner) -> Iterator[ModelRunner]:
    """The bundled target in invariant mode."""
    yield from _audited(_target)


@pytest.fixture
def fast_target(_fast_target: ModelRunner) -> Iterator[ModelRunner]:
    """The bundled target outside invariant mode."""
    yield from _audited(_fast_target)


@pytest.fixture
def draft(_draft: ModelRunner) -> Iterator[ModelRunner]:
    """The bundled draft; not invariant, and nothing may depend on that."""
    yield from _audited(_draft)


@pytest.fixture(scope="session")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft with all its tokens numbered otherwise, but the end token."""
    folder = tmp_path_factory.mktemp("permuted") / "draft"
    shutil.copytree(exact.DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    order = np.random.default_rng(0).permutation(np.arange(1, len(vocabulary)))
    new = [0, *order.tolist()]
    tokenizer["model"]["vocab"] = {token: new[number] for token, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "embed_tokens" in name or "lm_head" in name]:
        moved = torch.empty_like(weights[name])
        moved[torch.tensor(new)] = weights[name]
        weights[name] = moved
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
