"""Rotary position embedding, with what surrounds it in a decode step: head norms and the append
to the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .kv_quant import QuantPages, quantise_reference
from .norm import rms_norm_reference
from .registry import fake, ops


@fake("rope_table")
def _(positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))


@fake("rope_append_")
def _(qkv: Tensor, *rest: Any) -> None:
    return None


@fake("rope_append_quant_")
def _(qkv: Tensor, *rest: Any) -> None:
    return None


def rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> Tensor:
    """[cos(a) | sin(a)] * scale with a = position * inv_freq.

    The angle is formed and reduced in double precision, so that positions of millions lose nothing.

    Args:
        positions: int32 (m,).
        inv_freq: float32 (rot / 2,).
        scale: the attention scale of YaRN and similar variants.
    Returns:
        float32 (m, rot).
    Raises:
        RuntimeError: wrong dtype, shape or layout.
    Source: Su et al., arXiv 2104.09864.
    """
    return ops().rope_table(positions, inv_freq, scale)


def rope_table_reference(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> Tensor:
    """`rope_table` in float64, rounded once."""
    angle = positions.to(torch.float64)[:, None] * inv_freq.to(torch.float64)
    return (torch.cat([angle.cos(), angle.sin()], 1) * scale).to(torch.float32)


def rope_append_(
    qkv: Tensor,
    table: Tensor | None,
    k_cache: Tensor | QuantPages | None,
    v_cache: Tensor | QuantPages | None,
    slots: Tensor | None,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Norm and rotate the q and k heads of qkv in place, then store K and V in the cache.

    Args:
        qkv: float32 (m, q_heads*head_dim + kv_heads*(head_dim + v_head_dim)): q, k, v; rows may be
            strided; on CUDA also float16. The q and k parts are overwritten.
        table: float32 (m, rot) of `rope_table`, rot even and at most head_dim: only the first rot
            dims of a head turn. None: no rotation.
        k_cache: float16 (pages, 256, kv_heads, head_dim), or quantised; or None with v_cache and
            slots: no cache.
        v_cache: float16 (pages, 256, kv_heads, v_head_dim), or quantised like k_cache, of any bits.
        slots: int64 (m,): page * 256 + offset; below 0: this row is not stored.
        v_head_dim: None: head_dim.
        q_norm, k_norm: float32 (head_dim,): RMS norm of each head before the rotation.
        eps, norm_offset: of that norm, as in `rms_norm`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rot/2).
    Raises:
        ConfigError: one of keys and values is quantised, the other is not.
        RuntimeError: wrong dtype, shape or layout, or a slot past the cache (nothing is written
            then); CUDA does not report such a slot, and does not store its row.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    heads = (q_heads, kv_heads, head_dim, v_dim)
    options = (q_norm, k_norm, *heads, eps, norm_offset, interleaved)
    if isinstance(k_cache, QuantPages) and isinstance(v_cache, QuantPages):
        cache = (k_cache.words, k_cache.scales, v_cache.words, v_cache.scales)
        ops().rope_append_quant_(qkv, table, *cache, slots, *options)
    elif isinstance(k_cache, QuantPages) or isinstance(v_cache, QuantPages):
        raise ConfigError("rope_append_: quantise both keys and values, or neither")
    else:
        ops().rope_append_(qkv, table, k_cache, v_cache, slots, *options)


def rotate_reference(x: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotation of the first rot dims of x (m, heads, d) by table (m, rot), in the dtype of x."""
    rot = table.shape[1]
    cos, sin = table.to(x.dtype)[:, None].chunk(2, dim=-1)
    turned, rest = x[..., :rot], x[..., rot:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pair = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([pair.flatten(-2), rest], -1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def rope_append_reference(
    qkv: Tensor,
    table: Tensor | None,
    k_cache: Tensor | QuantPages | None,
    v_cache: Tensor | QuantPages | None,
    slots: Tensor | None,
    **options: Any,
) -> None:
    """`rope_append_` in float64 with plain torch, rounded once."""
    heads, kv_heads, dim = (options[n] for n in ("q_heads", "kv_heads", "head_dim"))
    wide = qkv.to(torch.float64)
    q, k, v = wide.split([heads * dim, kv_heads * dim, qkv.shape[1] - (heads + kv_heads) * dim], 1)
    norm = {"weight_offset": options.get("norm_offset", 0.0)}
    parts = []
    for x, weight in ((q, options.get("q_norm")), (k, options.get("k_norm"))):
        x = x.unflatten(1, (-1, dim))
        if weight is not None:
            x = rms_norm_reference(x, weight, options.get("eps", 1e-6), **norm)
        if table is not None:
            x = rotate_reference(x, table, interleaved=options.get("interleaved", False))
        parts.append(x)
    qkv.copy_(torch.cat([parts[0].flatten(1), parts[1].flatten(1), v], 1))
    if k_cache is None or v_cache is None or slots is None:
        return
    stored = slots >= 0
    for cache, x in ((k_cache, parts[1]), (v_cache, v.unflatten(1, (kv_heads, -1)))):
        if isinstance(cache, QuantPages):
            words, scales = quantise_reference(x[stored], cache.bits)
            cache.words.flatten(0, 1)[slots[stored]] = words
            cache.scales.flatten(0, 1)[slots[stored]] = scales
            continue
        cache.view(-1, *cache.shape[2:])[slots[stored]] = x[stored].to(torch.float32).half()
