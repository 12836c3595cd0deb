"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if switched on."""

from __future__ import annotations

from ..arch_spec import CHATML, DECODER_FIELDS, GATED_MLP, GQA, Arch, Window
from .llama import biased_attention

QWEN2 = Arch(
    "Qwen2ForCausalLM",
    fields=DECODER_FIELDS,
    attention=biased_attention(GQA, (True, True, True, False)),
    mlp=GATED_MLP,
    window=Window(
        default=4096,
        flag="use_sliding_window",
        first_layer="max_window_layers",
        first_default=28,
    ),
    default_max_positions=32768,
    chat=CHATML,
)
