"""Cache layer with quantised keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError, UnsupportedError
from ..ops.kv_quant import (
    MAX_BITS,
    MIN_BITS,
    QuantPages,
    blocks_of,
    dequantise_reference,
    new_quant_pages,
)
from .base import CacheLayer


def _checked_bits(name: str, bits: Any) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise ConfigError(f"{name} must be an int, got {bits!r}")
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError(f"{name} must be {MIN_BITS} to {MAX_BITS}, got {bits}")
    return bits


class CacheLayer_quant(CacheLayer):
    """Keys and values of 2 to 8 bits and a float16 scale for 32 of them, rotated per head.

    Args:
        k_bits, v_bits: bits per key and value; 0.5 more go to the scales.
        compand_a: only 0.0, off, is supported.
    Raises:
        ConfigError: bits that are not 2..8.
        UnsupportedError: `compand_a` is not 0.
    """

    def __init__(
        self,
        config: Any,
        attention: Any,
        cache_id: int,
        max_num_tokens: int,
        *,
        k_bits: int,
        v_bits: int,
        compand_a: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, attention, cache_id, max_num_tokens, **kwargs)
        self.k_bits, self.v_bits = _checked_bits("k_bits", k_bits), _checked_bits("v_bits", v_bits)
        if compand_a:
            raise UnsupportedError(f"compand_a must be 0.0 (off), got {compand_a}")
        self.keys: QuantPages | None = None
        self.values: QuantPages | None = None

    def alloc(self, device: torch.device) -> None:
        """See `CacheLayer.alloc`. Pages that were never used cost no memory on the CPU."""
        if self.keys is None:
            self.device = device
            pages, heads = self.max_num_tokens // PAGE_SIZE, self.attention.kv_heads
            dim = self.attention.head_dim
            self.keys = new_quant_pages(pages, heads, dim, bits=self.k_bits, device=device)
            self.values = new_quant_pages(pages, heads, dim, bits=self.v_bits, device=device)

    def free(self) -> None:
        """See `CacheLayer.free`."""
        self.keys = self.values = self.device = None

    def kv(self) -> tuple[QuantPages, QuantPages]:
        """See `CacheLayer.kv`."""
        if self.keys is None or self.values is None:
            raise ConfigError("the cache has no tensors: its model is not loaded")
        return self.keys, self.values

    def get_kv(self, seqlens: Tensor, block_table: Tensor, window: int = -1) -> tuple[Tensor, ...]:
        """See `CacheLayer.get_kv`; decodes the whole layer, which attention never does."""
        return tuple(dequantise_reference(pages).to(torch.float16) for pages in self.kv())

    def update_kv(
        self, seqlens: Tensor, block_table: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> None:
        """See `CacheLayer.update_kv`; quantises the tokens that are new."""
        device = self.kv()[0].words.device
        pages, offsets = self._places(seqlens, block_table, length)
        new_keys, new_values = (x.to(device)[pages, offsets] for x in (keys, values))
        self.update_kv_direct(seqlens, block_table, new_keys, new_values, length)

    def update_kv_direct(
        self, seqlens: Tensor, block_table: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> None:
        """See `CacheLayer.update_kv_direct`."""
        from ..ops.rope import rope_append_

        own_keys, own_values = self.kv()
        pages, offsets = self._places(seqlens, block_table, length)
        device, dim = pages.device, own_keys.dim
        rows = [x.to(device, torch.float32).reshape(pages.numel(), -1) for x in (keys, values)]
        rope_append_(
            torch.cat([rows[0].new_zeros(pages.numel(), dim), *rows], 1),
            None,
            own_keys,
            own_values,
            (pages * PAGE_SIZE + offsets).flatten(),
            q_heads=1,
            kv_heads=self.attention.kv_heads,
            head_dim=dim,
        )

    def _places(self, seqlens: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Page and offset of `length` tokens per row after `seqlens`, int64 (bsz, length)."""
        device = self.kv()[0].words.device
        at = seqlens.to(device, torch.int64)[:, None] + torch.arange(length, device=device)
        return block_table.to(device, torch.int64).gather(1, at // PAGE_SIZE), at % PAGE_SIZE

    def copy_page(self, source: CacheLayer, from_page: int, to_page: int, num_tokens: int) -> None:
        """See `CacheLayer.copy_page`.

        Raises:
            ConfigError: the source is not quantised to the same bits.
        """
        if not isinstance(source, CacheLayer_quant) or (source.k_bits, source.v_bits) != (
            self.k_bits,
            self.v_bits,
        ):
            raise ConfigError("copy_page: both caches must be quantised to the same bits")
        for target, origin in zip(self.get_tensors(), source.get_tensors(), strict=True):
            target[to_page, :num_tokens].copy_(origin[from_page, :num_tokens])

    def get_tensors(self) -> list[Tensor]:
        """See `CacheLayer.get_tensors`: words and scales of keys, then of values."""
        if self.keys is None or self.values is None:
            return []
        return [self.keys.words, self.keys.scales, self.values.words, self.values.scales]

    def storage_size(self) -> int:
        """See `CacheLayer.storage_size`."""
        blocks = self.max_num_tokens * self.attention.kv_heads * blocks_of(self.attention.head_dim)
        return blocks * (4 * (self.k_bits + self.v_bits) + 2 * 2)

    def page_format(self) -> str:
        """See `CacheLayer.page_format`."""
        return f"{type(self).__name__} {self.k_bits},{self.v_bits}"

    def tp_export(self, plan: Any) -> dict[str, Any]:
        """See `CacheLayer.tp_export`."""
        exported = super().tp_export(plan)
        exported["args"] |= {"k_bits": self.k_bits, "v_bits": self.v_bits}
        return exported
