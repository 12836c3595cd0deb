"""`CacheLayer`: keys and values of one attention layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import UnsupportedError
from ..ops.kv_quant import QuantPages

Pages = Tensor | QuantPages


class CacheLayer(ABC):
    """Pages of one layer. `attention` tells heads and head size; tensors exist after `alloc`."""

    def __init__(
        self, config: Any, attention: Any, cache_id: int, max_num_tokens: int, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__}: unknown arguments {sorted(kwargs)}")
        self.config, self.attention = config, attention
        self.cache_id, self.max_num_tokens = cache_id, max_num_tokens
        self.device: torch.device | None = None

    @abstractmethod
    def alloc(self, device: torch.device) -> None:
        """Make the tensors; harmless where they exist."""

    @abstractmethod
    def free(self) -> None:
        """Drop the tensors; harmless where there are none."""

    def kv(self) -> tuple[Pages, Pages]:
        """Keys and values as the attention ops take them.

        Raises:
            ConfigError: not allocated, because the model is not loaded.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot be read by attention")

    @abstractmethod
    def get_kv(self, seqlens: Tensor, block_table: Tensor, window: int = -1) -> tuple[Tensor, ...]:
        """Keys and values as float16 (pages, 256, kv_heads, head_dim)."""

    @abstractmethod
    def update_kv(
        self,
        seqlens: Tensor,
        block_table: Tensor,
        keys: Tensor,
        values: Tensor,
        length: int,
    ) -> None:
        """Take back what `get_kv` gave, after `length` tokens per row were appended in it."""

    @abstractmethod
    def update_kv_direct(
        self, seqlens: Tensor, block_table: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> None:
        """Append `length` tokens per row, (bsz, length, kv_heads, head_dim), at `seqlens`."""

    @abstractmethod
    def copy_page(self, source: CacheLayer, from_page: int, to_page: int, num_tokens: int) -> None:
        """Copy the first tokens of a page of `source` to a page of this layer."""

    @abstractmethod
    def get_tensors(self) -> list[Tensor]:
        """All tensors of the layer."""

    @abstractmethod
    def storage_size(self) -> int:
        """Bytes of the tensors once allocated."""

    def overhead_size(self) -> int:
        """Bytes of temporary room that reading needs."""
        return 0

    def page_tensors(self, page: int) -> list[Tensor]:
        """Views of everything stored for a page, in a fixed order; none before `alloc`. Copying
        them is all it takes to keep a page elsewhere and to bring it back."""
        pages = self.max_num_tokens // PAGE_SIZE
        for tensor in self.get_tensors():
            if tensor.dim() < 2 or tensor.shape[0] != pages or not tensor.is_contiguous():
                raise UnsupportedError(
                    f"{type(self).__name__} has a tensor {tuple(tensor.shape)} that is not one row "
                    f"for each of {pages} pages; it must override page_tensors"
                )
        return [tensor[page] for tensor in self.get_tensors()]

    def page_format(self) -> str:
        """Names the encoding of `page_tensors`: layers of equal format and shapes can read each
        other's pages. A type with settings that change what is stored adds them."""
        return type(self).__name__

    def tp_export(self, plan: Any) -> dict[str, Any]:
        """What a tensor-parallel rank needs to build its part."""
        return {"cls": type(self), "args": {"max_num_tokens": self.max_num_tokens}}
