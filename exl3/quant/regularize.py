"""Incoherence: random signs, channel scales and Hadamard transforms around a weight.

W = diag(suh) Hblk w_inner Hblk diag(svh), where w_inner looks like independent Gaussian numbers
with the codebook's spread. The scales serve two purposes: they spread each block of 128 evenly
over the codebook, and they decide where the rounding error goes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..constants import HADAMARD_DIM
from ..ops.hadamard import hadamard_128

OUT_EXPONENT = 0.5
"""svh is the column's RMS to this power. The loss is the sum of svh^2 while each block's mean of
(rms / svh)^2 is fixed, which the square root minimises."""

IN_EXPONENT = 0.75
"""suh is the row's RMS to this power. With perfect error feedback the loss would follow the product
of suh, which the RMS itself minimises; without any, a power of one half is right. Measured on real
layers, 0.75 gave the least loss."""


@dataclass(frozen=True, slots=True)
class Regularized:
    """A weight taken apart; `inner` has unit variance where no channel scale says otherwise."""

    inner: Tensor
    """float32 (k, n)."""
    suh: Tensor
    """float32 (k,), sign included; 0 for rows without weight."""
    svh: Tensor
    """float32 (n,), sign included; 0 for columns without weight."""


def random_signs(key: str, *, seed: int, size: int) -> Tensor:
    """float32 (size,) of +1 and -1 that depend on `key` and `seed` only, not on any order."""
    digest = hashlib.shake_256(f"{seed}:{key}".encode()).digest(-(-size // 8))
    bits = np.unpackbits(np.frombuffer(digest, dtype=np.uint8), bitorder="little")[:size]
    return torch.from_numpy(bits.astype(np.float32)).mul_(-2).add_(1)


def left_hadamard(matrix: Tensor) -> Tensor:
    """Hblk @ matrix, float32 (k, n)."""
    return hadamard_128(matrix.T.contiguous()).T


def right_hadamard(matrix: Tensor) -> Tensor:
    """matrix @ Hblk, float32 (k, n)."""
    return hadamard_128(matrix.contiguous())


def assemble(w_inner: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """The weight that decoded values and scales stand for, float32 (k, n), padding included."""
    core = right_hadamard(left_hadamard(w_inner))
    return suh.to(torch.float32)[:, None] * core * svh.to(torch.float32)


def regularize(
    weight: Tensor, in_signs: Tensor, out_signs: Tensor, *, out_scales: bool
) -> Regularized:
    """Choose scales for `weight`, float32 (k, n) padded, and take it apart.

    Rows and columns that are zero throughout, padding among them, get the scale 0, so they come
    back as exact zeros whatever the encoder does.
    """
    column_rms = weight.square().mean(0).sqrt()
    svh = _block_scales(column_rms, OUT_EXPONENT if out_scales else 0.0)
    scaled = right_hadamard(weight * _inverse(svh) * out_signs)
    row_rms = scaled.square().mean(1).sqrt()
    suh = _block_scales(row_rms, IN_EXPONENT)
    inner = left_hadamard(scaled * (_inverse(suh) * in_signs)[:, None])
    # svh is about 1 on average, as in published files; the size of the weight is in suh.
    size = svh[svh > 0].mean() if bool((svh > 0).any()) else torch.tensor(1.0)
    return Regularized(inner, suh * in_signs * size, svh * out_signs / size)


def transform_hessian(hessian: Tensor, suh: Tensor) -> Tensor:
    """Second moments of the input of `w_inner`: Hblk diag(suh) H diag(suh) Hblk, float32 (k, k).

    Scaled to a mean diagonal of about 1 first, so that small weights lose nothing.
    """
    scale = suh / suh.square().mean().sqrt().clamp(min=1e-30)
    scaled = scale[:, None] * hessian * scale
    return right_hadamard(left_hadamard(scaled / scaled.diagonal().mean().clamp(min=1e-30)))


def _block_scales(rms: Tensor, exponent: float) -> Tensor:
    """rms^exponent times a factor per block of 128 that makes the mean of (rms/scale)^2 one."""
    live = rms > 0
    raw = torch.where(live, rms.clamp(min=1e-30).pow(exponent), torch.zeros_like(rms))
    energy = (rms * _inverse(raw)).square().reshape(-1, HADAMARD_DIM).mean(1)
    return raw * energy.sqrt().repeat_interleave(HADAMARD_DIM)


def _inverse(scale: Tensor) -> Tensor:
    """1/scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, 1 / torch.where(scale == 0, 1.0, scale))
