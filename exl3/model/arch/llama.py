"""Llama and everything published under its architecture name."""

from __future__ import annotations

from dataclasses import replace

from ..arch_spec import DECODER_FIELDS, GATED_MLP, GQA, Arch, Attention, ChatFormat, GatedMlp


def biased_attention(attention: Attention, flags: tuple[bool | str, ...]) -> Attention:
    """The attention with the given bias rule for q, k, v and o."""
    q, k, v, o = (
        replace(proj, bias=flag) for proj, flag in zip(attention.projections, flags, strict=True)
    )
    return replace(attention, projections=(q, k, v, o))


def biased_mlp(mlp: GatedMlp, flag: bool | str) -> GatedMlp:
    """The MLP with one bias rule for its three layers."""
    gate, up, down = (replace(proj, bias=flag) for proj in mlp.projections)
    return replace(mlp, projections=(gate, up, down))


LLAMA = Arch(
    "LlamaForCausalLM",
    fields=DECODER_FIELDS,
    attention=biased_attention(GQA, ("attention_bias",) * 4),
    mlp=biased_mlp(GATED_MLP, "mlp_bias"),
    flags=("attention_bias", "mlp_bias"),
    fixed={"rope_interleaved": (False,), "is_llama_config": (True,)},
    chat=ChatFormat(
        start="<|begin_of_text|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
        user=(
            "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
    ),
)
