"""Fitting the channel scales again, now that the encoded values are known."""

from __future__ import annotations

import torch
from torch import Tensor

from .output_hessian import OutputHessian

_RIDGE = 1e-3  # pulls scales that are solved for towards their old values; of the mean diagonal
_ROUNDS = 2


def refit_scales(
    weight: Tensor,
    core: Tensor,
    suh: Tensor,
    svh: Tensor,
    *,
    hessian: Tensor,
    output: OutputHessian | None = None,
) -> tuple[Tensor, Tensor]:
    """Scales that minimise tr(E^T H E G), E = weight - diag(suh) core diag(svh).

    Rows solve (H o B G B^T) suh = diag(H W G B^T), B = core diag(svh), o the elementwise product;
    columns (A^T H A o G) svh = diag(A^T H W G), A = diag(suh) core, which without G has the closed
    form <A_c, H W_c> / <A_c, H A_c>. The two alternate. Scales that are 0 stay 0.

    Args:
        weight: float32 (k, n), what the layer should be.
        core: float32 (k, n), Hblk w_inner Hblk.
        suh, svh: float32 (k,) and (n,), the scales so far.
        hessian: H, float32 (k, k), undamped.
        output: G; None: the identity.
    Returns:
        suh and svh, float32.
    """
    fit = _Fit(weight, core, hessian, output)
    for _ in range(_ROUNDS):
        svh = fit.columns(suh, svh)
        suh = fit.rows(suh, svh)
    return suh, fit.columns(suh, svh)


class _Fit:
    """What stays the same while the scales change."""

    def __init__(
        self, weight: Tensor, core: Tensor, hessian: Tensor, output: OutputHessian | None
    ) -> None:
        self.core, self.hessian, self.output = core, hessian, output
        self.target = self._spread(hessian @ weight)

    def _spread(self, x: Tensor) -> Tensor:
        """x G."""
        return x if self.output is None else self.output.right_multiply(x)

    def columns(self, suh: Tensor, svh: Tensor) -> Tensor:
        """The best svh for this suh."""
        scaled = suh[:, None] * self.core
        above = (scaled * self.target).sum(0)
        if self.output is not None:
            result = svh.clone()
            for cut, block in self.output.pieces(len(svh)):
                part = scaled[:, cut]
                matrix = (part.T @ (self.hessian @ part)) * block
                result[cut] = _solve(matrix, above[cut], svh[cut])
            return result
        below = (scaled * (self.hessian @ scaled)).sum(0)
        good = (below > 0) & (svh != 0) & torch.isfinite(above / below)
        return torch.where(good, above / below, svh)

    def rows(self, suh: Tensor, svh: Tensor) -> Tensor:
        """The best suh for this svh."""
        scaled = self.core * svh
        matrix = self.hessian * (self._spread(scaled) @ scaled.T)
        return _solve(matrix, (self.target * scaled).sum(1), suh)


def _solve(matrix: Tensor, right: Tensor, old: Tensor) -> Tensor:
    """The x nearest to `old` with matrix x = right, zeros of `old` kept; `old` if there is none."""
    live = old != 0
    if not bool(live.any()):
        return old
    matrix = matrix[live][:, live].to(torch.float64)
    start = old[live].to(torch.float64)
    rest = right[live].to(torch.float64) - matrix @ start
    matrix.diagonal().add_(_RIDGE * matrix.diagonal().mean())
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        return old
    step = torch.cholesky_solve(rest[:, None], factor)[:, 0]
    if not bool(torch.isfinite(step).all()):
        return old
    result = old.clone()
    result[live] = (start + step).to(torch.float32)
    return result
