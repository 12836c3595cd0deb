"""exl3::linear on a GPU at the shapes of Llama-3.1-8B: `python -m tests.bench.bench_cuda_linear`.

Few rows: CUDA graphs of many layers with their own weights, more than the L2 holds, so time is that
of a launch in a chain. The bound is the weights' bytes over the measured read bandwidth. Many rows:
torch's float16 product of the same size in the same run is the baseline. One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from exl3.ops.codebook import Codebook
from exl3.ops.linear import LinearWeight, Norm, linear, linear_add_, linear_reference

# name, in_features, out_features of the group, gated, residual, norm
SHAPES = {
    "qkv": (4096, (4096, 1024, 1024), False, False, True),
    "o": (4096, (4096,), False, True, False),
    "gate_up": (4096, (14336, 14336), True, False, True),
    "down": (14336, (4096,), False, True, False),
    "head": (4096, (128256,), False, False, True),
}
READ_TB_S = 4.38  # of the H200, measured
LAYERS = 32


def random_weight(k: int, n: int, bits: int, codebook: Codebook) -> LinearWeight:
    """Any bits are a valid trellis, in any layout."""
    planes = torch.randint(
        -32768, 32768, (n // 16, k // 16, 16 * bits), dtype=torch.int16, device="cuda"
    )
    suh = (torch.randint(0, 2, (k,), device="cuda") * 2 - 1).half()
    svh = ((torch.rand(n, device="cuda") + 0.5) / k**0.5).half()
    return LinearWeight(planes, suh, svh, None, codebook, k, n)


class Layer:
    """One group of a model, with a call that runs it in place."""

    def __init__(self, name: str, bits: int, codebook: Codebook, m: int) -> None:
        self.k, self.sizes, self.gated, self.add, normed = SHAPES[name]
        self.weights = [random_weight(self.k, n, bits, codebook) for n in self.sizes]
        self.norm = Norm(torch.ones(self.k, device="cuda"), 1e-5) if normed else None
        self.x = torch.randn(m, self.k, device="cuda", dtype=torch.float16)
        self.residual = torch.randn(m, self.sizes[0], device="cuda", dtype=torch.float16)
        self.bytes = sum(w.planes.numel() * 2 for w in self.weights)

    def __call__(self) -> torch.Tensor:
        if self.add:
            return linear_add_(self.residual, self.x, self.weights, norm=self.norm)
        activation = "silu" if self.gated else None
        return linear(self.x, self.weights, norm=self.norm, activation=activation)

    def check(self) -> None:
        """Raises where the answer is off."""
        activation = "silu" if self.gated else None
        rows = self.x[:2]
        want = linear_reference(rows, self.weights, norm=self.norm, activation=activation)
        got = linear(self.x, self.weights, norm=self.norm, activation=activation)[:2]
        error = float((got.double() - want).norm() / want.norm())
        if not error < 1e-3:
            raise SystemExit(f"wrong answer: relative error {error:.2e}")


def graph_us(calls: list[Callable[[], object]], repeats: int = 21) -> tuple[float, float, float]:
    """Median, 10 % and 90 % quantiles of a replay of all calls, in microseconds."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    times.sort()
    return times[repeats // 2], times[repeats // 10], times[repeats * 9 // 10]


def bench_op(name: str, bits: int, codebook: Codebook, m: int) -> dict[str, object]:
    layers = [Layer(name, bits, codebook, m) for _ in range(3 if name == "head" else 12)]
    if name != "head":
        layers[0].check()
    median, low, high = (t / len(layers) for t in graph_us(layers))
    size = layers[0].bytes
    return {
        "op": "linear",
        "shape": f"{name} m={m}",
        "bits": bits,
        "codebook": codebook.label,
        "us": round(median, 2),
        "us_10_90": [round(low, 2), round(high, 2)],
        "limit_us": round(size / READ_TB_S / 1e6, 2),
        "gb_s": round(size / median / 1e3),
        "share_of_read": round(size / median / 1e6 / READ_TB_S, 3),
    }


def bench_model(bits: int, codebook: Codebook, m: int) -> dict[str, object]:
    names = ("qkv", "o", "gate_up", "down")
    calls: list[Callable[[], object]] = [
        Layer(name, bits, codebook, m) for _ in range(LAYERS) for name in names
    ]
    calls.append(Layer("head", 6, codebook, min(m, 64)))
    median, low, high = graph_us(calls, 7 if m > 64 else 21)
    return {
        "op": "linear part of Llama-3.1-8B",
        "shape": f"m={m}",
        "bits": bits,
        "codebook": codebook.label,
        "ms": round(median / 1e3, 3),
        "ms_10_90": [round(low / 1e3, 3), round(high / 1e3, 3)],
        "tok_s": round(m / median * 1e6),
    }


def bench_torch(m: int) -> dict[str, object]:
    """The same products with float16 weights: what many rows are measured against."""
    us = 0.0
    for name in ("qkv", "o", "gate_up", "down"):
        k, sizes, *_ = SHAPES[name]
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        w = torch.randn(k, sum(sizes), device="cuda", dtype=torch.float16)
        us += graph_us([lambda x=x, w=w: x @ w] * 4)[0] / 4
    return {"op": "torch float16", "shape": f"m={m}", "tok_s": round(m / us * 1e6 / LAYERS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--model-rows", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64, 2048])
    parser.add_argument("--bits", nargs="*", type=int, default=[4])
    parser.add_argument("--codebook", default="mul1")
    options = parser.parse_args()
    codebook = Codebook.from_label(options.codebook)
    for bits in options.bits:
        for m in options.rows:
            for name in SHAPES:
                row = bench_op(name, 6 if name == "head" else bits, codebook, m)
                print(json.dumps(row), flush=True)
        for m in options.model_rows:
            print(json.dumps(bench_model(bits, codebook, m)), flush=True)
            if m > 64:
                print(json.dumps(bench_torch(m)), flush=True)


if __name__ == "__main__":
    main()
