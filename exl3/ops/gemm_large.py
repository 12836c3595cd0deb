"""Product of many rows with a trellis-coded inner weight on CUDA, for tests: `linear` decodes with
the same kernel inside its own op."""

from __future__ import annotations

from torch import Tensor

from ..constants import TILE_DIM
from .codebook import Codebook
from .registry import fake, ops


@fake("gemm_large")
def _(x: Tensor, planes: Tensor, codebook: int) -> Tensor:
    return x.new_empty((x.shape[0], planes.shape[0] * TILE_DIM))


def gemm_large(x: Tensor, planes: Tensor, codebook: Codebook) -> Tensor:
    """x @ W', W' decoded to float16.

    Args:
        x: float16 (m, k) on CUDA; k a multiple of 128.
        planes: int16 (n/16, k/16, 16*bits) from `prepare_trellis`; n a multiple of 128.
    Returns:
        float16 (m, n).
    """
    return ops().gemm_large(x, planes, codebook)
