"""Block LDL identities, and what error feedback is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl3.errors import ShapeError
from exl3.ops.codebook import Codebook
from exl3.ops.trellis import decode
from exl3.quant.ldlq import Problem, block_ldl, ldlq
from exl3.quant.packing import from_tiles, to_tiles


def correlated(size: int, *, seed: int = 0, rank: int | None = None) -> Tensor:
    """Second moments of inputs with a few strong common directions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * size, rank or size, generator=generator)
    mix = torch.eye(rank or size, size) + 0.3 * torch.randn(8, size, generator=generator).repeat(
        (rank or size) // 8, 1
    )
    x = x @ mix
    return x.T @ x / len(x)


@pytest.mark.parametrize("size", [16, 128, 384])
def test_ldl_gives_the_matrix_back(size: int) -> None:
    hessian = correlated(size)
    lower = block_ldl(hessian, 0.01).double()
    damped = hessian.double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    middle = torch.linalg.solve_triangular(lower, damped, upper=False)
    middle = torch.linalg.solve_triangular(lower, middle.T, upper=False)
    blocks = torch.block_diag(*[torch.ones(16, 16)] * (size // 16))
    scale = float(middle.abs().max())
    assert float((middle * (1 - blocks)).abs().max()) < 1e-4 * scale  # D is block diagonal
    assert torch.equal(lower.tril(-1) * (1 - blocks) + torch.eye(size), lower.float())


def test_ldl_of_rank_deficient_matrices() -> None:
    few = correlated(256, rank=64)
    padded = torch.zeros(256, 256)
    padded[:70, :70] = correlated(70, rank=64)
    for hessian in (few, padded, torch.ones(256, 256)):
        lower = block_ldl(hessian, 0.025)
        assert bool(torch.isfinite(lower).all())
        assert float(lower.abs().max()) < 100


def test_ldl_raises_damping_until_it_works() -> None:
    hessian = torch.eye(32)
    hessian[0, 0] = -0.5  # what rounding can do to a nearly singular matrix, exaggerated
    assert bool(torch.isfinite(block_ldl(hessian, 0.025)).all())


def test_ldl_refuses_odd_sizes() -> None:
    with pytest.raises(ShapeError, match="multiple of 16"):
        block_ldl(torch.eye(24), 0.01)


def _loss(error: Tensor, hessian: Tensor) -> float:
    return float((error * (hessian @ error)).sum())


@pytest.mark.parametrize("bits", [2, 4])
def test_feedback_beats_plain_rounding(bits: int) -> None:
    hessian = correlated(256)
    weight = 0.9 * torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    plain, fed = (
        ldlq([Problem(weight, lower)], bits=bits, codebook=Codebook.MUL1)[0]
        for lower in (None, block_ldl(hessian, 0.01))
    )
    without = _loss(plain.w_inner - weight, hessian)
    assert _loss(fed.w_inner - weight, hessian) < 0.7 * without
    assert (fed.w_inner - weight).square().sum() > (plain.w_inner - weight).square().sum()


@pytest.mark.parametrize("codebook", list(Codebook))
def test_trellis_decodes_to_what_feedback_saw(codebook: Codebook) -> None:
    weight = codebook.std * torch.randn(128, 256, generator=torch.Generator().manual_seed(2))
    (result,) = ldlq([Problem(weight, None)], bits=3, codebook=codebook)
    assert torch.equal(decode(result.trellis, codebook).float(), result.w_inner)


def test_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(256, 128), (384, 256), (128, 128)]
    lowers = [block_ldl(correlated(k, seed=4 + i), 0.02) for i, (k, _) in enumerate(sizes)]
    weights = [torch.randn(*size, generator=generator) for size in sizes]
    problems = [Problem(w, lower) for w, lower in zip(weights, lowers, strict=True)]
    together = ldlq(problems, bits=2, codebook=Codebook.MUL1)
    for problem, result in zip(problems, together, strict=True):
        (alone,) = ldlq([problem], bits=2, codebook=Codebook.MUL1)
        assert torch.equal(alone.trellis, result.trellis)
        assert torch.equal(alone.w_inner, result.w_inner)


def test_ldlq_refuses_unpadded() -> None:
    with pytest.raises(ShapeError, match="multiples of 128"):
        ldlq([Problem(torch.zeros(64, 128), None)], bits=2, codebook=Codebook.MUL1)


def test_tile_order_is_that_of_decode() -> None:
    weight = torch.arange(256.0 * 384).reshape(256, 384)
    tiles = to_tiles(weight)
    assert tiles.shape == (16 * 24, 256)
    assert torch.equal(from_tiles(tiles, 24), weight)
    # position 9 of a tile: lane 1, element 1: row 3, column 0
    assert float(tiles[0, 9]) == float(weight[3, 0])
