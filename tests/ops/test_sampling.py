"""argmax against plain torch, at every instruction level."""

import pytest
import torch

from exl3.ops.sampling import argmax, argmax_reference


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49152])
def test_matches_reference(isa: str, columns: int) -> None:
    torch.manual_seed(columns)
    x = torch.randn(5, columns + 3)
    x[1] = x[1].round()  # ties
    x[2, ::2] = torch.nan
    x[3] = -torch.inf
    x[4] = torch.nan
    x[:, columns:] = 1e9
    assert torch.equal(argmax(x, columns), argmax_reference(x, columns))


@pytest.mark.parametrize("at", [0, 1, 31, 64, 100, 127])
def test_single_peak_ties_and_infinities(isa: str, at: int) -> None:
    x = torch.zeros(1, 128)
    x[0, at:] = torch.inf
    assert argmax(x, 128).item() == at
    x = torch.full((1, 128), torch.nan)
    x[0, at] = -torch.inf
    assert argmax(x, 128).item() == at
    x[0, at] = -1.0
    x[0, at:] = -1.0
    assert argmax(x, 128).item() == at


def test_no_rows_and_bad_valid() -> None:
    assert argmax(torch.zeros(0, 4), 4).shape == (0,)
    for valid in (0, 5):
        with pytest.raises(RuntimeError, match="valid is"):
            argmax(torch.zeros(1, 4), valid)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.exl3.argmax.default, (torch.randn(2, 9), 8))
