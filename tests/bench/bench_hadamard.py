"""exl3::hadamard_128 on float32 rows: `python -m tests.bench.bench_hadamard`.

The baseline, in the same run, is torch's product with the 128 x 128 matrix; `copy_us` is a copy of
the same bytes, the bound of a transform that memory limits. GB/s count the read and the write.
"""

from __future__ import annotations

import argparse
import json

import torch

from exl3.ops.graph import record
from exl3.ops.hadamard import hadamard_128, hadamard_128_reference, hadamard_matrix
from exl3.ops.registry import ops
from exl3.settings import ISA_LEVELS
from tests.bench.bench_linear import timed

SHAPES = [(1, 640), (1, 1536), (64, 640), (512, 640), (512, 1536), (2048, 4096)]
ROTATE_BYTES = 16 << 20


def bench(m: int, dim: int, budget_s: float) -> dict[str, object]:
    copies = max(2, ROTATE_BYTES // (m * dim * 4)) if m > 1 else 2
    rows = [torch.randn(m, dim) for _ in range(copies)]
    scale = torch.randn(dim).half()
    want = hadamard_128_reference(rows[0], pre_scale=scale)
    error = float((hadamard_128(rows[0], pre_scale=scale) - want).norm() / want.norm())
    assert error < 1e-6, error
    graphs = [record(lambda x=x: hadamard_128(x, pre_scale=scale)) for x in rows]
    median, low, high = timed([g.replay for g in graphs], budget_s)
    h, wide = hadamard_matrix(), scale.float()
    base, _, _ = timed([lambda x=x: (x * wide).view(-1, 128) @ h for x in rows], budget_s)
    out = torch.empty_like(rows[0])
    copy, _, _ = timed([lambda x=x: out.copy_(x) for x in rows], budget_s)
    return {
        "op": "hadamard_128",
        "shape": f"{m}x{dim}",
        "us": round(median * 1e6, 2),
        "us_10_90": [round(low * 1e6, 2), round(high * 1e6, 2)],
        "gb_s": round(8e-9 * m * dim / median, 2),
        "torch_us": round(base * 1e6, 2),
        "speedup": round(base / median, 2),
        "copy_us": round(copy * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="+", default=[ISA_LEVELS[ops().cpu_isa(True)]])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.2, help="seconds a row")
    args = parser.parse_args()
    for isa in args.isa:
        ops().configure_cpu(args.threads, ISA_LEVELS.index(isa))
        threads = ops().cpu_threads()
        torch.set_num_threads(threads)
        for m, dim in SHAPES:
            row = bench(m, dim, args.budget)
            print(json.dumps(row | {"isa": isa, "threads": threads}), flush=True)


if __name__ == "__main__":
    main()
