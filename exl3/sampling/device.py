"""Samplers as plans for the device: which chains can run there, and what they are for one row.

A chain fits if it is built-in steps in the usual order: bias, penalties and bans, each at most
once, then temperature, top-k, top-p and min-p in any order, then argmax or a Gumbel draw. The token
is the one that the host's steps give for the same key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ops.sampling import (
    EDIT,
    MAX_STEPS,
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_INCLUSIVE,
    RowPlan,
)
from .base import SS_Base
from .chain import CustomSampler
from .penalties import SS_PresFreqP, SS_RepP
from .state import FloatRow, IdRow, Row
from .steps import (
    SS_Argmax,
    SS_BanTokens,
    SS_LogitBias,
    SS_MinP,
    SS_Normalize,
    SS_Sample,
    SS_Sort,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
)

# The order in which edits of single logits are done there.
_EDITS: dict[type[SS_Base], int] = {SS_LogitBias: 0, SS_RepP: 1, SS_PresFreqP: 2, SS_BanTokens: 3}
_PLUMBING = (SS_Sort, SS_Normalize)
_Factors = tuple[IdRow, NDArray[np.float64], NDArray[np.float64]]
_ROUNDING = 1e-6  # of sums of probabilities, as in SS_TopP


def fits_device(sampler: object) -> bool:
    """True if `row_plan` can say what the sampler does."""
    if not isinstance(sampler, CustomSampler):
        return False
    last, cuts = -1, 0
    for step in sampler.steps[:-1]:
        place = _EDITS.get(type(step))
        if place is not None:
            if place <= last:
                return False
            last = place
        elif type(step) not in _PLUMBING:
            if _cut(step) is None:
                return False
            last, cuts = len(_EDITS), cuts + 1
    return cuts <= MAX_STEPS and type(sampler.steps[-1]) in (SS_Argmax, SS_Sample)


def row_plan(
    sampler: CustomSampler,
    *,
    key: int,
    past_ids: IdRow | None,
    mask: Tensor | None,
    width: int,
) -> RowPlan | None:
    """What a sampler that `fits_device` does to one row; arguments as in `CustomSampler.draw`.

    Args:
        width: columns of the vocabulary.
    Returns:
        None if the mask adds something other than 0 and -inf.
    """
    plan = RowPlan(key, draw=type(sampler.steps[-1]) is SS_Sample)
    if mask is not None:
        plan.mask = _mask_bits(mask, width)
        if plan.mask is None:
            return None
    edits = [step for step in sampler.steps if type(step) in _EDITS]
    if edits:
        _add_edits(plan, edits, past_ids, width)
    cuts = (_cut(step) for step in sampler.steps[:-1] if type(step) not in _EDITS)
    plan.steps = [cut for cut in cuts if cut is not None]
    return plan


def _cut(step: SS_Base) -> tuple[int, float] | None:
    """A step as (kind, value); None if it is no cut or has no kind there."""
    kind = type(step)
    if isinstance(step, SS_Temperature) and kind is SS_Temperature:
        heat = step.temperature
        return TEMPERATURE, max(heat, 1e-30) if heat > 0 else 0.0
    if isinstance(step, SS_TopK) and kind is SS_TopK:
        return TOP_K, step.top_k
    if isinstance(step, SS_TopP) and kind is SS_TopP:
        if step.inclusive:
            return TOP_P_INCLUSIVE, step.top_p - _ROUNDING
        return TOP_P, step.top_p + _ROUNDING
    if isinstance(step, SS_MinP) and kind is SS_MinP:
        return MIN_P, math.log(step.min_p)
    return None


def _mask_bits(mask: Tensor, width: int) -> NDArray[np.uint32] | None:
    """Bits of allowed columns, ceil(width / 32) words; columns beyond the mask are not."""
    words = -(-width // 32)
    flat = mask.reshape(-1)
    if mask.dtype == torch.int32:
        bits = np.zeros(words, np.uint32)
        given = flat.numpy().view(np.uint32)[:words]
        bits[: given.size] = given
        return bits
    if not mask.is_floating_point():
        return None
    values = flat[:width].to(torch.float32).numpy()
    allowed = np.zeros(words * 32, bool)
    np.equal(values, 0.0, out=allowed[: values.size])
    if not (allowed[: values.size] | (values == -np.inf)).all():
        return None
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def _add_edits(plan: RowPlan, steps: Sequence[SS_Base], past_ids: IdRow | None, width: int) -> None:
    """Bias, penalties and bans as edits of single logits."""
    zeros: FloatRow = np.broadcast_to(np.float32(0.0), width)
    row = Row(zeros, width, 0, past_ids)
    parts: list[tuple[str, IdRow, NDArray[np.float64]]] = []
    known: dict[tuple[int, int], _Factors] = {}  # most chains have one window for both penalties

    def factors(step: SS_RepP | SS_PresFreqP) -> _Factors:
        ranges = (step.sustain_range, step.decay_range)
        if ranges not in known:
            known[ranges] = _factors_of(*step.window(row))
        return known[ranges]

    for step in steps:
        if isinstance(step, SS_LogitBias):
            parts.append(("bias", step._ids, step._bias.astype(np.float64)))
        elif isinstance(step, SS_BanTokens):
            parts.append(("bias", step._ids, np.full(step._ids.size, -np.inf)))
        elif isinstance(step, SS_RepP):
            plan.rep_p = step.rep_p
            seen, largest, _ = factors(step)
            parts.append(("rep", seen, largest))
        elif isinstance(step, SS_PresFreqP):
            plan.freq_p, plan.pres_p = step.freq_p, step.pres_p
            seen, largest, total = factors(step)
            parts += [("largest", seen, largest), ("total", seen, total)]
    groups = list({id(ids): ids for _, ids, _ in parts}.values())
    every = groups[0] if known and len(groups) == 1 else np.unique(np.concatenate(groups))
    inner = (every >= 0) & (every < width)
    if not inner.all():
        every = every[inner]
    plan.edits = np.zeros(every.size, EDIT)
    plan.edits["id"] = every
    for name, ids, values in parts:
        column = plan.edits[name]
        if ids is every:
            column += values.astype(column.dtype)
            continue
        inside = (ids >= 0) & (ids < width)
        column[np.searchsorted(every, ids[inside])] += values[inside].astype(column.dtype)


def _factors_of(ids: IdRow, factors: NDArray[np.float64] | None) -> _Factors:
    """Distinct ids; the factor of each one's newest occurrence, which is the largest; the sum of
    all, added up in the host's order."""
    seen, place = np.unique(ids, return_inverse=True)
    largest = np.ones(seen.size)
    if factors is not None:
        largest[place] = factors  # the last of equal indices wins
    total = np.bincount(place, factors, minlength=seen.size).astype(np.float64)
    return seen, largest, total
