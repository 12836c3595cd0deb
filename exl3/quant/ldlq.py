"""Block LDL decomposition and rounding with linear error feedback.

With H = L D L^T (L unit block lower triangular, 16x16 blocks) the loss of an error E is
tr(E^T H E) = sum over b of |D_b^(1/2) (L^T E)_b|^2, and (L^T E)_b = E_b + sum over c > b of
L_cb^T E_c. So rows are encoded from the last block to the first, and block b aims at
W_b + sum over c > b of L_cb^T E_c, E = W - Wq: everything later errors do to it is corrected.
Source: BlockLDLQ, QuIP# (arXiv 2402.04396).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import HADAMARD_DIM, TILE_DIM
from ..errors import ShapeError
from ..ops.codebook import Codebook
from ..ops.encode import trellis_encode
from .packing import from_tiles, to_tiles

_RETRIES = 8  # doublings of the damping by 10 before a matrix is given up


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight between the two transforms, encoded."""

    trellis: Tensor
    """int16 (k/16, n/16, 16*bits)."""
    w_inner: Tensor
    """float32 (k, n): what the trellis decodes to."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One weight to encode."""

    weight: Tensor
    """float32 (k, n), scaled to the codebook; not modified."""
    lower: Tensor | None
    """float32 (k, k) from `block_ldl`, or None: no error feedback."""


def block_ldl(hessian: Tensor, damping: float) -> Tensor:
    """L of H + damping * mean(diag H) * I = L D L^T, with 16x16 blocks.

    Args:
        hessian: float32 or float64 (k, k), symmetric, k a multiple of 16; zero rows are fine.
        damping: relative to the mean of the diagonal; raised tenfold as often as needed until the
            factorisation exists.
    Returns:
        float32 (k, k), unit block lower triangular.
    Raises:
        ShapeError: not square, or k not a multiple of 16.
        ArithmeticError: no damping up to 10^8 times the given one makes the matrix definite.
    """
    size = hessian.shape[0]
    if hessian.shape != (size, size) or size % TILE_DIM:
        raise ShapeError(
            f"block_ldl: expected (k, k), k a multiple of 16, got {tuple(hessian.shape)}"
        )
    cholesky = _damped_cholesky(hessian.to(torch.float64), damping)
    count = size // TILE_DIM
    places = torch.arange(count, device=hessian.device)
    diagonal = cholesky.reshape(count, TILE_DIM, count, TILE_DIM)[places, :, places, :]
    identity = torch.eye(TILE_DIM, dtype=torch.float64, device=hessian.device).expand_as(diagonal)
    inverse = torch.linalg.solve_triangular(diagonal, identity, upper=False)
    lower = torch.einsum("kbi,bij->kbj", cholesky.reshape(size, count, TILE_DIM), inverse)
    lower.reshape(count, TILE_DIM, count, TILE_DIM)[places, :, places, :] = identity  # exactly
    return lower.reshape(size, size).to(torch.float32)


def _damped_cholesky(hessian: Tensor, damping: float) -> Tensor:
    mean = float(hessian.diagonal().mean())
    for attempt in range(_RETRIES):
        damped = hessian.clone()
        damped.diagonal().add_(damping * 10**attempt * mean)
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(factor).all()):
            return factor
    raise ArithmeticError("the damped Hessian is not positive definite")


def ldlq(problems: Sequence[Problem], *, bits: int, codebook: Codebook) -> list[Encoded]:
    """Encode weights of equal k from their last 16 rows to their first, feeding errors back.

    All tiles of a 16-row step, of all problems, go to the encoder in one call. Feedback from the
    rows below a block of 128 is one matrix product per block.

    Raises:
        ShapeError: sizes not multiples of 128, or unequal k.
    """
    size = problems[0].weight.shape[0]
    for p in problems:
        if p.weight.shape[0] != size or any(d % HADAMARD_DIM for d in p.weight.shape):
            raise ShapeError(
                f"ldlq: expected ({size}, n), multiples of 128, got {tuple(p.weight.shape)}"
            )
    with _one_torch_thread():
        return _ldlq(problems, bits, codebook)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The products here are small beside the search, and between two of them the encoder wants
    every core: torch's threads would spin on those, waiting for their next task."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ldlq(problems: Sequence[Problem], bits: int, codebook: Codebook) -> list[Encoded]:
    size = problems[0].weight.shape[0]
    columns = [p.weight.shape[1] // TILE_DIM for p in problems]
    decoded = [torch.zeros_like(p.weight) for p in problems]
    errors = [torch.zeros_like(p.weight) for p in problems]
    trellis = [
        p.weight.new_zeros(size // TILE_DIM, c, TILE_DIM * bits, dtype=torch.int16)
        for p, c in zip(problems, columns, strict=True)
    ]
    for stop in range(size, 0, -HADAMARD_DIM):
        start = stop - HADAMARD_DIM
        goals = [
            p.weight[start:stop] + _feedback(p, e, slice(start, stop), slice(stop, size))
            for p, e in zip(problems, errors, strict=True)
        ]
        for top in range(stop - TILE_DIM, start - 1, -TILE_DIM):
            rows, below = slice(top, top + TILE_DIM), slice(top + TILE_DIM, stop)
            targets = [
                goal[top - start : top - start + TILE_DIM] + _feedback(p, e, rows, below)
                for goal, p, e in zip(goals, problems, errors, strict=True)
            ]
            words, values = trellis_encode(
                torch.cat([to_tiles(t) for t in targets]), bits=bits, codebook=codebook
            )
            parts = zip(words.split(columns), values.split(columns), strict=True)
            for i, (word, value) in enumerate(parts):
                trellis[i][top // TILE_DIM] = word
                decoded[i][rows] = from_tiles(value, columns[i])
                errors[i][rows] = problems[i].weight[rows] - decoded[i][rows]
    return [Encoded(t, d) for t, d in zip(trellis, decoded, strict=True)]


def _feedback(problem: Problem, error: Tensor, rows: slice, below: slice) -> Tensor:
    """(L[below, rows])^T E[below]; zero without feedback or where nothing lies below."""
    if problem.lower is None or below.start == below.stop:
        return error.new_zeros(rows.stop - rows.start, error.shape[1])
    return problem.lower[below, rows].T @ error[below]
