"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import fake, ops


@fake("rms_norm")
def _(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return x.new_empty(x.shape)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dim.

    Args:
        x: float32, on CUDA also float16, (..., dim); rows may be strided when x is a matrix.
        weight: float32 (dim,), or None for no scale.
        eps: added to the mean square.
        weight_offset: 1.0 for models that store the weight minus one.
    Returns:
        Like x, contiguous.
    Raises:
        RuntimeError: wrong dtype, shape or layout.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    return ops().rms_norm(x, weight, eps, weight_offset)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0
) -> Tensor:
    """`rms_norm` in float64, rounded once."""
    y = x.to(torch.float64)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(torch.float64) + weight_offset)
    return y.to(x.dtype)
