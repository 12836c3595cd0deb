"""The codec ops on a CUDA device: exact."""

from __future__ import annotations

import pytest
import torch

from exl3.ops import trellis as T
from exl3.ops.codebook import Codebook
from exl3.ops.gemm_large import gemm_large

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALL_BITS = range(1, 9)


def random_trellis(*shape: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    size = (*shape, 16 * bits)
    return torch.randint(-32768, 32768, size, dtype=torch.int16, generator=generator)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_pack_and_unpack(bits: int) -> None:
    trellis = random_trellis(2, 3, 5, bits=bits)
    states = T.unpack(trellis.cuda())
    assert torch.equal(states.cpu(), T.unpack_reference(trellis))
    assert torch.equal(T.pack(states, bits).cpu(), trellis)


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_decode(bits: int, codebook: Codebook) -> None:
    trellis = random_trellis(2, 3, 5, bits=bits)
    got = T.decode(trellis.cuda(), codebook).cpu()
    want = T.decode_reference(trellis, codebook)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_lane_words(bits: int) -> None:
    """By the definition of the layout, and back."""
    trellis = random_trellis(3, 8, bits=bits)
    planes = T.prepare_trellis(trellis.cuda())
    assert torch.equal(T.restore_trellis(planes).cpu(), trellis)
    stream = T._stream_bits(trellis).unflatten(-1, (32, 8 * bits))  # [k, n, lane, bit]
    groups = stream.unflatten(1, (2, 4)).permute(1, 0, 3, 2, 4).flatten(-2)  # [g, k, lane, bits]
    weights = 1 << torch.arange(31, -1, -1)
    words = (groups.unflatten(-1, (bits, 32)) * weights).sum(-1)  # [g, k, lane, word]
    vector = 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1
    words = words.unflatten(-1, (-1, vector)).transpose(-3, -2).flatten()
    got = planes.cpu().view(torch.int32).flatten().long() & 0xFFFFFFFF
    assert torch.equal(got, words)


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_gemm_large(bits: int, codebook: Codebook) -> None:
    """An identity on the left gives W' itself, bit for bit."""
    trellis = random_trellis(16, 24, bits=bits)
    planes = T.prepare_trellis(trellis.cuda())
    got = gemm_large(torch.eye(256, dtype=torch.float16, device="cuda"), planes, codebook)
    assert torch.equal(got.cpu(), T.decode_reference(trellis, codebook))


def test_reconstruct() -> None:
    trellis = random_trellis(8, 16, bits=3)
    suh, svh = torch.randn(128).half(), torch.randn(256).half()
    want = T.reconstruct(trellis, suh, svh, Codebook.MCG)
    got = T.reconstruct(trellis.cuda(), suh.cuda(), svh.cuda(), Codebook.MCG)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="multiple of 4"):
        T.prepare_trellis(random_trellis(3, 5, bits=4).cuda())
