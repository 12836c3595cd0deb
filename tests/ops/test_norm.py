"""rms_norm against its reference, at every instruction level."""

import pytest
import torch

from exl3.ops.norm import rms_norm, rms_norm_reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SHAPES = [(0, 576), (1, 1), (1, 576), (3, 15), (2, 16), (5, 17), (16, 4096), (2, 3, 1152)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_matches_reference(isa: str, shape: tuple[int, ...], weighted: bool, offset: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * 3
    weight = torch.randn(shape[-1]) if weighted else None
    got = rms_norm(x, weight, 1e-5, weight_offset=offset)
    want = rms_norm_reference(x, weight, 1e-5, weight_offset=offset)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_strided_rows_and_extreme_values(isa: str) -> None:
    x = torch.full((4, 96), torch.nan)
    x[:, 16:80] = torch.randn(4, 64) * 1e-12
    x[1, 16:80] = torch.randn(64) * 1e12
    x[2, 16:80] = 0
    part = x[:, 16:80]
    want = rms_norm_reference(part, torch.ones(64), 1e-6)
    torch.testing.assert_close(rms_norm(part, torch.ones(64), 1e-6), want, rtol=2e-6, atol=0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="weight"):
        rms_norm(torch.zeros(2, 8), torch.ones(9), 1e-6)
    with pytest.raises(RuntimeError, match="x has dtype Half, expected Float"):
        rms_norm(torch.zeros(2, 8).half(), None, 1e-6)
    with pytest.raises(RuntimeError, match=r"x.stride\(1\)"):
        rms_norm(torch.zeros(8, 4).t(), None, 1e-6)


def test_opcheck() -> None:
    op = torch.ops.exl3.rms_norm.default
    torch.library.opcheck(op, (torch.randn(2, 24), torch.ones(24), 1e-6, 0.0))
