"""Attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError
from .kv_quant import QuantPages, dequantise_reference
from .registry import fake, ops
from .rope import rope_append_, rope_append_reference


@fake("paged_attention")
def _(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    q_heads = rest[3]
    return qkv.new_empty((qkv.shape[0], q_heads * v_cache.shape[3]))


@fake("paged_attention_quant")
def _(qkv: Tensor, *rest: Any) -> Tensor:
    q_heads, v_head_dim = rest[7], rest[10]
    return qkv.new_empty((qkv.shape[0], q_heads * v_head_dim))


@fake("decode_attention")
def _(qkv: Tensor, table: Tensor | None, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    q_heads = rest[6]
    return qkv.new_empty((qkv.shape[0], q_heads * v_cache.shape[3]))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where sequences lie in a paged cache, and the new rows among them; see `paged_attention` and
    `rope_append_`."""

    page_table: Tensor  # int32 (bsz, max_pages)
    seq_lens: Tensor  # int32 (bsz,)
    query_starts: Tensor  # int32 (bsz + 1,)
    slots: Tensor  # int64 (m,)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a layer does with q, k and v: the options of `rope_append_` and `paged_attention`."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    norm_offset: float = 0.0
    interleaved: bool = False

    def rows(self) -> dict[str, Any]:
        """Options of `rope_append_`."""
        names = ("q_heads", "kv_heads", "head_dim", "q_norm", "k_norm", "eps", "norm_offset")
        return {n: getattr(self, n) for n in (*names, "interleaved")}

    def scores(self) -> dict[str, Any]:
        """Options of `paged_attention`, all but `causal`."""
        names = ("q_heads", "kv_heads", "head_dim", "scale", "window", "softcap")
        return {n: getattr(self, n) for n in names}


def decode_attention(
    qkv: Tensor,
    table: Tensor | None,
    k_cache: Tensor | QuantPages,
    v_cache: Tensor | QuantPages,
    at: Sequences,
    layer: AttentionLayer,
    *,
    causal: bool = True,
    ahead: bool = False,
) -> Tensor:
    """`rope_append_`, then `paged_attention` over what is stored: a layer's whole attention.

    On CUDA one launch does it all for up to 16 new rows a sequence (compute capability 9.0, head
    dims that are multiples of 8 up to 256, rotated dims a multiple of 64, or of 8 if interleaved,
    float16 cache). There a row's result does not depend on the other sequences.

    A text may be passed as several sequences that share their pages, each with more of its rows
    (see `exl3.generator.packing`), if they are next to each other and in order: each sees the keys
    of those before it.

    Args:
        qkv: as in `rope_append_`, every sequence with the same number of rows; its q and k may be
            overwritten.
        at: slots and page table agree: key i of sequence b has slot
            page_table[b, i // 256] * 256 + i % 256. A row whose slot is below 0 is not stored.
        ahead: nothing that is launched since the device last was idle, but the launches that make
            qkv and table and other layers of the same step, writes the cache, `at` or the norms: on
            CUDA they may then be read before the launch before is complete.
    Returns:
        As `paged_attention`.
    Raises:
        As both.
    """
    if isinstance(k_cache, QuantPages) or isinstance(v_cache, QuantPages):
        rope_append_(
            qkv, table, k_cache, v_cache, at.slots, v_head_dim=_width(v_cache), **layer.rows()
        )
        pages = at.page_table, at.seq_lens, at.query_starts
        return paged_attention(qkv, k_cache, v_cache, *pages, causal=causal, **layer.scores())
    return ops().decode_attention(
        qkv,
        table,
        k_cache,
        v_cache,
        at.slots,
        layer.q_norm,
        layer.k_norm,
        at.page_table,
        at.seq_lens,
        at.query_starts,
        layer.q_heads,
        layer.kv_heads,
        layer.head_dim,
        layer.eps,
        layer.norm_offset,
        layer.interleaved,
        layer.scale,
        layer.window,
        layer.softcap,
        causal,
        ahead,
    )


def _width(v_cache: Tensor | QuantPages) -> int:
    """v_head_dim."""
    return v_cache.dim if isinstance(v_cache, QuantPages) else v_cache.shape[3]


def decode_attention_reference(
    qkv: Tensor,
    table: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    at: Sequences,
    layer: AttentionLayer,
    *,
    causal: bool = True,
) -> Tensor:
    """`decode_attention` in float64 with plain torch; qkv and the cache change as there. q is
    rounded to float16 where qkv is."""
    rope_append_reference(qkv, table, k_cache, v_cache, at.slots, **layer.rows())
    places = (at.page_table, at.seq_lens, at.query_starts)
    return paged_attention_reference(
        qkv, k_cache, v_cache, *places, causal=causal, **layer.scores()
    )


def paged_attention(
    qkv: Tensor,
    k_cache: Tensor | QuantPages,
    v_cache: Tensor | QuantPages,
    page_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """softmax(scale * q k^T) v of each sequence's new tokens over all its tokens.

    The queries of sequence b are rows query_starts[b] up to query_starts[b + 1]; the last one is at
    position seq_lens[b] - 1. A query that sees no key gets zeros, as do rows of no sequence. The
    result of a sequence depends neither on the number of threads nor, on the CPU, on the others.

    Args:
        qkv: float32, on CUDA also float16, (m, >= q_heads*head_dim): q in the first columns; rows
            may be strided.
        k_cache: float16 (pages, 256, kv_heads, head_dim), or quantised.
        v_cache: float16 (pages, 256, kv_heads, v_head_dim), or quantised like k_cache, of any bits.
        page_table: int32 (bsz, max_pages); entries past a sequence's pages are never read.
        seq_lens: int32 (bsz,), this step's tokens included; slots past them are never read.
        query_starts: int32 (bsz + 1,), not decreasing, within 0..m.
        q_heads: a multiple of kv_heads.
        scale: of the scores.
        window: number of keys that a query sees, itself included; 0: all.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        causal: a query sees no key after its own; otherwise it sees up to seq_lens[b].
    Returns:
        Like qkv, (m, q_heads*v_head_dim). CUDA multiplies in float16 with float32 sums.
    Raises:
        ConfigError: one of keys and values is quantised, the other is not.
        RuntimeError: wrong dtype, shape or layout; at run time a length, start or page in use that
            lies outside its table. CUDA reports none of these three: a bad length counts as 0, keys
            of a bad page are left out. There head dims are multiples of 8 up to 256.
    Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867; paging, arXiv 2309.06180.
    """
    sequences = (page_table, seq_lens, query_starts)
    heads = (q_heads, kv_heads, head_dim)
    if isinstance(k_cache, QuantPages) and isinstance(v_cache, QuantPages):
        cache = (k_cache.words, k_cache.scales, v_cache.words, v_cache.scales)
        options = (scale, window, softcap, causal)
        return ops().paged_attention_quant(qkv, *cache, *sequences, *heads, v_cache.dim, *options)
    if isinstance(k_cache, QuantPages) or isinstance(v_cache, QuantPages):
        raise ConfigError("paged_attention: quantise both keys and values, or neither")
    return ops().paged_attention(
        qkv, k_cache, v_cache, *sequences, *heads, scale, window, softcap, causal
    )


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence in the cache, float64 (length, kv_heads, dim)."""
    used = pages[: (length + PAGE_SIZE - 1) // PAGE_SIZE].to(torch.int64)
    return cache[used].flatten(0, 1)[:length].to(torch.float64)


def paged_attention_reference(
    qkv: Tensor,
    k_cache: Tensor | QuantPages,
    v_cache: Tensor | QuantPages,
    page_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    **options: Any,
) -> Tensor:
    """`paged_attention` in float64 with plain torch, rounded once."""
    k_cache = dequantise_reference(k_cache) if isinstance(k_cache, QuantPages) else k_cache
    v_cache = dequantise_reference(v_cache) if isinstance(v_cache, QuantPages) else v_cache
    heads, kv_heads, dim = (options[n] for n in ("q_heads", "kv_heads", "head_dim"))
    window, softcap = options.get("window", 0), options.get("softcap", 0.0)
    out = torch.zeros(qkv.shape[0], heads, v_cache.shape[3], dtype=torch.float64)
    for b, length in enumerate(seq_lens.tolist()):
        start, stop = query_starts[b : b + 2].tolist()
        k, v = (gather_pages(c, page_table[b], length) for c in (k_cache, v_cache))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        q = qkv[start:stop, : heads * dim].to(torch.float64).unflatten(1, (heads, dim))
        score = torch.einsum("qhd,khd->hqk", q, k) * options["scale"]
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        position = torch.arange(stop - start)[:, None] + length - (stop - start)
        key = torch.arange(length)
        hidden = torch.zeros(stop - start, length, dtype=torch.bool)
        if options.get("causal", True):
            hidden |= key > position
        if window:
            hidden |= key <= position - window
        hidden |= position < 0
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weight, v)
    return out.flatten(1).to(torch.float32)
