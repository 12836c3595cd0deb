"""Grouped-query attention with rotary positions, on whole sequences or on a paged cache."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Module
from .batch import Batch
from .linear import Linear, run_group
from .norm import RMSNorm
from .rope import Rope

if TYPE_CHECKING:
    from ..ops.attention import AttentionLayer

# On CUDA, new sequences of this length and more go through torch's fused attention.
_LEAST_DENSE = 64
_CHUNK = 1024  # lengths that come up again and again are multiples of it


class Attention(Module):
    """x + o(attention(q, k, v)) with q, k, v from norm(x). `instance` is its layer of the cache."""

    def __init__(
        self,
        key: str,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        projections: tuple[Linear, Linear, Linear, Linear],
        qk_norms: tuple[RMSNorm, RMSNorm] | None,
        rope: Rope,
        window: int = 0,
    ) -> None:
        super().__init__(key)
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        self.q_norm = None if qk_norms is None else qk_norms[0]
        self.k_norm = None if qk_norms is None else qk_norms[1]
        self.rope = rope
        self.window = window
        self.scale = 1.0 / math.sqrt(head_dim)
        self.instance = 0

    def repeat(self, instance: int) -> Attention:
        """The same weights with another layer of the cache."""
        twin = copy.copy(self)
        twin.instance = instance
        return twin

    def children(self) -> list[Module]:
        """See `Module.children`."""
        parts: list[Module | None] = [
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.q_norm,
            self.k_norm,
            self.o_proj,
        ]
        return [part for part in parts if part is not None]

    def label(self) -> str:
        """See `Module.label`."""
        text = f"Attention {self.q_heads} q, {self.kv_heads} kv heads of {self.head_dim}"
        return f"{text}, window {self.window}" if self.window else text

    def forward(self, x: Tensor, batch: Batch, norm: RMSNorm | None = None) -> Tensor:
        """See `Module.forward`; returns x + attention(norm(x))."""
        qkv = run_group(x, (self.q_proj, self.k_proj, self.v_proj), batch, norm=norm)
        context = self._dense(qkv, batch) if batch.cache is None else self._paged(qkv, batch)
        return run_group(context, (self.o_proj,), batch, residual=x)

    def store(self, x: Tensor, batch: Batch, norm: RMSNorm | None = None) -> None:
        """Only append keys and values to the cache: all that a prefill needs of the last layer."""
        qkv = run_group(x, (self.q_proj, self.k_proj, self.v_proj), batch, norm=norm)
        self._append(qkv, batch)

    def _layer(self) -> AttentionLayer:
        """Options of this layer's ops."""
        from ..ops.attention import AttentionLayer

        return AttentionLayer(
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            self.scale,
            self.window,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=1e-6 if self.q_norm is None else self.q_norm.eps,
        )

    def _append(self, qkv: Tensor, batch: Batch) -> None:
        """Norm and rotate q and k in place; store keys and values if there is a cache."""
        from ..ops.rope import rope_append_

        keys, values = (None, None) if batch.cache is None else batch.cache.kv(self.instance)
        table = batch.rope_table(self.rope)
        rope_append_(qkv, table, keys, values, batch.slots, **self._layer().rows())

    def _paged(self, qkv: Tensor, batch: Batch) -> Tensor:
        from ..ops.attention import Sequences, decode_attention

        assert batch.cache is not None
        keys, values = batch.cache.kv(self.instance)
        # A quantised cache is read also where all is new: chunks must equal the whole.
        if isinstance(keys, Tensor) and self._is_whole(qkv, batch):
            self._append(qkv, batch)
            return self._whole(qkv, batch)
        assert batch.page_table is not None and batch.slots is not None
        assert batch.seq_lens is not None and batch.query_starts is not None
        table, layer = batch.rope_table(self.rope), self._layer()
        at = Sequences(batch.page_table, batch.seq_lens, batch.query_starts, batch.slots)
        # `ahead`: q, k and v are projected just before.
        return decode_attention(
            qkv, table, keys, values, at, layer, causal=batch.causal, ahead=True
        )

    def _dense(self, qkv: Tensor, batch: Batch) -> Tensor:
        self._append(qkv, batch)
        return self._whole(qkv, batch)

    def _is_whole(self, qkv: Tensor, batch: Batch) -> bool:
        """Whether torch's fused attention serves a pass on a cache: all that it reads is new."""
        long = qkv.is_cuda and batch.fresh and batch.q_len >= _LEAST_DENSE
        return long and not (self.window and batch.q_len > self.window)

    def _whole(self, qkv: Tensor, batch: Batch) -> Tensor:
        """Attention of whole sequences over themselves; nothing is read from a cache."""
        d = self.head_dim
        parts = qkv.split([self.q_heads * d, self.kv_heads * d, self.kv_heads * d], dim=-1)
        shape = (batch.bsz, batch.q_len, -1, d)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
        mask = window_mask(batch.q_len, self.window, batch.causal)
        mask = None if mask is None else mask.to(qkv.device)
        if qkv.is_cuda and qkv.dtype == torch.float32 and _may_round():
            q, k, v = q.half(), k.half(), v.half()
        elif qkv.is_cuda and qkv.dtype == torch.float32:  # its fused kernel knows no groups
            k, v = (x.repeat_interleave(self.q_heads // self.kv_heads, 1) for x in (k, v))
        with _fused_kernels(q):
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=batch.causal and mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return context.transpose(1, 2).reshape(batch.rows, -1).to(qkv.dtype)


def _may_round() -> bool:
    """Whether products of float32 may read 10 bits of mantissa: then attention does, as float16."""
    return torch.get_float32_matmul_precision() != "highest"


def _fused_kernels(q: Tensor) -> AbstractContextManager[object]:
    """On CUDA, which of torch's kernels may run for queries (bsz, heads, length, dim).

    cuDNN's are about twice as fast, but are built anew for every length: only for whole chunks.
    """
    if q.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.dtype == torch.float16 and q.shape[2] % _CHUNK == 0 and _has_tensor_core_attention(q):
        known.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(known, set_priority=True)


def _has_tensor_core_attention(q: Tensor) -> bool:
    """Whether cuDNN has kernels that are faster there than the others: from Hopper on."""
    return (
        torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(q.device)[0] >= 9
    )


def window_mask(length: int, window: int, causal: bool) -> Tensor | None:
    """bool (length, length), True where a query (row) sees a key; None: no window to apply.

    A window of w covers the query's own position and the w - 1 before it.
    """
    if not window or length <= window:
        return None
    offset = torch.arange(length)[:, None] - torch.arange(length)
    visible = offset < window
    return visible & (offset >= 0) if causal else visible & (offset > -window)
