"""exl3::linear at the layer shapes of SmolLM2-135M: `python -m tests.bench.bench_linear`.

Buffers rotate past the second-level cache, as in a model: SmolLM2's 30 layers are 53 MB at 4 bits.
The baseline, in the same run, is torch's bfloat16 F.linear with the unpadded weight. Rows carry the
rate in G weights/s of padded weights; time is the median, with its 10 % and 90 % quantiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from exl3.ops.codebook import Codebook
from exl3.ops.graph import record
from exl3.ops.linear import LinearWeight, Norm, consolidate, linear, linear_add_, linear_reference
from exl3.ops.registry import ops
from exl3.ops.trellis import prepare_trellis

# name, in_features, out_features of the group, gated
SHAPES = {
    "qkv": (576, (576, 192, 192), False),
    "o": (576, (576,), False),
    "gate_up": (576, (1536, 1536), True),
    "down": (1536, (576,), False),
    "head": (576, (49152,), False),
}
ROTATE_BYTES = 24 << 20


def random_weight(k: int, n: int, bits: int, codebook: Codebook) -> LinearWeight:
    """Any bits are a valid trellis."""
    kp, n_pad = -(-k // 128) * 128, -(-n // 128) * 128
    trellis = torch.randint(-32768, 32768, (kp // 16, n_pad // 16, 16 * bits), dtype=torch.int16)
    suh = torch.randint(0, 2, (kp,)) * 2 - 1
    svh = (torch.rand(n_pad) + 0.5) / kp**0.5
    return LinearWeight(prepare_trellis(trellis), suh.half(), svh.half(), None, codebook, k, n)


def timed(calls: list[Callable[[], object]], budget_s: float) -> tuple[float, float, float]:
    """Median and 10 %, 90 % quantiles of one call, in seconds, going round the list."""
    for call in calls:
        call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 20 or time.perf_counter() - start < budget_s:
        for call in calls:
            t0 = time.perf_counter()
            call()
            times.append(time.perf_counter() - t0)
    times.sort()
    return times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10]


def bench(name: str, m: int, bits: int, codebook: Codebook, budget_s: float) -> dict[str, object]:
    k, sizes, gated = SHAPES[name]
    groups, padded = [], 0
    first = [random_weight(k, n, bits, codebook) for n in sizes]
    padded = sum(w.planes.numel() * 16 // bits for w in first)
    copies = max(2, ROTATE_BYTES // (padded * bits // 8))
    for _ in range(copies):
        groups.append([random_weight(k, n, bits, codebook) for n in sizes])
    x = torch.randn(m, k)
    norm = Norm(torch.ones(k), 1e-5) if name in ("qkv", "gate_up", "head") else None
    activation = "silu" if gated else None
    got = linear(x[:1], first, norm=norm, activation=activation)
    if name != "head":
        want = linear_reference(x[:1], first, norm=norm, activation=activation)
        error = float((got - want).norm() / want.norm())
        assert error < 0.015, error
    graphs = [record(lambda g=g: linear(x, g, norm=norm, activation=activation)) for g in groups]
    median, low, high = timed([g.replay for g in graphs], budget_s)
    dense_bytes = 2 * k * sum(sizes)
    copies = max(2, ROTATE_BYTES // dense_bytes)
    dense = [torch.randn(sum(sizes), k, dtype=torch.bfloat16) for _ in range(copies)]
    xb = x.bfloat16()
    base, _, _ = timed([lambda w=w: torch.nn.functional.linear(xb, w) for w in dense], budget_s / 2)
    return {
        "op": "linear",
        "shape": f"{name} m={m} k={k} n={'+'.join(map(str, sizes))}",
        "bits": bits,
        "codebook": codebook.label,
        "device": "cpu",
        "threads": ops().cpu_threads(),
        "us": round(median * 1e6, 1),
        "us_10_90": [round(low * 1e6, 1), round(high * 1e6, 1)],
        "gweights_s": round(padded / median / 1e9, 2),
        "gb_s": round(padded * bits / 8 / median / 1e9, 2),
        "torch_bf16_us": round(base * 1e6, 1),
        "ratio": round(base / median, 2),
    }


def bench_step(bits: int, head_bits: int, budget_s: float) -> dict[str, object]:
    """All linear layers of one decode step of SmolLM2-135M, 30 layers and the head, replayed."""
    layers = [
        {
            name: [random_weight(k, n, bits, Codebook.MUL1) for n in sizes]
            for name, (k, sizes, _) in SHAPES.items()
            if name != "head"
        }
        for _ in range(30)
    ]
    head = [random_weight(576, 49152, head_bits, Codebook.MUL1)]
    moved = iter(
        consolidate([*(w for layer in layers for ws in layer.values() for w in ws), *head])
    )
    layers = [
        {name: [next(moved) for _ in group] for name, group in layer.items()} for layer in layers
    ]
    head = [next(moved)]
    x, norm = torch.randn(1, 576), Norm(torch.ones(576), 1e-5)

    def step() -> torch.Tensor:
        for layer in layers:
            q = linear(x, layer["qkv"], norm=norm)[:, :576]
            linear_add_(x, q, layer["o"])
            linear_add_(x, linear(x, layer["gate_up"], norm=norm, activation="silu"), layer["down"])
        return linear(x, head, norm=norm)

    graph = record(step)
    median, low, high = timed([graph.replay], budget_s)
    groups = [*(w for layer in layers for ws in layer.values() for w in ws), *head]
    weights = sum(w.suh.numel() * w.svh.numel() for w in groups)
    return {
        "op": "linear",
        "shape": f"decode step of SmolLM2-135M, {len(graph)} launches",
        "bits": bits,
        "head_bits": head_bits,
        "device": "cpu",
        "threads": ops().cpu_threads(),
        "us": round(median * 1e6, 1),
        "us_10_90": [round(low * 1e6, 1), round(high * 1e6, 1)],
        "gweights_s": round(weights / median / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1])
    parser.add_argument("--bits", nargs="*", type=int, default=[4])
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", type=int, default=3)
    options = parser.parse_args()
    ops().configure_cpu(options.threads, options.isa)
    torch.set_num_threads(ops().cpu_threads())
    codebook = Codebook.from_label(options.codebook)
    print(json.dumps(bench_step(4, 6, options.seconds)), flush=True)
    for name in options.shapes:
        for bits in options.bits:
            for m in options.rows:
                print(json.dumps(bench(name, m, bits, codebook, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
