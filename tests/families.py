"""Tiny random models of many families."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 128
WINDOW = 8
LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | dict(sliding_window=WINDOW, head_dim=32),
    "qwen2": LLAMA | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": LLAMA | dict(head_dim=32),
    "gemma": LLAMA | dict(head_dim=32),
    "gemma2": LLAMA
    | dict(
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": LLAMA | dict(head_dim=32, sliding_window=WINDOW, num_hidden_layers=6),
    "gpt2": GPT2,
    "gpt_neox": LLAMA,
    "gpt_oss": LLAMA | dict(head_dim=16, sliding_window=WINDOW, num_local_experts=4),  # sinks
    "granite": LLAMA | dict(logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": LLAMA,
    "mixtral": LLAMA | dict(num_local_experts=4),
    "olmo2": LLAMA,
    "opt": LLAMA | dict(ffn_dim=96, word_embed_proj_dim=32),
    "phi3": LLAMA | dict(sliding_window=WINDOW),
    "smollm3": LLAMA,
    "stablelm": LLAMA,  # hands no arguments on to its attention
}


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that none of these models takes for special ones."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


def save(name: str, settings: dict[str, Any], folder: Path) -> Path:
    """A tiny model of this kind with random weights that are large enough for its logits not to be flat."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**settings)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
        else:
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder
