"""Cases of the ops on a quantised cache, for every device."""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import case as attention_case
from rope_cases import case as rope_case

from exl3.ops.kv_quant import QuantPages, new_quant_pages, quantise_reference

BITS = range(2, 9)
PAIRS = [(k, v) for k in BITS for v in BITS]


def quantised(cache: torch.Tensor, bits: int) -> QuantPages:
    """A float16 cache quantised; poisoned slots stay poisoned."""
    return QuantPages(*quantise_reference(cache, bits), cache.shape[-1])


def attention_quant_case(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int, int], bits: tuple[int, int]
) -> tuple[list[Any], dict[str, Any]]:
    args, options = attention_case(lengths, heads)
    args[1:3] = [quantised(cache, b) for cache, b in zip(args[1:3], bits, strict=True)]
    return args, options


def append_quant_case(
    heads: tuple[int, ...], m: int, bits: tuple[int, int], *, norm: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    args, options = rope_case(heads, m, norm)
    dims = heads[2:4]
    args[2:4] = [new_quant_pages(3, heads[1], d, bits=b) for d, b in zip(dims, bits, strict=True)]
    return args, options | {"v_head_dim": heads[3]}


def to(args: list[Any], device: torch.device) -> list[Any]:
    """The tensors of a case on a device."""
    return [
        QuantPages(a.words.to(device), a.scales.to(device), a.dim)
        if isinstance(a, QuantPages)
        else None
        if a is None
        else a.to(device)
        for a in args
    ]


def copied(args: list[Any]) -> list[Any]:
    """The case with tensors of its own."""
    return [
        QuantPages(a.words.clone(), a.scales.clone(), a.dim)
        if isinstance(a, QuantPages)
        else None
        if a is None
        else a.clone()
        for a in args
    ]
