"""Size of a weight relative to its codebook: the global scale g."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.codebook import Codebook
from ..ops.encode import trellis_encode
from .ldlq import Problem
from .packing import to_tiles

SAMPLE_TILES = 32
_TRIALS = (0.93, 1.0, 1.075)

BEST_SPREAD = {
    Codebook.INST3: (0.98, 0.97, 0.96, 0.95, 0.93, 0.90, 0.87, 0.85),
    Codebook.MCG: (0.98, 0.97, 0.96, 0.95, 0.93, 0.90, 0.87, 0.85),
    Codebook.MUL1: (0.98, 0.97, 0.96, 0.95, 0.93, 0.90, 0.87, 0.85),
}
"""Standard deviation of a Gaussian source, over the codebook's, at which the relative error of an
encoding is least; for bits 1..8."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A global scale and what the trial encoding says of it."""

    factor: float
    relative_error: float
    """Squared error of the trial over the energy of the sampled weights."""


def global_scales(
    problems: Sequence[Problem], *, bits: int, codebook: Codebook, seed: int
) -> list[Scale]:
    """The factor per weight with which an encoding loses least.

    A trial encoding of a few tiles at three scales, and the vertex of the parabola through the
    three errors. What the encoder meets is not the weight but the weight plus feedback, so the
    sampled tiles get noise of the feedback's size.
    """
    samples = [_sample(p, bits, seed) for p in problems]
    spreads = [max(float(s.square().mean().sqrt()), 1e-30) for s in samples]
    best = BEST_SPREAD[codebook][bits - 1] * codebook.std
    starts = [best / spread for spread in spreads]
    tiles = torch.cat([s * (g * t) for s, g in zip(samples, starts, strict=True) for t in _TRIALS])
    _, values = trellis_encode(tiles, bits=bits, codebook=codebook)
    errors = (values - tiles).square().mean(1).reshape(len(problems), len(_TRIALS), -1).mean(-1)
    result = []
    for problem, start, error in zip(problems, starts, errors, strict=True):
        relative = [float(e) / t**2 for e, t in zip(error, _TRIALS, strict=True)]
        energy = max(float(problem.weight.square().mean()), 1e-30)
        result.append(Scale(start * _vertex(relative), min(relative) / (start**2 * energy)))
    return result


def _sample(problem: Problem, bits: int, seed: int) -> Tensor:
    """(SAMPLE_TILES, 256) tiles spread over the weight, with noise in place of the feedback."""
    tiles = to_tiles(problem.weight)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(tiles), (SAMPLE_TILES,), generator=generator)
    sample = tiles[chosen.to(tiles.device)]
    if problem.lower is None and problem.right is None:
        return sample
    # Feedback is L^T E R without E itself: its variance is that of E times the mean squared norm of
    # L's and R's columns, without the unit diagonal.
    gain = 1.0 if problem.lower is None else float(problem.lower.square().sum(0).mean())
    if problem.right is not None:
        squares = sum(float(r.square().sum()) for _, r in problem.right)
        gain *= squares / problem.weight.shape[1]
    gain -= 1
    noise = torch.randn(sample.shape, generator=generator).to(sample.device)
    error = 1.1 * 4.0**-bits * problem.weight.square().mean()
    return sample + noise * math.sqrt(max(gain * float(error), 0.0))


def _vertex(errors: Sequence[float]) -> float:
    """Factor at the minimum of the parabola through (log trial, error), kept near the trials."""
    low, middle, high = (math.log(t) for t in _TRIALS)
    a, b = (errors[0] - errors[1]) / (low - middle), (errors[2] - errors[1]) / (high - middle)
    curvature = (b - a) / (high - low)
    if curvature <= 0:
        return _TRIALS[min(range(3), key=lambda i: errors[i])]
    # Newton form around the middle: e = e1 + b' (x - m) + curvature (x - m)(x - high)
    vertex = (middle + high) / 2 - b / (2 * curvature)
    return math.exp(min(max(vertex, 1.5 * low), 1.5 * high))
