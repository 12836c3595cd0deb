"""Which version of each group to take, so that a budget of bits buys the least divergence.

Divergences of groups are taken to add up. Choices start at each group's cheapest candidate and
climb the lower convex hull of (bits, KL) by the best gain per bit; what is left of the budget goes
to single exchanges. The hull is optimal for the budgets at which it stops, and within one step
of optimal between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .measurement import Candidate, GroupResult


def choose(results: Sequence[GroupResult], bits_per_weight: float) -> list[Candidate]:
    """One candidate per group; heads are outside the budget and take their best.

    Args:
        bits_per_weight: most bits on average over all groups but heads.
    Raises:
        ConfigError: the cheapest candidates need more.
    """
    body = [r for r in results if not r.group.is_head]
    numel = sum(r.numel for r in body)
    budget = bits_per_weight * numel
    hulls = [_hull(r.candidates) for r in body]
    place = [0] * len(body)
    spent = sum(hull[0].bits for hull in hulls)
    if spent > budget + 1e-6:
        raise ConfigError(
            f"-b --bits: {bits_per_weight} bits per weight, but the smallest version of every "
            f"group takes {spent / max(numel, 1):.3f}"
        )
    steps = sorted(
        (
            (-_gain(hull[i], hull[i + 1]), index, i)
            for index, hull in enumerate(hulls)
            for i in range(len(hull) - 1)
        ),
    )
    for _, index, i in steps:
        cost = hulls[index][i + 1].bits - hulls[index][i].bits
        if place[index] == i and spent + cost <= budget + 1e-6:
            place[index], spent = i + 1, spent + cost
    chosen = [hull[i] for hull, i in zip(hulls, place, strict=True)]
    _exchange(body, chosen, budget + 1e-6)
    taken = iter(chosen)
    return [
        min(r.candidates, key=lambda c: (c.kl, c.bits)) if r.group.is_head else next(taken)
        for r in results
    ]


def _gain(low: Candidate, high: Candidate) -> float:
    return (low.kl - high.kl) / max(high.bits - low.bits, 1)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """From the fewest bits on, those that no mix of two others beats."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.bits, c.kl)):
        if hull and candidate.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], candidate):
            hull.pop()
        hull.append(candidate)
    return hull


def _exchange(body: Sequence[GroupResult], chosen: list[Candidate], budget: float) -> None:
    """Take the best single improvement that still fits, until there is none."""
    while True:
        spare = budget - sum(c.bits for c in chosen)
        best, gain = None, 0.0
        for index, (result, now) in enumerate(zip(body, chosen, strict=True)):
            for other in result.candidates:
                if other.bits - now.bits <= spare and now.kl - other.kl > gain:
                    best, gain = (index, other), now.kl - other.kl
        if best is None:
            return
        chosen[best[0]] = best[1]
