"""Output head: logits over the padded vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batch import Batch
from .linear import Linear, padded, run_group
from .norm import RMSNorm

if TYPE_CHECKING:
    from ..quant.types import QuantizedTensors
    from .quantized import StoredTensors


def wide(x: Tensor) -> Tensor:
    """x in float32, the dtype of logits; x itself if it is that already."""
    return x if x.dtype == torch.float32 else x.to(torch.float32)


class Head(Linear):
    """A linear layer whose output is padded to a multiple of 128 with -inf."""

    def __init__(self, key: str, *, hidden: int, vocab: int, alt_key: str | None) -> None:
        super().__init__(key, in_features=hidden, out_features=vocab, is_head=True, alt_key=alt_key)

    def set_quantized(self, tensors: QuantizedTensors | StoredTensors) -> None:
        """See `Linear.set_quantized`; the padded columns stay, to be masked in place."""
        super().set_quantized(tensors)
        if self.weight is not None and self.weight.bias is None:
            self.weight = replace(self.weight, out_features=padded(self.out_features))

    def logits(self, x: Tensor, batch: Batch, norm: RMSNorm | None = None) -> Tensor:
        """float32 (rows, V_pad); columns from the vocabulary's size on are -inf.

        Fused with the final norm where that is possible.
        """
        return self.mask(run_group(wide(x), (self,), batch, norm=norm))

    def mask(self, y: Tensor) -> Tensor:
        """Pad the columns with -inf, in place if they are there already."""
        width = padded(self.out_features)
        if y.shape[-1] == width:
            if width != self.out_features:
                y[:, self.out_features :] = float("-inf")
            return y
        full = y.new_full((y.shape[0], width), float("-inf"))
        full[:, : y.shape[-1]] = y
        return full

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """float32 (m, hidden) -> (m, n), n the vocabulary or its padded size."""
        return super().forward(x, batch)
