"""exl3::trellis_encode at every bit rate: `python -m tests.bench.bench_encode`.

The tiles are the golden ones; their error must be below the golden figure before anything is
timed. Rows carry thousands of weights a second (median, with the 10 % and 90 % quantiles) and the
ratio to the plain-torch search, one tile, of the same run. `--tiles 40` is a call as small as the
error feedback of a 576-column layer makes them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.encode import trellis_encode, trellis_encode_reference
from exl3.ops.registry import ops
from exl3.settings import ISA_LEVELS

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def rates(tiles: Tensor, bits: int, codebook: Codebook, seconds: float) -> list[float]:
    """Weights a second of every call, slowest first."""
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < 3 or time.perf_counter() - start < seconds:
        t0 = time.perf_counter()
        trellis_encode(tiles, bits=bits, codebook=codebook)
        found.append(tiles.numel() / (time.perf_counter() - t0))
    return sorted(found)


def bench(golden: Tensor, bits: int, codebook: Codebook, n_tiles: int, seconds: float) -> dict:
    scale = 1.0 if codebook is Codebook.MUL1 else 1.2437
    golden = golden * scale
    _, values = trellis_encode(golden, bits=bits, codebook=codebook)
    mse = float(((values - golden) / scale).double().square().mean())
    want = json.loads((GOLDEN / "tile_mse.json").read_text())[f"{codebook.label}.{bits}"]
    assert mse < want, (mse, want)
    tiles = golden.repeat(-(-n_tiles // len(golden)), 1)[:n_tiles].contiguous()
    found = rates(tiles, bits, codebook, seconds)
    t0 = time.perf_counter()
    trellis_encode_reference(golden[:1], bits=bits, codebook=codebook)
    torch_rate = 256 / (time.perf_counter() - t0)
    median = found[len(found) // 2]
    return {
        "op": "trellis_encode",
        "shape": f"{n_tiles} tiles",
        "bits": bits,
        "codebook": codebook.label,
        "device": "cpu",
        "isa": ISA_LEVELS[ops().cpu_isa(False)],
        "threads": ops().cpu_threads(),
        "kweights_s": round(median / 1e3, 1),
        "kweights_s_10_90": [round(found[len(found) * q // 10] / 1e3, 1) for q in (1, 9)],
        "mse_to_golden": round(mse / want, 4),
        "ratio_to_torch": round(median / torch_rate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", nargs="*", type=int, default=list(range(1, 9)))
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--tiles", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", type=int, default=3)
    options = parser.parse_args()
    ops().configure_cpu(options.threads, options.isa)
    golden = load_file(GOLDEN / "tiles.safetensors")["tiles"]
    codebook = Codebook.from_label(options.codebook)
    for bits in options.bits:
        row = bench(golden, bits, codebook, options.tiles, options.seconds)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
