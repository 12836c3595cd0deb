"""Random layers and the shapes that every device's linear op is tested at."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.linear import LinearWeight
from exl3.ops.trellis import prepare_trellis

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 47, 48, 64)
# in_features, out_features of a group
GROUPS = [(576, (576, 192, 192)), (1536, (576,)), (128, (1152,)), (1152, (384, 130))]


def padded(dim: int) -> int:
    return (dim + 127) // 128 * 128


def random_weight(
    k: int,
    n: int,
    bits: int,
    codebook: Codebook = Codebook.MUL1,
    *,
    bias: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> LinearWeight:
    """Any bits are a valid trellis, so random ones are a random weight."""
    g = torch.Generator().manual_seed(seed)
    kp, n_pad = padded(k), padded(n)
    shape = (kp // 16, n_pad // 16, 16 * bits)
    trellis = torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=g)

    def scale(dim: int) -> Tensor:
        sign = torch.randint(0, 2, (dim,), generator=g) * 2 - 1
        return (sign * (0.5 + torch.rand(dim, generator=g))).half()

    return LinearWeight(
        prepare_trellis(trellis.to(device)),
        scale(kp).to(device),
        (scale(n_pad) / (kp**0.5)).to(device),
        torch.randn(n, generator=g).to(device) if bias else None,
        codebook,
        k,
        n,
    )
