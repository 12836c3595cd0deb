"""Padding, tile order and stored names of a quantised linear layer (format page, sections 1-2)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..constants import HADAMARD_DIM, TILE_DIM, TILE_NUMEL
from ..ops.codebook import Codebook
from ..ops.trellis import tile_positions
from .types import QuantizedTensors

MULTIPLIER_NAMES = tuple(c.label for c in Codebook if c.multiplier is not None)
"""Names of the scalar that tells the codebook; `3inst` has none."""


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 128."""
    return -(-size // HADAMARD_DIM) * HADAMARD_DIM


def pad_weight(weight: Tensor) -> Tensor:
    """(in, out) -> float32 (k, n), zero-padded; always a new tensor."""
    rows, columns = weight.shape
    result = weight.new_zeros(padded(rows), padded(columns), dtype=torch.float32)
    result[:rows, :columns] = weight
    return result


def pad_square(matrix: Tensor) -> Tensor:
    """(in, in) -> the same dtype (k, k), zero-padded; itself where nothing is missing."""
    size = padded(matrix.shape[0])
    if size == matrix.shape[0]:
        return matrix
    result = matrix.new_zeros(size, size)
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


@cache
def tile_order() -> Tensor:
    """int64 (256,): stored position -> row-major place inside the tile."""
    row, column = tile_positions()
    return TILE_DIM * row + column


@cache
def stored_order(device: torch.device) -> tuple[Tensor, Tensor]:
    """`tile_order` and its inverse on a device."""
    order = tile_order()
    return order.to(device), torch.argsort(order).to(device)


def to_tiles(weight: Tensor) -> Tensor:
    """(k, n) -> (k/16 * n/16, 256): tiles row by row, each in stored order."""
    rows, columns = weight.shape[0] // TILE_DIM, weight.shape[1] // TILE_DIM
    tiles = weight.reshape(rows, TILE_DIM, columns, TILE_DIM).transpose(1, 2)
    return tiles.reshape(rows * columns, TILE_NUMEL)[:, stored_order(weight.device)[0]]


def from_tiles(tiles: Tensor, columns: int) -> Tensor:
    """Inverse of `to_tiles`; `columns` is n/16."""
    rows = tiles.shape[0] // columns
    weight = tiles[:, stored_order(tiles.device)[1]].reshape(rows, columns, TILE_DIM, TILE_DIM)
    return weight.transpose(1, 2).reshape(rows * TILE_DIM, columns * TILE_DIM)


def stored_tensors(key: str, tensors: QuantizedTensors) -> dict[str, Tensor]:
    """Name -> tensor, as written to a model file, in the order that other engines list them."""
    result = {f"{key}.suh": tensors.suh, f"{key}.svh": tensors.svh}
    if tensors.codebook.multiplier is not None:
        word = tensors.codebook.multiplier - 2**32  # as int32: all of them have the top bit set
        result[f"{key}.{tensors.codebook.label}"] = torch.tensor(word, dtype=torch.int32)
    result[f"{key}.trellis"] = tensors.trellis
    if tensors.bias is not None:
        result[f"{key}.bias"] = tensors.bias
    return result
