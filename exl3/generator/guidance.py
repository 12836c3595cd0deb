"""Classifier-free guidance: a second prompt, from which the answer is to lead away.

The negative prompt is a second sequence of the job. Both are continued with the same tokens, which
are drawn from the logits l = negative + scale * (positive - negative). That is the rule of the
paper, log P = log P_negative + scale * (log P_positive - log P_negative), but for a constant per
row, which no probability depends on.

Source: Sanchez et al., Stay on topic with Classifier-Free Guidance (arXiv 2306.17806).
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError
from .options import prompt_ids

MAX_SCALE = 1e6  # far beyond any use; logits stay finite in float32


def guided_prompts(input_ids: Any, cfg_scale: Any) -> tuple[list[NDArray[np.int64]], float]:
    """The prompts that a job runs, the positive one first, and its scale.

    Args:
        input_ids: long (1, L), or a list of one or two of these.
        cfg_scale: 1 is off, the negative prompt is then not run; None: 1, for one prompt only.
    Raises:
        ConfigError: more prompts; a bad scale; one without a negative prompt, or the reverse.
        ShapeError: see `prompt_ids`.
    """
    given = list(input_ids) if isinstance(input_ids, list | tuple) else [input_ids]
    if len(given) > 2:
        raise ConfigError(
            f"input_ids has {len(given)} prompts, expected one, or two for guidance: [prompt,"
            " negative prompt]; for several requests make a Job of each"
        )
    prompts = [prompt_ids(ids) for ids in given or [None]]
    if cfg_scale is None and len(prompts) == 2:
        raise ConfigError("input_ids has a negative prompt: give its strength too, cfg_scale=1.5")
    scale = _checked_scale(1.0 if cfg_scale is None else cfg_scale)
    if scale != 1.0 and len(prompts) == 1:
        raise ConfigError(
            f"cfg_scale is {scale:g}, but there is no negative prompt: give two,"
            " Job(input_ids=[prompt, negative prompt]) or generate(negative_prompt=...)"
        )
    return prompts[:1] if scale == 1.0 else prompts, scale


def _checked_scale(scale: Any) -> float:
    real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not real or not 0.0 <= scale <= MAX_SCALE:
        raise ConfigError(
            f"cfg_scale is {scale!r:.60}, expected a number from 0 (the negative prompt alone) to"
            f" {MAX_SCALE:g}; 1 is off"
        )
    return float(scale)


def combine(logits: Tensor, groups: list[tuple[int, float]]) -> Tensor:
    """The rows of guided jobs made one of two.

    Args:
        logits: float32 (rows, V); not modified.
        groups: for each job its rows and scale. Unless that is 1, as many rows of the negative
            prompt come after them.
    Returns:
        float32 (sum of the groups' rows, V); `logits` itself if no job is guided.
    """
    if all(scale == 1.0 for _, scale in groups):
        return logits
    parts, row = [], 0
    for count, scale in groups:
        own, row = logits[row : row + count], row + count
        if scale != 1.0:
            own, row = _guide(own, logits[row : row + count], scale), row + count
        parts.append(own)
    return torch.cat(parts)


def _guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """`negative + scale * (positive - negative)`; -inf wherever one of them is.

    Every operation is rounded by itself, so that a row does not depend on those beside it; equal
    rows stay as they are, to the bit.
    """
    mixed = positive - negative
    mixed *= scale
    mixed += negative
    return mixed.masked_fill_(positive.isneginf() | negative.isneginf(), -torch.inf)
