"""Second moments of a layer's input, gathered over calibration tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError

_STRIP = 256  # columns of the product that are computed at a time: only the lower triangle is


@dataclass(frozen=True, slots=True)
class Hessian:
    """X^T X / count of an input, for all layers that read it; tokens may have weights."""

    matrix: Tensor
    """float32 (in_features, in_features), undamped."""
    count: int
    """Tokens seen."""

    def problem(self) -> str:
        """Why error feedback cannot use this matrix; an empty string if it can."""
        if self.count == 0:
            return "no calibration token reached this layer"
        diagonal = self.matrix.diagonal()
        if not bool(torch.isfinite(self.matrix).all()):
            return "the Hessian has values that are not finite"
        if float(diagonal.mean()) <= 1e-30:
            return "the Hessian's diagonal vanishes"
        return ""


class HessianAccumulator:
    """Sums X^T X: products of one batch in float32, the sum over batches in float64."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.features = features
        self.count = 0
        self._sum = torch.zeros(features, features, dtype=torch.float64, device=device)

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add the rows of `x`, float32 (m, features); the caller has left out rows that are not
        finite.

        Args:
            weights: float32 (m,), how much each row counts; None: 1.
        Raises:
            ShapeError: another number of features.
        """
        if x.dim() != 2 or x.shape[1] != self.features:
            raise ShapeError(
                f"Hessian: expected rows of {self.features} features, got {tuple(x.shape)}"
            )
        x = x.to(torch.float32)
        if weights is not None:
            x = x * weights.to(x).sqrt()[:, None]
        for start in range(0, self.features, _STRIP):
            stop = min(start + _STRIP, self.features)
            self._sum[start:, start:stop] += x[:, start:].T @ x[:, start:stop]
        self.count += x.shape[0]

    def finish(self) -> Hessian:
        """The mean over all tokens, as a symmetric float32 matrix."""
        lower = torch.tril(self._sum) / max(self.count, 1)
        matrix = lower + torch.tril(lower, -1).T
        return Hessian(matrix.to(torch.float32), self.count)
