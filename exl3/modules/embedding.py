"""Token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import LoadOptions, Module, read_float
from .batch import Batch

if TYPE_CHECKING:
    from ..loader.base import TensorSource


class Embedding(Module):
    """Rows of a table; kept in the dtype of the file."""

    def __init__(self, key: str, *, vocab: int, hidden: int) -> None:
        super().__init__(key)
        self.vocab, self.hidden = vocab, hidden
        self.table: Tensor | None = None  # (vocab, hidden)

    def load(self, stc: TensorSource, options: LoadOptions | None = None) -> None:
        """See `Module.load`."""
        if self.table is None:
            shape = (self.vocab, self.hidden)
            table = read_float(stc, f"{self.key}.weight", shape).contiguous()
            device = (options or LoadOptions()).device
            if device.type == "cuda" and table.dtype == torch.float32:
                table = table.to(torch.float16)  # activations are float16 there
            self.table = table.to(device)

    def unload(self) -> None:
        """See `Module.unload`."""
        self.table = None

    @property
    def loaded(self) -> bool:
        """See `Module.loaded`."""
        return self.table is not None

    def stored_bytes(self, stc: TensorSource) -> int:
        """See `Module.stored_bytes`."""
        key = f"{self.key}.weight"
        return stc.info(key).n_bytes if stc.has(key) else 0

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Ids int64 (m,) -> (m, hidden), float32, or float16 on CUDA.

        Raises:
            RuntimeError: an id outside the table.
        """
        from ..ops.embedding import embedding

        assert self.table is not None
        return embedding(x, self.table)
