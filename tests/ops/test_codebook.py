"""Codebook values against the format page."""

import pytest
import torch

from exl3.errors import ConfigError
from exl3.ops.codebook import Codebook


@pytest.mark.parametrize("codebook", Codebook)
def test_values(codebook: Codebook) -> None:
    values = codebook.values()
    assert values.shape == (65536,) and values.dtype == torch.float32
    assert torch.equal(values.half().float(), values)
    assert abs(float(values.mean())) < 2e-3
    expected = 1.0003 if codebook is Codebook.MUL1 else 1.2437
    assert codebook.std == pytest.approx(expected, abs=5e-4)


def test_single_states() -> None:
    # x = 0 gives 0x3B603B60: twice 0.921875; mul1: fma(1024, a, c).
    assert Codebook.MCG.values()[0] == 1.84375
    assert Codebook.MUL1.values()[0] == torch.tensor(1024 * 1774 / 2**18 - 10.3828125).half()


def test_labels() -> None:
    assert [c.label for c in Codebook] == ["3inst", "mcg", "mul1"]
    assert all(Codebook.from_label(c.label) is c for c in Codebook)
    with pytest.raises(ConfigError, match="expected one of 3inst, mcg, mul1, got 'none'"):
        Codebook.from_label("none")


def test_values_are_a_copy() -> None:
    Codebook.MUL1.values().zero_()
    assert Codebook.MUL1.values().any()
