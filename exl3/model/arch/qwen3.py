"""Qwen3, dense: a norm over each head of q and k in place of Qwen2's biases."""

from __future__ import annotations

from dataclasses import replace

from ..arch_spec import GATED_MLP, GQA
from .llama import biased_attention
from .qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    attention=replace(biased_attention(GQA, ("attention_bias",) * 4), qk_norm=True),
    mlp=GATED_MLP,
    flags=("attention_bias",),
)
