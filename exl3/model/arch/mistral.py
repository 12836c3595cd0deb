"""Mistral: Llama's layers, all of them with an optional sliding window."""

from __future__ import annotations

from ..arch_spec import DECODER_FIELDS, GATED_MLP, GQA, Arch, ChatFormat, Window

MISTRAL = Arch(
    "MistralForCausalLM",
    fields=DECODER_FIELDS,
    attention=GQA,
    mlp=GATED_MLP,
    window=Window(default=4096),
    default_max_positions=131072,
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    chat=ChatFormat(
        start="<s>", system="[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]", user="[INST]{prompt}[/INST]"
    ),
)
