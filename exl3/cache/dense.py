"""Cache layer with plain float16 keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError
from .base import CacheLayer


class CacheLayer_fp16(CacheLayer):
    """Keys and values float16 (pages, 256, kv_heads, head_dim)."""

    def __init__(
        self, config: Any, attention: Any, cache_id: int, max_num_tokens: int, **kwargs: Any
    ) -> None:
        super().__init__(config, attention, cache_id, max_num_tokens, **kwargs)
        self.shape = (
            max_num_tokens // PAGE_SIZE,
            PAGE_SIZE,
            attention.kv_heads,
            attention.head_dim,
        )
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def alloc(self, device: torch.device) -> None:
        """See `CacheLayer.alloc`. Pages that were never used cost no memory on the CPU."""
        if self.keys is None:
            self.device = device
            self.keys = torch.zeros(self.shape, dtype=torch.float16, device=device)
            self.values = torch.zeros(self.shape, dtype=torch.float16, device=device)

    def free(self) -> None:
        """See `CacheLayer.free`."""
        self.keys = self.values = self.device = None

    def kv(self) -> tuple[Tensor, Tensor]:
        """See `CacheLayer.kv`."""
        if self.keys is None or self.values is None:
            raise ConfigError("the cache has no tensors: its model is not loaded")
        return self.keys, self.values

    def get_kv(self, seqlens: Tensor, block_table: Tensor, window: int = -1) -> tuple[Tensor, ...]:
        """See `CacheLayer.get_kv`; the layer's own tensors."""
        return self.kv()

    def update_kv(
        self, seqlens: Tensor, block_table: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> None:
        """See `CacheLayer.update_kv`; `get_kv` gave the tensors themselves, nothing to do."""

    def update_kv_direct(
        self, seqlens: Tensor, block_table: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> None:
        """See `CacheLayer.update_kv_direct`."""
        own_keys, own_values = self.kv()
        device = own_keys.device
        offsets = seqlens.to(device, torch.int64)[:, None] + torch.arange(length, device=device)
        pages = block_table.to(device, torch.int64).gather(1, offsets // PAGE_SIZE)
        own_keys[pages, offsets % PAGE_SIZE] = keys.to(torch.float16)
        own_values[pages, offsets % PAGE_SIZE] = values.to(torch.float16)

    def copy_page(self, source: CacheLayer, from_page: int, to_page: int, num_tokens: int) -> None:
        """See `CacheLayer.copy_page`."""
        for target, origin in zip(self.kv(), source.get_tensors(), strict=True):
            target[to_page, :num_tokens].copy_(origin[from_page, :num_tokens])

    def get_tensors(self) -> list[Tensor]:
        """See `CacheLayer.get_tensors`."""
        return [t for t in (self.keys, self.values) if t is not None]

    def storage_size(self) -> int:
        """See `CacheLayer.storage_size`."""
        return 2 * 2 * self.max_num_tokens * self.attention.kv_heads * self.attention.head_dim
