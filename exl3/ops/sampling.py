"""Picking tokens from logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ShapeError
from .registry import fake, ops

# Layouts and kinds of exl3_ext/include/exl3/sampling.h.
MAX_STEPS = 8
TEMPERATURE, TOP_K, TOP_P, TOP_P_INCLUSIVE, MIN_P = 1, 2, 3, 4, 5
_ROW = struct.Struct("=Iiiiii3d" + "qd" * MAX_STEPS)
EDIT = np.dtype(
    [
        ("id", np.int32),
        ("bias", np.float32),
        ("rep", np.float64),
        ("total", np.float64),
        ("largest", np.float64),
        ("room", np.int64),
    ]
)


@dataclass(slots=True)
class RowPlan:
    """How one row's token is chosen: edits of single logits, cuts and heating, then the choice."""

    key: int = 0
    draw: bool = False
    """True: with Gumbel noise of `key`; False: the greatest."""
    steps: Sequence[tuple[int, float]] = ()
    """(kind, value) in order, at most 8; values as in the header."""
    rep_p: float = 1.0
    freq_p: float = 0.0
    pres_p: float = 0.0
    edits: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, EDIT))
    """Of dtype `EDIT`, each id once."""
    mask: NDArray[np.uint32] | None = None
    """Bits of allowed columns, ceil(valid / 32) words; None: all."""


@fake("argmax")
def _(logits: Tensor, valid: int) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


@fake("sample")
def _(logits: Tensor, valid: int, plans: Tensor, edits: Tensor, masks: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def argmax(logits: Tensor, valid: int) -> Tensor:
    """The lowest column of the greatest value of each row.

    Args:
        logits: float32, on CUDA also float16, (m, V); rows may be strided. NaN counts as less than
            everything.
        valid: only columns below it are looked at, 1..V; padding of the head lies above.
    Returns:
        int64 (m,). A row of nothing but NaN gives 0.
    Raises:
        RuntimeError: wrong dtype, shape, layout or `valid`.
    """
    return ops().argmax(logits, valid)


def argmax_reference(logits: Tensor, valid: int) -> Tensor:
    """`argmax` in plain torch."""
    seen = logits[:, :valid]
    low = torch.where(seen.isnan(), -torch.inf, seen)
    best = (low == low.max(1, keepdim=True).values) & ~seen.isnan()
    return best.to(torch.int64).argmax(1)


def sample(logits: Tensor, valid: int, plans: Sequence[RowPlan]) -> Tensor:
    """One token a row, on CUDA. The host's sampler (`exl3.sampling`) is the reference.

    Args:
        logits: float32 (m, V); rows may be strided. Written to while the kernel runs, and as it was
            afterwards.
        valid: only columns below it are looked at, 1..V.
        plans: one a row.
    Returns:
        int64 (m,). -1: no token is left, or the row holds NaN or +inf, which the host must judge.
    Raises:
        ShapeError: a mask of another size.
        RuntimeError: wrong dtype, shape, layout or `valid`.
    """
    words = -(-valid // 32)
    edits = [plan.edits.tobytes() for plan in plans]
    masks = [plan.mask.tobytes() for plan in plans if plan.mask is not None]
    if any(len(mask) != words * 4 for mask in masks):
        raise ShapeError(f"sample: a mask needs {words} words for {valid} columns")
    if not plans:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    table = _packed(plans)
    # One copy for all three tables.
    data = bytearray(b"".join([table, *edits, *masks]))
    raw = torch.frombuffer(data, dtype=torch.uint8).to(logits.device)
    sizes = [len(table), sum(map(len, edits)), len(masks) * words * 4]
    plan_bytes, edit_bytes, mask_bytes = raw.split(sizes)
    mask_words = mask_bytes.view(torch.int32).view(len(masks), words)
    return ops().sample(logits, valid, plan_bytes, edit_bytes, mask_words)


def _packed(plans: Sequence[RowPlan]) -> bytes:
    """`SampleRow` of each plan; edits and masks lie in the order of the plans."""
    parts, first, mask = [], 0, 0
    for plan in plans:
        count, masked = plan.edits.size, plan.mask is not None
        flat = [number for step in plan.steps for number in step]
        flat += [0, 0.0] * (MAX_STEPS - len(plan.steps))
        head = (plan.key & 0xFFFFFFFF, plan.draw, len(plan.steps), mask if masked else -1)
        parts.append(_ROW.pack(*head, first, count, plan.rep_p, plan.freq_p, plan.pres_p, *flat))
        first, mask = first + count, mask + masked
    return b"".join(parts)
