"""Spending a fractional average of bits on layers that take whole bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ConfigError

MIN_BITS, MAX_BITS = 1, 8


@dataclass(frozen=True, slots=True)
class BitGroup:
    """Layers that share an input and so a bit rate."""

    key: str
    numel: int
    """Weights in the group, without padding."""
    priority: int
    """Lower comes first."""
    distance: int
    """Blocks between this one and the nearer end of the stack."""


def check_bits(bits: float) -> Fraction:
    """`bits` as an exact number.

    Raises:
        ConfigError: not within 1..8.
    """
    if not math.isfinite(bits) or not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError(f"bits: expected a number from {MIN_BITS} to {MAX_BITS}, got {bits}")
    return Fraction(str(bits))


def allocate_bits(groups: Sequence[BitGroup], bits: float) -> dict[str, int]:
    """Whole bits per group, whose average over all weights is at most `bits` and as near to it
    as a step of one more bit for one group allows.

    Every group starts at floor(bits). What is left goes in steps of one bit to groups by
    priority, then nearness to either end of the stack, round after round until no step fits.

    Raises:
        ConfigError: bits outside 1..8.
    """
    exact = check_bits(bits)
    base = math.floor(exact)
    result = dict.fromkeys((g.key for g in groups), base)
    spare = math.floor((exact - base) * sum(g.numel for g in groups))
    ordered = sorted(groups, key=lambda g: (g.priority, g.distance))  # stable: file order last
    stepped = True
    while stepped:
        stepped = False
        for group in ordered:
            if 0 < group.numel <= spare and result[group.key] < MAX_BITS:
                result[group.key] += 1
                spare -= group.numel
                stepped = True
    return result


def average_bits(groups: Sequence[BitGroup], chosen: dict[str, int]) -> float:
    """Average bits per weight of an allocation; 0 where there are no weights."""
    total = sum(g.numel for g in groups)
    return sum(g.numel * chosen[g.key] for g in groups) / total if total else 0.0
