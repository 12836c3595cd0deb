"""trellis_encode: format, error against the golden figures and a slow search, determinism."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl3.errors import ConfigError, ShapeError
from exl3.ops.codebook import Codebook
from exl3.ops.encode import search_table, trellis_encode, trellis_encode_reference
from exl3.ops.registry import ops
from exl3.ops.trellis import unpack

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
TILE_MSE = json.loads((GOLDEN / "tile_mse.json").read_text())


@pytest.fixture(scope="module")
def golden_tiles() -> Tensor:
    return load_file(GOLDEN / "tiles.safetensors")["tiles"]


def scale_of(codebook: Codebook) -> float:
    return 1.0 if codebook is Codebook.MUL1 else 1.2437


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.label)
def test_error_is_below_golden(golden_tiles: Tensor, codebook: Codebook, bits: int) -> None:
    scale = scale_of(codebook)
    tiles = golden_tiles * scale
    trellis, values = trellis_encode(tiles, bits=bits, codebook=codebook)
    assert trellis.shape == (128, 16 * bits) and trellis.dtype == torch.int16
    assert torch.equal(codebook.values()[unpack(trellis).long()], values)
    mse = float(((values - tiles) / scale).double().square().mean())
    assert mse < TILE_MSE[f"{codebook.label}.{bits}"]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_close_to_full_search(golden_tiles: Tensor, bits: int) -> None:
    tiles = golden_tiles[:1].contiguous()
    _, values = trellis_encode(tiles, bits=bits, codebook=Codebook.MUL1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small ops: threads only wait for each other
    states = trellis_encode_reference(tiles, bits=bits, codebook=Codebook.MUL1)
    torch.set_num_threads(threads)
    want = Codebook.MUL1.values()[states.long()]
    got_error = (values - tiles).square().sum(1)
    want_error = (want - tiles).square().sum(1)
    assert (got_error <= 1.005 * want_error).all(), (got_error, want_error)


@pytest.mark.parametrize("bits", range(1, 9))
def test_same_bytes_at_every_level_and_thread_count(
    isa: str, golden_tiles: Tensor, bits: int
) -> None:
    tiles = golden_tiles[:5] * 1.3
    level = ops().cpu_isa(False)
    threads = ops().cpu_threads()
    try:
        ops().configure_cpu(1, 0)
        want = trellis_encode(tiles, bits=bits, codebook=Codebook.MCG)
        ops().configure_cpu(3, level)
        got = trellis_encode(tiles, bits=bits, codebook=Codebook.MCG)
    finally:
        ops().configure_cpu(threads, level)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_tile_by_tile(isa: str, golden_tiles: Tensor, count: int) -> None:
    tiles = golden_tiles[:count]
    trellis, values = trellis_encode(tiles, bits=3, codebook=Codebook.MUL1)
    assert trellis.shape == (count, 48) and values.shape == (count, 256)
    for i in range(count):
        one, _ = trellis_encode(tiles[i : i + 1], bits=3, codebook=Codebook.MUL1)
        assert torch.equal(one[0], trellis[i])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
def test_extreme_tiles(isa: str, bits: int) -> None:
    """Constant, empty, tiny, spiky and far out of the codebook's range: still a closed path."""
    tiles = torch.zeros(6, 256)
    tiles[1] = 1e-30
    tiles[2] = 3.0
    tiles[3] = -1e4
    tiles[4, 7] = 1e6
    tiles[5] = 50 * torch.sin(torch.arange(256.0))
    trellis, values = trellis_encode(tiles, bits=bits, codebook=Codebook.MUL1)
    assert torch.equal(Codebook.MUL1.values()[unpack(trellis).long()], values)
    assert values[3].max() < -1 and values[2].mean() > 1


@pytest.mark.parametrize("bits", range(4, 9))
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.label)
def test_costs_cannot_overflow(codebook: Codebook, bits: int) -> None:
    """A capped cost plus the largest edge, and two of the least edges, fit 32 bits."""
    search = search_table(codebook, bits)
    first, second = search.table.double().unbind(-1)
    y = round(search.weight_limit * search.weight_scale)
    if bits == 4:
        assert abs(y) * 16 < 2**15
        edges = torch.stack([(first * search.gain + second * s * y) * 16 for s in (-1, 1)])
        assert not bool((edges % 2**bits).any())  # the tag lies below
    else:
        assert float(first.abs().max()) + abs(y) < 2**15
        edges = torch.stack([(first - s * y) ** 2 for s in (-1, 1)])
    assert edges.max() + 800e6 < 2**31 and 2 * edges.min() > -(2**31)


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.label)
@pytest.mark.parametrize("bits", range(1, 4))
def test_coarse_numbers_are_exact_in_float16(codebook: Codebook, bits: int) -> None:
    """CUDA keeps table and weights as float16 of 11 bits, weights with a half below 512 at 3 bits.
    Where a difference needs more bits, the edge is at its bound; int16 holds all with the shift."""
    search, shift = search_table(codebook, bits), (3, 3, 4)[bits - 1]
    table = search.table.int()
    assert not bool((table % 2**shift).any())
    y = search.weight_limit * search.weight_scale + 1
    largest = int(table.abs().max()) >> shift
    assert largest <= 2048 and y < (1024 if bits < 3 else 2048) and y * 2**shift < 2**15
    bound = 1024 << 15 if bits < 3 else 4 * 1024 << 15  # edges of 3 bits may be wide
    assert 1024**2 << 2 * shift >= bound


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.label)
def test_table_is_what_cuda_takes_it_for(codebook: Codebook) -> None:
    """At 4 bits one number gives the other."""
    search = search_table(codebook, 4)
    first, second = search.table.int().unbind(-1)
    assert search.gain << 4 == 2048
    assert torch.equal(first, ((second * second + 1024) >> 11) - 32768)


def test_bad_arguments_are_named() -> None:
    tiles = torch.zeros(2, 256)
    with pytest.raises(ConfigError, match="bits is 9, expected 1 to 8"):
        trellis_encode(tiles, bits=9, codebook=Codebook.MUL1)
    with pytest.raises(ShapeError, match=r"float32 \(2, 16, 16\), expected"):
        trellis_encode(tiles.view(2, 16, 16), bits=4, codebook=Codebook.MUL1)
    with pytest.raises(ShapeError, match="float16"):
        trellis_encode(tiles.half(), bits=4, codebook=Codebook.MUL1)
    tiles[1, 3] = torch.nan
    with pytest.raises(RuntimeError, match=r"tiles\[1, 3\] is NaN or infinite"):
        trellis_encode(tiles, bits=4, codebook=Codebook.MUL1)


def test_opcheck() -> None:
    search = search_table(Codebook.MUL1, 5)
    torch.library.opcheck(
        torch.ops.exl3.trellis_encode.default,
        (torch.randn(1, 256), Codebook.MUL1.values(), search.table, 3.0, 1.0, 0, 5, True),
    )
