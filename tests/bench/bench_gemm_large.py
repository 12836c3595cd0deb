"""exl3::gemm_large at the layer shapes of SmolLM2-135M (padded) and one larger:
`python -m tests.bench.bench_gemm_large`.

The baseline, in the same run, is torch's bfloat16 product with a weight that is decoded already.
Weights rotate past the second-level cache. Time is the median, with its 10 % and 90 % quantiles;
TFLOP/s count padded sizes. The last row of each m adds up one pass over SmolLM2's 30 layers.
"""

from __future__ import annotations

import argparse
import json

import torch

from exl3.ops.codebook import Codebook
from exl3.ops.gemm_large import gemm_large, gemm_large_reference, inner_weight
from exl3.ops.registry import ops
from exl3.ops.trellis import prepare_trellis
from exl3.settings import ISA_LEVELS
from tests.bench.bench_linear import timed

# k, n, how often in a layer of SmolLM2: q and o; k and v; gate and up; down
SHAPES = [(640, 640, 2), (640, 256, 2), (640, 1536, 2), (1536, 640, 1), (2048, 2048, 0)]
LAYERS = 30
ROTATE_BYTES = 8 << 20


def bench(m: int, k: int, n: int, bits: int, codebook: Codebook, budget_s: float) -> dict:
    copies = max(2, ROTATE_BYTES // (k * n * bits // 8))
    shape = (k // 16, n // 16, 16 * bits)
    planes = [
        prepare_trellis(torch.randint(-32768, 32768, shape, dtype=torch.int16))
        for _ in range(copies)
    ]
    x = torch.randn(m, k)
    got, want = gemm_large(x, planes[0], codebook), gemm_large_reference(x, planes[0], codebook)
    error = float((got - want).norm() / want.norm())
    assert error < 0.005, error
    # No graphs: each would have an output of its own, and those would not stay in the cache.
    calls = [lambda p=p: gemm_large(x, p, codebook) for p in planes]
    median, low, high = timed(calls, budget_s)
    xb, dense = x.bfloat16(), [inner_weight(p, codebook).bfloat16() for p in planes[:8]]
    base, _, _ = timed([lambda w=w: xb @ w for w in dense], budget_s)
    return {
        "op": "gemm_large",
        "shape": f"{m}x{k}x{n}",
        "bits": bits,
        "codebook": codebook.label,
        "us": round(median * 1e6, 1),
        "us_10_90": [round(low * 1e6, 1), round(high * 1e6, 1)],
        "tflops": round(2e-12 * m * k * n / median, 3),
        "tflops_best": round(2e-12 * m * k * n / low, 3),
        "torch_bf16_us": round(base * 1e6, 1),
        "speedup": round(base / median, 2),
        "error": round(error, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--isa", nargs="+", default=[ISA_LEVELS[ops().cpu_isa(True)]])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a row")
    args = parser.parse_args()
    codebook = Codebook.from_label(args.codebook)
    for isa in args.isa:
        ops().configure_cpu(args.threads, ISA_LEVELS.index(isa))
        threads = ops().cpu_threads()
        torch.set_num_threads(threads)
        device = {"isa": isa, "threads": threads}
        for m in args.m:
            for bits in args.bits:
                layer_us = 0.0
                for k, n, count in SHAPES:
                    row = bench(m, k, n, bits, codebook, args.budget)
                    layer_us += count * row["us"]
                    print(json.dumps(row | device), flush=True)
                total = {"op": "gemm_large", "shape": f"{m} tokens, 30 layers", "bits": bits}
                total |= {
                    "us": round(LAYERS * layer_us),
                    "tokens_s": round(m / layer_us * 1e6 / 30),
                }
                print(json.dumps(total | device), flush=True)


if __name__ == "__main__":
    main()
