"""trellis_encode on CUDA: the CPU's bytes, the golden error, whatever shares a call."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.encode import trellis_encode

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
TILE_MSE = json.loads((GOLDEN / "tile_mse.json").read_text())

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def golden_tiles() -> Tensor:
    return load_file(GOLDEN / "tiles.safetensors")["tiles"]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.label)
def test_error_and_bytes(golden_tiles: Tensor, codebook: Codebook, bits: int) -> None:
    scale = 1.0 if codebook is Codebook.MUL1 else 1.2437
    tiles = golden_tiles * scale
    trellis, values = (t.cpu() for t in trellis_encode(tiles.cuda(), bits=bits, codebook=codebook))
    mse = float(((values - tiles) / scale).double().square().mean())
    assert mse < TILE_MSE[f"{codebook.label}.{bits}"]
    want = trellis_encode(tiles[:8].contiguous(), bits=bits, codebook=codebook)
    assert torch.equal(trellis[:8], want[0]) and torch.equal(values[:8], want[1])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_tiles_do_not_depend_on_their_company(golden_tiles: Tensor, bits: int) -> None:
    """More tiles than fit the device at once, fewer, one, none."""
    many = golden_tiles.repeat(9, 1).cuda()
    want, values = trellis_encode(many, bits=bits, codebook=Codebook.MUL1)
    assert torch.equal(want, want[:128].repeat(9, 1)) and torch.isfinite(values).all()
    for count in (0, 1, 5):
        got, _ = trellis_encode(many[:count], bits=bits, codebook=Codebook.MUL1)
        assert torch.equal(got, want[:count])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
def test_extreme_tiles(bits: int) -> None:
    tiles = torch.zeros(6, 256)
    tiles[1] = 1e-30
    tiles[2] = 3.0
    tiles[3] = -1e4
    tiles[4, 7] = 1e6
    tiles[5] = 50 * torch.sin(torch.arange(256.0))
    got = trellis_encode(tiles.cuda(), bits=bits, codebook=Codebook.MUL1)
    want = trellis_encode(tiles, bits=bits, codebook=Codebook.MUL1)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


def test_not_finite_is_named() -> None:
    tiles = torch.zeros(3, 256, device="cuda")
    tiles[1, 3] = torch.nan
    tiles[2, 0] = torch.inf
    with pytest.raises(RuntimeError, match=r"tiles\[1, 3\] is NaN or infinite"):
        trellis_encode(tiles, bits=4, codebook=Codebook.MUL1)
