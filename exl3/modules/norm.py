"""RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import LoadOptions, Module, read_float
from .batch import Batch

if TYPE_CHECKING:
    from ..loader.base import TensorSource


class RMSNorm(Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, key: str, *, dim: int, eps: float) -> None:
        super().__init__(key)
        self.dim, self.eps = dim, eps
        self.weight: Tensor | None = None  # float32 (dim,)

    def load(self, stc: TensorSource, options: LoadOptions | None = None) -> None:
        """See `Module.load`."""
        if self.weight is None:
            tensor = read_float(stc, f"{self.key}.weight", (self.dim,))
            self.weight = (
                tensor.to(torch.float32).contiguous().to((options or LoadOptions()).device)
            )

    def unload(self) -> None:
        """See `Module.unload`."""
        self.weight = None

    @property
    def loaded(self) -> bool:
        """See `Module.loaded`."""
        return self.weight is not None

    def stored_bytes(self, stc: TensorSource) -> int:
        """See `Module.stored_bytes`."""
        key = f"{self.key}.weight"
        return stc.info(key).n_bytes if stc.has(key) else 0

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """See `Module.forward`; any leading dims."""
        from ..ops.norm import rms_norm

        assert self.weight is not None
        return rms_norm(x, self.weight, self.eps)
