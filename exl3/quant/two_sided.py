"""Rounding with error feedback down the rows and across the columns.

With H_I = L D L^T and H_O = R G R^T (unit block lower triangular) the loss tr(E^T H_I E H_O) is
the sum over tiles of D_i^(1/2) (L^T E R)_ij G_j^(1/2), squared, and (L^T E R)_ij = E_ij + what the
tiles below and to the right add. So a tile is encoded after all of those, and aims at what makes up
for them: W_ij + sum over c > i of L_ci^T E_cj + sum over e > j of S_ie R_ej, S = L^T E. The tiles
of an anti-diagonal do not need each other. Source: YAQA (arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..constants import TILE_DIM
from .packing import from_tiles, stored_order, to_tiles


class TwoSidedWalk:
    """Weights of one shape on their way from the last tile to the first, an anti-diagonal a step.

    Everything is kept with the rows of tiles in the order in which they are encoded, so that the
    tiles of a step lie on an ordinary diagonal: they, and the strips of factors and errors that
    their feedback is made of, are views, and nothing waits for a device.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        lowers: Sequence[Tensor] | None,
        rights: Sequence[Tensor],
        bits: int,
    ) -> None:
        """
        Args:
            weights: float32 (k, n), multiples of 16, scaled to the codebook; not modified.
            lowers: L of each, float32 (k, k), or None: no feedback down the rows.
            rights: R of each, float32 (n, n).
        """
        (k, n), count = weights[0].shape, len(weights)
        self._rows, self._columns = k // TILE_DIM, n // TILE_DIM
        shape = (self._rows, self._columns, count)
        tiles = torch.stack([to_tiles(weight) for weight in weights], 1)
        self._weight = tiles.view(*shape, -1).flip(0)
        self._values = torch.zeros_like(self._weight)
        self._words = tiles.new_zeros((*shape, TILE_DIM * bits), dtype=torch.int16)
        self._left = None if lowers is None else _strips(lowers, self._rows, flipped=True)
        self._right = _strips(rights, self._columns, flipped=False)
        self._error = tiles.new_zeros(self._columns, count, k, TILE_DIM)  # E by columns of tiles
        self._sum = tiles.new_zeros(self._rows, count, TILE_DIM, n)  # S by rows of tiles
        self._below = tiles[:0]  # the feedback down the rows that the next tiles got
        self._step = 0

    @property
    def done(self) -> bool:
        """Whether all tiles are encoded."""
        return self._step >= self._rows + self._columns - 1

    def trellis(self, index: int) -> Tensor:
        """Of one of the weights, int16 (k/16, n/16, 16*bits)."""
        return self._words[:, :, index].flip(0)

    def decoded(self, index: int) -> Tensor:
        """Of one of the weights, float32 (k, n)."""
        return from_tiles(self._values[:, :, index].flip(0).flatten(0, 1), self._columns)

    def target_tiles(self) -> Tensor:
        """What the next tiles aim at, (tiles, 256) in stored order."""
        first = max(0, -self._shift)
        last = min(self._columns, self._rows - self._shift) - 1
        columns = slice(first, last + 1)
        rows = slice(first + self._shift, last + 1 + self._shift)
        known = slice((rows.stop - 1) * TILE_DIM)  # other rows' tiles have no error yet
        if self._left is None:
            tiles = (last + 1 - first) * self._sum.shape[1]
            self._below = self._sum.new_zeros(tiles, TILE_DIM, TILE_DIM)
        else:
            left = self._left[rows, :, :, known].flatten(0, 1)
            self._below = torch.bmm(left, self._error[columns, :, known].flatten(0, 1))
        known = slice((first + 1) * TILE_DIM, None)
        far = self._sum[rows, :, :, known].flatten(0, 1)
        right = self._right[columns, :, :, known].flatten(0, 1)
        feedback = torch.baddbmm(self._below, far, right.mT)
        order, _ = stored_order(feedback.device)
        return self._next(self._weight).flatten(0, 1) + feedback.flatten(1).index_select(1, order)

    def take(self, words: Tensor, values: Tensor) -> None:
        """Those tiles, encoded: int16 (tiles, 16*bits) and float32 (tiles, 256)."""
        for kept, new in ((self._words, words), (self._values, values)):
            place = self._next(kept)
            place.copy_(new.view(place.shape))
        _, order = stored_order(values.device)
        error = self._next(self._weight).flatten(0, 1) - values
        error = error.index_select(1, order).view(self._below.shape)
        rows, columns, count = self._words.shape[:3]
        tile = (TILE_DIM, TILE_DIM)
        by_columns = self._error.view(columns, count, rows, *tile).diagonal(self._shift, 0, 2)
        by_columns.copy_(error.view(-1, count, *tile).permute(1, 2, 3, 0))
        by_rows = self._sum.view(rows, count, TILE_DIM, columns, TILE_DIM)
        total = (error + self._below).view(-1, count, *tile)
        by_rows.diagonal(-self._shift, 0, 3).copy_(total.permute(1, 2, 3, 0))
        self._step += 1

    @property
    def _shift(self) -> int:
        """Row less column, in tiles, of all tiles of a step."""
        return self._step - self._columns + 1

    def _next(self, tiles: Tensor) -> Tensor:
        """Of (rows, columns, weights, x) the tiles of this step: a view (tiles, weights, x)."""
        return tiles.diagonal(-self._shift, 0, 1).permute(2, 0, 1)


def _strips(factors: Sequence[Tensor], count: int, *, flipped: bool) -> Tensor:
    """(count, factors, 16, size): for each tile of columns the transposed columns of each factor
    (size, size); with tiles in reverse both ways if `flipped`."""
    result = factors[0].new_empty(count, len(factors), TILE_DIM, count, TILE_DIM)
    for index, factor in enumerate(factors):
        tiles = factor.view(count, TILE_DIM, count, TILE_DIM)
        tiles = tiles.flip(0, 2) if flipped else tiles
        result[:, index] = tiles.permute(2, 3, 0, 1)
    return result.flatten(3)
