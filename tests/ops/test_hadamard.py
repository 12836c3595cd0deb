"""hadamard_128 against its reference, at every instruction level."""

import pytest
import torch

from exl3.ops.hadamard import hadamard_128, hadamard_128_reference
from exl3.ops.registry import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (3, 640), (17, 384), (2, 5, 1152)])
def test_matches_reference(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    pre = torch.randn(shape[-1]).half()
    post = torch.randn(shape[-1]).half()
    got = hadamard_128(x, pre_scale=pre, post_scale=post)
    want = hadamard_128_reference(x, pre_scale=pre, post_scale=post)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_levels_agree_to_the_bit(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 1152).mul_(torch.logspace(-6, 4, 5)[:, None]).to(dtype)
    scales = {"pre_scale": torch.randn(1152).half(), "post_scale": torch.randn(1152).half()}
    got = hadamard_128(x, **scales)
    ops().configure_cpu(ops().cpu_threads(), 0)
    want = hadamard_128(x, **scales)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_not_finite(isa: str) -> None:
    """A NaN or an infinity stays in its block of 128."""
    x = torch.randn(3, 384)
    x[0, 130], x[1, 5], x[2, 383] = float("nan"), float("inf"), float("-inf")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        finite = hadamard_128(x.to(dtype)).isfinite().view(3, 3, 128)
        assert finite.sum(-1).tolist() == [[128, 0, 128], [0, 128, 128], [128, 128, 0]]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"hadamard_128: x.size\(-1\) is 100"):
        hadamard_128(torch.zeros(2, 100))
    with pytest.raises(RuntimeError, match="scale has dtype Float, expected Half"):
        hadamard_128(torch.zeros(2, 128), pre_scale=torch.ones(128))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.exl3.hadamard_128.default, (torch.randn(2, 128), None, None))
