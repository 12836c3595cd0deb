"""Fitting the channel scales again, now that the encoded values are known."""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-3  # pulls the row scales towards their old values; relative to the mean diagonal
_ROUNDS = 2


def refit_scales(
    weight: Tensor, core: Tensor, suh: Tensor, svh: Tensor, *, hessian: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales that minimise tr(E^T H E), E = weight - diag(suh) core diag(svh).

    Columns have the closed form <A_c, H W_c> / <A_c, H A_c>, A = diag(suh) core. Rows solve
    (H o B B^T) suh = diag(H W B^T), B = core diag(svh), o the elementwise product. The two
    alternate. Scales that are 0 stay 0.

    Args:
        weight: float32 (k, n), what the layer should be.
        core: float32 (k, n), Hblk w_inner Hblk.
        suh, svh: float32 (k,) and (n,), the scales so far.
        hessian: float32 (k, k), undamped.
    Returns:
        suh and svh, float32.
    """
    target = hessian @ weight
    for _ in range(_ROUNDS):
        svh = _refit_columns(target, core, suh, svh, hessian)
        suh = _refit_rows(target, core, suh, svh, hessian)
    return suh, _refit_columns(target, core, suh, svh, hessian)


def _refit_columns(
    target: Tensor, core: Tensor, suh: Tensor, svh: Tensor, hessian: Tensor
) -> Tensor:
    scaled = suh[:, None] * core
    above = (scaled * target).sum(0)
    below = (scaled * (hessian @ scaled)).sum(0)
    good = (below > 0) & (svh != 0) & torch.isfinite(above / below)
    return torch.where(good, above / below, svh)


def _refit_rows(target: Tensor, core: Tensor, suh: Tensor, svh: Tensor, hessian: Tensor) -> Tensor:
    scaled = core * svh
    live = suh != 0
    matrix = (hessian * (scaled @ scaled.T))[live][:, live].to(torch.float64)
    right = (target * scaled).sum(1)[live].to(torch.float64)
    old = suh[live].to(torch.float64)
    if old.numel() == 0:
        return suh
    right = right - matrix @ old
    matrix.diagonal().add_(_RIDGE * matrix.diagonal().mean())
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        return suh
    step = torch.cholesky_solve(right[:, None], factor)[:, 0]
    if not bool(torch.isfinite(step).all()):
        return suh
    result = suh.clone()
    result[live] = (old + step).to(torch.float32)
    return result
