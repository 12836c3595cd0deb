"""GGUF tensor names of the supported architectures -> Hugging Face names."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")

# Factors of long-context RoPE; they belong to the configuration.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to Hugging Face.

    `interleaved`: rows of the q and k projections are stored in pairs of RoPE halves.
    """

    model_type: str
    class_name: str
    interleaved: bool


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", interleaved=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", interleaved=False),
}
# llama.cpp writes Mistral models as `llama`.
MISTRAL = Architecture("mistral", "MistralForCausalLM", interleaved=True)


def hugging_face_name(name: str) -> str | None:
    """The name in a Hugging Face checkpoint; None if there is none."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"model.layers.{int(match[1])}.{_BLOCK[match[2]]}.{match[3]}"


def heads_of(name: str) -> str | None:
    """Whose heads the rows of a tensor are: "q", "k" or None."""
    match = _BLOCK_NAME.fullmatch(name)
    return {"attn_q": "q", "attn_k": "k"}.get(match[2]) if match else None
