"""Low-rank additions to the outputs of linear layers, for a few rows. CPU only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .registry import fake, ops

MAX_PARTS = 16  # of one launch


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """y[row, start : start + n] += mask[row, owner] * (x[row] @ a.T) @ b."""

    a: Tensor
    """float32 (r, k)."""
    b: Tensor
    """float32 (r, n)."""
    start: int
    owner: int


@fake("low_rank_add_")
def _(y: Tensor, *_rest: Any) -> None:
    return None


def low_rank_add_(y: Tensor, x: Tensor, parts: Sequence[LowRankPart], mask: Tensor) -> Tensor:
    """Add every part to `y` in place; returns `y`.

    A row's result does not depend on the other rows, nor on parts that its mask leaves out.

    Args:
        y: float32 (m, columns); rows may be strided.
        x: float32 (m, k); rows may be strided.
        parts: with one k; by start, those of one start with one n.
        mask: float32 (m, owners): the factor of each owner's parts; 0 costs nothing.
    Raises:
        RuntimeError: wrong dtype, shape or layout.
    """
    for first in range(0, len(parts), MAX_PARTS):
        some = parts[first : first + MAX_PARTS]
        ops().low_rank_add_(
            y,
            x,
            [part.a for part in some],
            [part.b for part in some],
            [part.start for part in some],
            [part.owner for part in some],
            mask,
        )
    return y


def low_rank_add_reference(
    y: Tensor, x: Tensor, parts: Sequence[LowRankPart], mask: Tensor
) -> Tensor:
    """The result of `low_rank_add_` in float64; `y` is not modified."""
    out = y.double()
    for part in parts:
        added = (x.double() @ part.a.double().T) @ part.b.double()
        columns = slice(part.start, part.start + part.b.shape[1])
        out[:, columns] += mask[:, part.owner, None].double() * added
    return out
