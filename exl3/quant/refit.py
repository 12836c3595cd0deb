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
    target = hessian @ weight
    if output is not None:
        target = output.right_multiply(target)
    for _ in range(_ROUNDS):
        svh = _refit_columns(target, core, suh, svh, hessian, output)
        suh = _refit_rows(target, core, suh, svh, hessian, output)
    return suh, _refit_columns(target, core, suh, svh, hessian, output)


def _refit_columns(
    target: Tensor,
    core: Tensor,
    suh: Tensor,
    svh: Tensor,
    hessian: Tensor,
    output: OutputHessian | None,
) -> Tensor:
    scaled = suh[:, None] * core
    above = (scaled * target).sum(0)
    if output is not None:
        result = svh.clone()
        for cut, block in output.pieces(len(svh)):
            part = scaled[:, cut]
            result[cut] = _solve((part.T @ (hessian @ part)) * block, above[cut], svh[cut])
        return result
    below = (scaled * (hessian @ scaled)).sum(0)
    good = (below > 0) & (svh != 0) & torch.isfinite(above / below)
    return torch.where(good, above / below, svh)


def _refit_rows(
    target: Tensor,
    core: Tensor,
    suh: Tensor,
    svh: Tensor,
    hessian: Tensor,
    output: OutputHessian | None,
) -> Tensor:
    scaled = core * svh
    spread = scaled if output is None else output.right_multiply(scaled)
    return _solve(hessian * (spread @ scaled.T), (target * scaled).sum(1), suh)


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
