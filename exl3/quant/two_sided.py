"""Rounding with error feedback down the rows and across the columns.

With H_I = L D L^T and H_O = R G R^T (unit block lower triangular) the loss tr(E^T H_I E H_O) is
the sum over tiles of D_i^(1/2) (L^T E R)_ij G_j^(1/2), squared, and (L^T E R)_ij = E_ij + what the
tiles below and to the right add. So a tile is encoded after all of those, and aims at what makes up
for them: W_ij + sum over c > i of L_ci^T E_cj + sum over e > j of S_ie R_ej, S = L^T E. The tiles
of an anti-diagonal do not need each other. Source: YAQA (arXiv 2505.22988).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import HADAMARD_DIM, TILE_DIM
from .packing import from_tiles, to_tiles

_PANEL = HADAMARD_DIM // TILE_DIM  # tiles whose feedback from far away is one product


class TwoSidedWalk:
    """A weight on its way from the last tile to the first."""

    def __init__(
        self, weight: Tensor, lower: Tensor | None, right: list[tuple[slice, Tensor]], bits: int
    ) -> None:
        """
        Args:
            weight: float32 (k, n), multiples of 128, scaled to the codebook; not modified.
            lower: L, float32 (k, k), or None: no feedback down the rows.
            right: R by columns: blocks of multiples of 128.
        """
        self.weight = weight
        self.rows, self.columns = (size // TILE_DIM for size in weight.shape)
        self.decoded = torch.zeros_like(weight)
        self.trellis = weight.new_zeros(self.rows, self.columns, TILE_DIM * bits, dtype=torch.int16)
        self._lower = lower
        self._right = right
        self._error = torch.zeros_like(weight)
        self._sum = torch.zeros_like(weight)  # S, where tiles are encoded
        self._below = torch.zeros_like(weight)  # feedback from below the panel of 128 rows
        self._beyond = torch.zeros_like(weight)  # from beyond the panel of 128 columns
        # How many tiles of a column's block lie to its right: the steps that it starts later.
        self._delay = torch.cat([torch.arange(len(r) // TILE_DIM - 1, -1, -1) for _, r in right])
        self._near_right = self._diagonal_panels(right)
        self._step = 0
        self._place = (torch.empty(0, dtype=torch.long),) * 2  # of the tiles that come next
        self._from_below = weight[:0]  # the feedback down the rows that they got

    @property
    def done(self) -> bool:
        """Whether all tiles are encoded."""
        return self._step >= self.rows + int(self._delay.max())

    def target_tiles(self) -> Tensor:
        """What the next tiles aim at, (tiles, 256) in stored order."""
        age = self._step - self._delay
        columns = ((age >= 0) & (age < self.rows)).nonzero()[:, 0]
        rows = self.rows - 1 - age[columns]
        self._place = rows, columns
        self._feed_panels(rows.tolist(), columns.tolist())
        self._from_below = self._feedback_below(rows, columns)
        target = self._tiles(self.weight, rows, columns) + self._tiles(self._beyond, rows, columns)
        target += self._from_below
        target += self._feedback_beyond(rows, columns)
        return to_tiles(target.transpose(0, 1).reshape(TILE_DIM, -1))

    def take(self, words: Tensor, values: Tensor) -> None:
        """Those tiles, encoded: int16 (tiles, 16*bits) and float32 (tiles, 256)."""
        rows, columns = self._place
        place = rows.to(words.device), columns.to(words.device)
        decoded = from_tiles(values, len(rows)).reshape(TILE_DIM, -1, TILE_DIM).transpose(0, 1)
        error = self._tiles(self.weight, rows, columns) - decoded
        self.trellis[place] = words
        self._put(self.decoded, place, decoded)
        self._put(self._error, place, error)
        self._put(self._sum, place, error + self._from_below)
        self._step += 1

    def _view(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.rows, TILE_DIM, self.columns, TILE_DIM)

    def _tiles(self, matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """(tiles, 16, 16)."""
        device = matrix.device
        return self._view(matrix)[rows.to(device), :, columns.to(device)]

    def _put(self, matrix: Tensor, place: tuple[Tensor, Tensor], tiles: Tensor) -> None:
        self._view(matrix)[place[0], :, place[1]] = tiles

    def _feed_panels(self, rows: list[int], columns: list[int]) -> None:
        """Feedback from far away for panels that the next tiles enter."""
        for row, column in zip(rows, columns, strict=True):
            if self._lower is not None and row % _PANEL == _PANEL - 1:
                stop, cut = (row + 1) * TILE_DIM, _span(column)
                panel = slice(stop - HADAMARD_DIM, stop)
                if stop < len(self._lower):
                    self._below[panel, cut] = self._lower[stop:, panel].T @ self._error[stop:, cut]
            if column % _PANEL == _PANEL - 1:
                self._feed_beyond(_span(row), (column + 1) * TILE_DIM)

    def _feed_beyond(self, rows: slice, stop: int) -> None:
        for cut, right in self._right:
            if cut.start < stop < cut.stop:
                near = slice(stop - HADAMARD_DIM - cut.start, stop - cut.start)
                far = self._sum[rows, stop : cut.stop]
                self._beyond[rows, stop - HADAMARD_DIM : stop] = far @ right[near.stop :, near]

    def _feedback_below(self, rows: Tensor, columns: Tensor) -> Tensor:
        """sum over c > i of L_ci^T E_cj; tiles that are not encoded have no error yet."""
        result = self._tiles(self._below, rows, columns)
        if self._lower is None:
            return result
        device = self.weight.device
        rows, columns = rows.to(device), columns.to(device)
        size = len(self._lower)
        lower = self._lower.view(size // HADAMARD_DIM, HADAMARD_DIM, self.rows, TILE_DIM)
        error = self._error.view(-1, HADAMARD_DIM, self.columns, TILE_DIM)
        near = lower[rows // _PANEL, :, rows]  # (tiles, 128, 16)
        return result + near.transpose(1, 2) @ error[rows // _PANEL, :, columns]

    def _feedback_beyond(self, rows: Tensor, columns: Tensor) -> Tensor:
        """sum over e > j in the panel of S_ie R_ej."""
        device = self.weight.device
        rows, columns = rows.to(device), columns.to(device)
        known = self._sum.view(self.rows, TILE_DIM, -1, HADAMARD_DIM)
        return known[rows, :, columns // _PANEL] @ self._near_right[columns]

    @staticmethod
    def _diagonal_panels(right: list[tuple[slice, Tensor]]) -> Tensor:
        """(columns/16, 128, 16): for each tile of columns, R's rows of its panel."""
        panels = []
        for _, block in right:
            count = len(block) // HADAMARD_DIM
            view = block.view(count, HADAMARD_DIM, count, _PANEL, TILE_DIM)
            places = torch.arange(count, device=block.device)
            panels.append(view[places, :, places].transpose(1, 2).flatten(0, 1))
        return torch.cat(panels)


def _span(tile: int) -> slice:
    return slice(tile * TILE_DIM, (tile + 1) * TILE_DIM)
