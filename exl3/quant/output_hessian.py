"""How much the loss minds an error at a layer's outputs.

With H_O = E[g g^T], g the gradient of the loss at the outputs, and H_I = E[|g|^2 x x^T], the loss
of an error E of the weight (in, out) is about tr(E^T H_I E H_O). Source: YAQA (arXiv 2505.22988),
whose two Kronecker factors these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .regularize import transform_hessian


@dataclass(frozen=True, slots=True)
class OutputHessian:
    """A block-diagonal H_O; one block if the layer is small."""

    blocks: Tensor
    """float32 (count, size, size), symmetric; size a multiple of 128 unless there is one block.
    Zero where outputs are missing."""

    def padded(self, columns: int) -> OutputHessian:
        """For a weight of so many columns, a multiple of 128."""
        count, size = self.blocks.shape[:2]
        if count * size == columns:
            return self
        if count > 1:
            return OutputHessian(self.blocks[: -(-columns // size)])
        result = self.blocks.new_zeros(1, columns, columns)
        result[0, :size, :size] = self.blocks[0]
        return OutputHessian(result)

    def damped(self, damping: float) -> OutputHessian:
        """With that share of the mean diagonal added to the diagonal."""
        result = self.blocks.clone()
        diagonals = result.diagonal(dim1=1, dim2=2)
        diagonals += damping * diagonals.mean().clamp(min=1e-30)
        return OutputHessian(result)

    def pieces(self, columns: int) -> list[tuple[slice, Tensor]]:
        """The columns of each block and the block, cut at the last column."""
        size = self.blocks.shape[1]
        result = []
        for index, block in enumerate(self.blocks):
            start, stop = index * size, min((index + 1) * size, columns)
            if start < stop:
                result.append((slice(start, stop), block[: stop - start, : stop - start]))
        return result

    def right_multiply(self, x: Tensor) -> Tensor:
        """x @ H_O for x (rows, columns)."""
        return torch.cat([x[:, cut] @ block for cut, block in self.pieces(x.shape[1])], 1)

    def inner(self, svh: Tensor) -> list[tuple[slice, Tensor]]:
        """The pieces as `w_inner` sees them: Hblk diag(svh) H_O diag(svh) Hblk."""
        return [(cut, transform_hessian(block, svh[cut])) for cut, block in self.pieces(len(svh))]
