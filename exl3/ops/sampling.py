"""Picking tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import fake, ops


@fake("argmax")
def _(logits: Tensor, valid: int) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def argmax(logits: Tensor, valid: int) -> Tensor:
    """The lowest column of the greatest value of each row.

    Args:
        logits: float32, on CUDA also float16, (m, V); rows may be strided. NaN counts as less than
            everything.
        valid: only columns below it are looked at, 1..V; padding of the head lies above.
    Returns:
        int64 (m,). A row of nothing but NaN gives 0.
    Raises:
        RuntimeError: wrong dtype, shape, layout or `valid`.
    """
    return ops().argmax(logits, valid)


def argmax_reference(logits: Tensor, valid: int) -> Tensor:
    """`argmax` in plain torch."""
    seen = logits[:, :valid]
    low = torch.where(seen.isnan(), -torch.inf, seen)
    best = (low == low.max(1, keepdim=True).values) & ~seen.isnan()
    return best.to(torch.int64).argmax(1)
