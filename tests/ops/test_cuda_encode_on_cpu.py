"""The source of the CUDA trellis search, run on a CPU (cuda_on_cpu/), gives the CPU's bytes.

Barriers, shuffles, float16 and int16 arithmetic are those of CUDA, speed and memory order are not:
this is no replacement for test_cuda_encode.py, but needs no device.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.encode import search_table, trellis_encode

HERE = Path(__file__).parent / "cuda_on_cpu"
SOURCE = Path(__file__).parents[2] / "exl3_ext"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[None, 750], ids=["newest", "older"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also as compiled for a device without additions and minima by halves."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    path = tmp_path_factory.mktemp("older" if request.param else "newest") / "encode"
    includes = [f"-I{HERE}", f"-I{SOURCE}", f"-I{SOURCE / 'include'}"]
    flags = ["-O2", "-std=c++17", "-fno-strict-aliasing", "-Wno-attributes"]
    if request.param:
        flags.append(f"-D__CUDA_ARCH__={request.param}")
    files = [HERE / "encode.cpp", HERE / "block.cpp"]
    done = subprocess.run([compiler, *flags, *includes, *files, "-o", path], capture_output=True)
    if b"_Float16" in done.stderr:
        pytest.skip("g++ has no _Float16")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return path


def extremes() -> Tensor:
    tiles = torch.zeros(5, 256)
    tiles[0] = 3.0
    tiles[1] = -1e4
    tiles[2, 7] = 1e6
    tiles[3] = 50 * torch.sin(torch.arange(256.0))
    return tiles


@pytest.mark.parametrize(
    ("bits", "side_by_side", "in_global", "blocks", "count"),
    [
        (1, 1, 0, 1, 2),
        (1, 1, 1, 1, 1),
        (2, 1, 0, 2, 3),
        (2, 2, 0, 1, 3),
        (3, 1, 0, 2, 3),
        (3, 4, 0, 1, 6),
        (4, 2, 0, 1, 3),
        (4, 4, 0, 1, 6),
        (5, 4, 0, 1, 5),
        (8, 2, 0, 1, 3),
        (2, 2, 0, 1, 0),
        (3, 4, 0, 1, 0),
    ],
)
def test_same_bytes(
    program: Path,
    tmp_path: Path,
    bits: int,
    side_by_side: int,
    in_global: int,
    blocks: int,
    count: int,
) -> None:
    """`count` Gaussian tiles a little too large; 0: the extreme ones."""
    if bits > 3 and "older" in str(program):
        pytest.skip("the same source")
    codebook = Codebook.MCG if bits % 2 else Codebook.MUL1
    generator = torch.Generator().manual_seed(bits)
    tiles = torch.randn(count, 256, generator=generator) * codebook.std * 1.1
    if not count:
        tiles = extremes()
    search = search_table(codebook, bits)
    for name, tensor in (("tiles", tiles), ("codebook", search.values), ("table", search.table)):
        (tmp_path / name).write_bytes(tensor.numpy().tobytes())
    numbers = [bits, side_by_side, in_global, blocks, len(tiles)]
    numbers += [search.weight_limit, search.weight_scale, search.gain]
    subprocess.run([program, *map(str, numbers)], cwd=tmp_path, check=True)
    trellis, values = trellis_encode(tiles, bits=bits, codebook=codebook)
    assert (tmp_path / "trellis").read_bytes() == trellis.numpy().tobytes()
    assert (tmp_path / "values").read_bytes() == values.numpy().tobytes()
