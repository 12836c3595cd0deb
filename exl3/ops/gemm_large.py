"""Product of many rows with a trellis-coded inner weight, for tests and benches; `linear` calls the
same kernel inside its own op."""

from __future__ import annotations

from torch import Tensor

from ..constants import TILE_DIM
from .codebook import Codebook
from .registry import fake, ops
from .trellis import decode, restore_trellis


@fake("gemm_large")
def _(x: Tensor, planes: Tensor, codebook: int) -> Tensor:
    return x.new_empty((x.shape[0], planes.shape[0] * TILE_DIM))


def gemm_large(x: Tensor, planes: Tensor, codebook: Codebook) -> Tensor:
    """x @ W', blocks of W' decoded on the way.

    Where the CPU has bfloat16 products, both sides are rounded to bfloat16 and sums are float32.

    Args:
        x: float32 (m, k), rows may be strided; k a multiple of 128.
        planes: int16 (n/16, k/16, 16*bits) from `prepare_trellis`; n a multiple of 128.
    Returns:
        float32 (m, n).
    """
    return ops().gemm_large(x, planes, codebook)


def inner_weight(planes: Tensor, codebook: Codebook) -> Tensor:
    """W' float16 (k, n) of lane planes."""
    return decode(restore_trellis(planes), codebook)


def gemm_large_reference(x: Tensor, planes: Tensor, codebook: Codebook) -> Tensor:
    """`gemm_large` in float64, result float64."""
    return x.double() @ inner_weight(planes, codebook).double()
