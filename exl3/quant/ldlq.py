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
from .two_sided import TwoSidedWalk

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
    right: Sequence[tuple[slice, Tensor]] | None = None
    """The same of the outputs, by columns; None: no feedback across columns."""


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
    """Encode weights from their last tiles to their first, feeding errors back.

    All tiles of a step, of all problems that have some left, go to the encoder in one call: those
    of 16 rows, or of an anti-diagonal where errors are fed back across columns as well. Feedback
    down the rows alone from beyond a block of 128 is one matrix product per block.

    Raises:
        ShapeError: sizes not multiples of 128.
        ArithmeticError: a weight or a factor is not finite, or errors grow beyond float32.
    """
    for p in problems:
        if any(d % HADAMARD_DIM for d in p.weight.shape):
            raise ShapeError(f"ldlq: expected multiples of 128, got {tuple(p.weight.shape)}")
    if not problems:
        return []
    walks, places = _walks(problems, bits)
    total = problems[0].weight.new_zeros(())  # of all targets: no step waits for a device
    with _one_torch_thread():
        while left := [walk for walk in walks if not walk.done]:
            targets = [walk.target_tiles() for walk in left]
            tiles = torch.cat(targets)
            total += tiles.sum()
            words, values = trellis_encode(tiles, bits=bits, codebook=codebook, check=False)
            counts = [len(part) for part in targets]
            for walk, *part in zip(left, words.split(counts), values.split(counts), strict=True):
                walk.take(*part)
    if not bool(torch.isfinite(total)):
        raise ArithmeticError("ldlq: a tile to encode is NaN or infinite; expected finite weights")
    return [
        Encoded(
            torch.cat([walk.trellis(index) for walk, index in parts], 1),
            torch.cat([walk.decoded(index) for walk, index in parts], 1),
        )
        for parts in places
    ]


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


_Place = tuple["_Walk | TwoSidedWalk", int]
"""A walk and which of its weights."""


def _walks(
    problems: Sequence[Problem], bits: int
) -> tuple[list[_Walk | TwoSidedWalk], list[list[_Place]]]:
    """All walks, and for each problem those of its columns. Blocks of the outputs' factor know
    nothing of each other; weights of one shape walk together, in fewer and larger operations."""
    places: list[list[_Place]] = []
    alike: dict[object, list[int]] = {}
    for index, p in enumerate(problems):
        if p.right is None:
            places.append([(_Walk(p, bits), 0)])
        else:
            places.append([])
            cuts = tuple((cut.start, cut.stop) for cut, _ in p.right)
            alike.setdefault((p.weight.shape, p.lower is None, cuts), []).append(index)
    for indices in alike.values():
        same = [problems[index] for index in indices]
        lowers = [p.lower for p in same if p.lower is not None] or None
        for parts in zip(*[p.right or () for p in same], strict=True):
            weights = [p.weight[:, cut] for p, (cut, _) in zip(same, parts, strict=True)]
            walk = TwoSidedWalk(weights, lowers, [right for _, right in parts], bits)
            for number, index in enumerate(indices):
                places[index].append((walk, number))
    unique = {id(walk): walk for parts in places for walk, _ in parts}
    return list(unique.values()), places


class _Walk:
    """A problem on its way from the last row to the first; `top` rows are left."""

    def __init__(self, problem: Problem, bits: int) -> None:
        self.problem = problem
        self.top, width = problem.weight.shape
        self.columns = width // TILE_DIM
        self._decoded = torch.zeros_like(problem.weight)
        self._trellis = problem.weight.new_zeros(
            self.top // TILE_DIM, self.columns, TILE_DIM * bits, dtype=torch.int16
        )
        self._error = torch.zeros_like(problem.weight)
        self._goal = problem.weight[:0]  # of the block of 128 rows that is being encoded

    @property
    def done(self) -> bool:
        """Whether no rows are left."""
        return self.top == 0

    def trellis(self, _index: int) -> Tensor:
        """int16 (k/16, n/16, 16*bits)."""
        return self._trellis

    def decoded(self, _index: int) -> Tensor:
        """float32 (k, n)."""
        return self._decoded

    def target_tiles(self) -> Tensor:
        """What the tiles of the last 16 rows that are left aim at, (n/16, 256)."""
        top, stop = self.top - TILE_DIM, self.top
        if stop % HADAMARD_DIM == 0:
            rows, below = slice(stop - HADAMARD_DIM, stop), slice(stop, len(self._error))
            self._goal = self.problem.weight[rows] + _feedback(
                self.problem, self._error, rows, below
            )
        start = top // HADAMARD_DIM * HADAMARD_DIM
        below = slice(stop, start + HADAMARD_DIM)
        feedback = _feedback(self.problem, self._error, slice(top, stop), below)
        return to_tiles(self._goal[top - start : stop - start] + feedback)

    def take(self, words: Tensor, values: Tensor) -> None:
        """Those rows, encoded."""
        self.top -= TILE_DIM
        rows = slice(self.top, self.top + TILE_DIM)
        self._trellis[self.top // TILE_DIM] = words
        self._decoded[rows] = from_tiles(values, self.columns)
        self._error[rows] = self.problem.weight[rows] - self._decoded[rows]


def _feedback(problem: Problem, error: Tensor, rows: slice, below: slice) -> Tensor:
    """(L[below, rows])^T E[below]; zero without feedback or where nothing lies below."""
    if problem.lower is None or below.start == below.stop:
        return error.new_zeros(rows.stop - rows.start, error.shape[1])
    return problem.lower[below, rows].T @ error[below]
