"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import fake, ops


@fake("embedding")
def _(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    wide = table.device.type == "cpu" or table.dtype == torch.float32
    dtype = torch.float32 if wide else torch.float16
    return table.new_empty((ids.shape[0], table.shape[1]), dtype=dtype)


def embedding(ids: Tensor, table: Tensor, *, scale: float = 1.0) -> Tensor:
    """Rows of the table, times a scale.

    Args:
        ids: int64 (m,), each in [0, V).
        table: float16, bfloat16 or float32 (V, d), contiguous.
        scale: factor applied in float32.
    Returns:
        float32 (m, d); on CUDA float16, unless the table is float32.
    Raises:
        RuntimeError: wrong dtype, shape or layout, or an id outside the table, also when a
            recorded graph is replayed; nothing is read or written then. CUDA reports no such id:
            its row is NaN.
    """
    return ops().embedding(ids, table, scale)


def embedding_reference(ids: Tensor, table: Tensor, *, scale: float = 1.0) -> Tensor:
    """`embedding` in plain torch."""
    return table[ids].to(torch.float32) * scale
