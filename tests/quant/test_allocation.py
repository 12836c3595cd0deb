"""Bit allocation: whole rates whose average comes as near as a step allows, from below."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3.errors import ConfigError
from exl3.quant.allocation import BitGroup, allocate_bits, average_bits

GROUPS = st.lists(
    st.tuples(st.integers(1, 10**9), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=60
)


def _groups(sizes: list[tuple[int, int, int]]) -> list[BitGroup]:
    return [BitGroup(f"g{i}", *size) for i, size in enumerate(sizes)]


@given(GROUPS, st.integers(100, 800))
@settings(deadline=None)
def test_average_from_below_within_one_group(sizes: list[tuple[int, int, int]], cents: int) -> None:
    groups = _groups(sizes)
    bits = cents / 100
    chosen = allocate_bits(groups, bits)
    assert set(chosen) == {g.key for g in groups}
    assert all(math.floor(bits) <= b <= 8 for b in chosen.values())
    total = sum(g.numel for g in groups)
    left = Fraction(cents, 100) * total - sum(g.numel * chosen[g.key] for g in groups)
    assert left >= 0
    growable = [g.numel for g in groups if chosen[g.key] < 8]
    assert not growable or left < min(growable)


def test_whole_bits_are_uniform() -> None:
    groups = _groups([(100, 0, 0), (7, 1, 1), (50, 2, 0)])
    for bits in range(1, 9):
        assert set(allocate_bits(groups, bits).values()) == {bits}
        assert average_bits(groups, allocate_bits(groups, bits)) == bits


def _tiny_llama() -> list[BitGroup]:
    sizes = {"qkv": (256 * 512, 0), "o": (256 * 256, 0), "gu": (256 * 1280, 1), "d": (640 * 256, 2)}
    return [
        BitGroup(f"{layer}.{name}", numel, priority, min(layer, 2 - layer))
        for layer in range(3)
        for name, (numel, priority) in sizes.items()
    ]


def test_same_choice_as_the_golden_model() -> None:
    """The golden tiny Llama was converted at 3.5 bits by another engine."""
    chosen = allocate_bits(_tiny_llama(), 3.5)
    expected = dict.fromkeys(chosen, 3)
    for layer in range(3):
        expected |= {f"{layer}.qkv": 4, f"{layer}.o": 4}
    expected |= {"0.gu": 4, "0.o": 5}
    assert chosen == expected
    assert round(average_bits(_tiny_llama(), chosen), 2) == 3.48


@pytest.mark.parametrize("bits", [0, 0.5, 0.99, 8.01, 9, -1, math.inf, math.nan])
def test_bad_average(bits: float) -> None:
    with pytest.raises(ConfigError, match="from 1 to 8"):
        allocate_bits(_tiny_llama(), bits)
