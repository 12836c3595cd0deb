"""exl3::trellis_encode on a CUDA device: `python -m tests.bench.bench_cuda_encode`.

The golden tiles must come out below the golden error before anything is timed. Rows carry millions
of weights a second (median of 5 calls) for Gaussian tiles; 256 tiles are one step of the error
feedback of a layer of 4096 columns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from exl3.ops.codebook import Codebook
from exl3.ops.encode import trellis_encode

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def error_to_golden(bits: int, codebook: Codebook) -> float:
    scale = 1.0 if codebook is Codebook.MUL1 else 1.2437
    tiles = load_file(GOLDEN / "tiles.safetensors")["tiles"].cuda() * scale
    _, values = trellis_encode(tiles, bits=bits, codebook=codebook)
    mse = float(((values - tiles) / scale).double().square().mean())
    ratio = mse / json.loads((GOLDEN / "tile_mse.json").read_text())[f"{codebook.label}.{bits}"]
    assert ratio < 1, ratio
    return ratio


def bench(bits: int, codebook: Codebook, n_tiles: int) -> dict:
    ratio = error_to_golden(bits, codebook)
    generator = torch.Generator(device="cuda").manual_seed(0)
    tiles = torch.randn(n_tiles, 256, device="cuda", generator=generator) * codebook.std
    seconds: list[float] = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        trellis_encode(tiles, bits=bits, codebook=codebook)  # waits for the device
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds[1:])[2]
    return {
        "op": "trellis_encode",
        "shape": f"{n_tiles} tiles",
        "bits": bits,
        "codebook": codebook.label,
        "device": torch.cuda.get_device_name(),
        "mweights_s": round(tiles.numel() / median / 1e6, 1),
        "milliseconds": round(median * 1e3, 2),
        "mse_to_golden": round(ratio, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", nargs="*", type=int, default=list(range(1, 9)))
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--tiles", nargs="*", type=int, default=[16384, 256])
    options = parser.parse_args()
    for bits in options.bits:
        for n_tiles in options.tiles:
            row = bench(bits, Codebook.from_label(options.codebook), n_tiles)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
