"""hadamard_128 against its reference, at every instruction level."""

import pytest
import torch

from exl3.ops.hadamard import hadamard_128, hadamard_128_reference


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


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"hadamard_128: x.size\(-1\) is 100"):
        hadamard_128(torch.zeros(2, 100))
    with pytest.raises(RuntimeError, match="scale has dtype Float, expected Half"):
        hadamard_128(torch.zeros(2, 128), pre_scale=torch.ones(128))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.exl3.hadamard_128.default, (torch.randn(2, 128), None, None))
