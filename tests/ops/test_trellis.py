"""Trellis packing, decoding and lane planes: exact, at every instruction level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl3.ops import trellis as T
from exl3.ops.codebook import Codebook
from exl3.ops.hadamard import hadamard_matrix

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "linear.safetensors"
ALL_BITS = range(1, 9)


def random_trellis(*shape: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(bits)
    size = (*shape, 16 * bits)
    return torch.randint(-32768, 32768, size, dtype=torch.int16, generator=generator)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_pack_and_unpack(isa: str, bits: int) -> None:
    trellis = random_trellis(2, 3, 5, bits=bits)
    states = T.unpack(trellis)
    assert torch.equal(states, T.unpack_reference(trellis))
    assert torch.equal(T.pack(states, bits), trellis)
    assert torch.equal(T.pack_reference(states, bits), trellis)
    # Consecutive states overlap, round the circle too.
    assert torch.equal(states & (2 ** (16 - bits) - 1), states.roll(-1, -1) >> bits)
    noise = torch.randint(0, 2**15, states.shape, dtype=torch.int32) << bits
    assert torch.equal(T.pack(noise | (states & (2**bits - 1)), bits), trellis)


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_golden(isa: str, golden: dict[str, Tensor], codebook: Codebook, bits: int) -> None:
    layer = {
        name: golden[f"{codebook.label}.{bits}.{name}"]
        for name in ("trellis", "suh", "svh", "inner", "weight", "y")
    }
    inner = T.decode(layer["trellis"], codebook)
    assert torch.equal(inner.view(torch.int16), layer["inner"].view(torch.int16))
    weight = T.reconstruct(layer["trellis"], layer["suh"], layer["svh"], codebook)
    error = (weight - layer["weight"].float()).norm() / weight.norm()
    assert error < 1e-3
    torch.testing.assert_close(golden["x"].float() @ weight, layer["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_decode_matches_reference(isa: str, bits: int, codebook: Codebook) -> None:
    trellis = random_trellis(2, 8, 24, bits=bits)
    got, want = T.decode(trellis, codebook), T.decode_reference(trellis, codebook)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize(("k", "n"), [(128, 1152), (640, 384), (384, 14336), (128, 128256)])
def test_decode_wide(isa: str, k: int, n: int) -> None:
    trellis = random_trellis(k // 16, n // 16, bits=3)
    got = T.decode(trellis, Codebook.MUL1)
    for columns in (slice(0, 8), slice(n // 32, n // 32 + 3), slice(-5, None)):  # of tiles
        want = T.decode_reference(trellis[:, columns], Codebook.MUL1)
        assert torch.equal(got.unflatten(1, (-1, 16))[:, columns].flatten(1), want)


def test_decode_every_state(isa: str) -> None:
    """At 8 bits the low byte of each state is free, so tiles can be made to visit all states."""
    wanted = torch.arange(65536, dtype=torch.int32).view(256, 256)  # high byte, low byte
    pairs = torch.stack([wanted >> 8, wanted & 255], -1).view(-1, 256)
    trellis = T.pack(pairs, 8).view(16, 32, 128)
    assert torch.equal(T.unpack(trellis).flatten().unique(), torch.arange(65536).int())
    for codebook in Codebook:
        got, want = T.decode(trellis, codebook), T.decode_reference(trellis, codebook)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_lane_planes(isa: str, bits: int) -> None:
    trellis = random_trellis(2, 8, 3, bits=bits)
    planes = T.prepare_trellis(trellis)
    assert planes.shape == (2, 3, 8, 16 * bits)
    assert torch.equal(planes, T.prepare_reference(trellis))
    assert torch.equal(T.restore_trellis(planes), trellis)


def test_reconstruct_is_the_formula() -> None:
    k, n = 256, 384
    trellis = random_trellis(k // 16, n // 16, bits=4)
    suh, svh = torch.randn(k).half(), torch.randn(n).half()
    inner = T.decode(trellis, Codebook.MCG).double()
    left, right = (torch.block_diag(*[hadamard_matrix(torch.float64)] * (d // 128)) for d in (k, n))
    want = suh.double()[:, None] * (left @ inner @ right) * svh.double()
    got = T.reconstruct(trellis, suh, svh, Codebook.MCG)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    half = T.reconstruct(trellis, suh, svh, Codebook.MCG, dtype=torch.float16)
    assert torch.equal(half, got.half())


def test_empty_and_strided() -> None:
    assert T.unpack(torch.zeros(0, 64, dtype=torch.int16)).shape == (0, 256)
    assert T.decode(torch.zeros(8, 0, 64, dtype=torch.int16), Codebook.MUL1).shape == (128, 0)
    assert T.decode(torch.zeros(0, 8, 8, 64, dtype=torch.int16), Codebook.MUL1).numel() == 0
    assert T.prepare_trellis(torch.zeros(0, 8, 64, dtype=torch.int16)).shape == (8, 0, 64)
    trellis = random_trellis(4, 16, bits=4)
    view = trellis[:, ::2]
    assert torch.equal(T.decode(view, Codebook.MUL1), T.decode(view.clone(), Codebook.MUL1))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"trellis_unpack: trellis.size\(-1\) is 40"):
        T.unpack(torch.zeros(2, 40, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"bits is 9, expected 1\.\.8"):
        T.unpack(torch.zeros(2, 144, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"bits is 0, expected 1\.\.8"):
        T.pack(torch.zeros(1, 256, dtype=torch.int32), 0)
    with pytest.raises(RuntimeError, match="states has dtype Long, expected Int"):
        T.pack(torch.zeros(1, 256, dtype=torch.int64), 4)
    with pytest.raises(RuntimeError, match="at least 3"):
        T.decode(torch.zeros(8, 64, dtype=torch.int16), Codebook.MUL1)
    with pytest.raises(RuntimeError, match="codebook is 3"):
        torch.ops.exl3.trellis_decode(torch.zeros(8, 8, 64, dtype=torch.int16), 3)


def test_opcheck() -> None:
    trellis = random_trellis(2, 8, 3, bits=5)
    namespace = torch.ops.exl3
    states = T.unpack(trellis)
    torch.library.opcheck(namespace.trellis_pack.default, (states, 5))
    torch.library.opcheck(namespace.trellis_unpack.default, (trellis,))
    torch.library.opcheck(namespace.trellis_decode.default, (trellis, 2))
    torch.library.opcheck(namespace.trellis_prepare.default, (trellis,))
    torch.library.opcheck(namespace.trellis_restore.default, (trellis,))
