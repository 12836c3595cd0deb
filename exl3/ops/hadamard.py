"""Block-diagonal Hadamard transform."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ..constants import HADAMARD_DIM
from .registry import fake, ops


@fake("hadamard_128")
def _(x: Tensor, pre_scale: Tensor | None, post_scale: Tensor | None) -> Tensor:
    return torch.empty_like(x)


def hadamard_128(
    x: Tensor, *, pre_scale: Tensor | None = None, post_scale: Tensor | None = None
) -> Tensor:
    """Hblk(x * pre_scale) * post_scale, H the 128 x 128 Sylvester matrix over sqrt(128).

    Args:
        x: float32, float16 or bfloat16 (..., dim), contiguous; dim a multiple of 128.
        pre_scale: float16 (dim,), or None for 1.
        post_scale: float16 (dim,), or None for 1.
    Returns:
        A new tensor like x; arithmetic is float32.
    Raises:
        RuntimeError: wrong dtype, shape or layout.
    Source: format page, section 2.
    """
    return ops().hadamard_128(x, pre_scale, post_scale)


@cache
def hadamard_matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    """The 128 x 128 matrix itself: symmetric, its own inverse."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < HADAMARD_DIM:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h / math.sqrt(HADAMARD_DIM)).to(dtype)


def hadamard_128_reference(
    x: Tensor, *, pre_scale: Tensor | None = None, post_scale: Tensor | None = None
) -> Tensor:
    """`hadamard_128` as a matrix product in float64."""
    y = x.to(torch.float64)
    if pre_scale is not None:
        y = y * pre_scale.to(torch.float64)
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // HADAMARD_DIM, HADAMARD_DIM)
    y = (blocks @ hadamard_matrix(torch.float64).to(x.device)).reshape(x.shape)
    if post_scale is not None:
        y = y * post_scale.to(torch.float64)
    return y.to(x.dtype)
