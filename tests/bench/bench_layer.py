"""One layer from its Hessian to packed tensors: `python -m tests.bench.bench_layer`.

A Gaussian weight and the Hessian of correlated inputs. The row carries the median of the calls'
seconds and, from one more call with the encoder's time taken apart, the share of the search.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exl3.quant import Hessian, LinearJob, QuantizeOptions, ldlq, quantize_group


def problem(size: int, device: str) -> tuple[LinearJob, Hessian]:
    generator = torch.Generator(device=device).manual_seed(0)
    weight = torch.randn(size, size, device=device, generator=generator) * 0.02
    x = torch.randn(2 * size, size, device=device, generator=generator)
    x = x * torch.linspace(0.2, 2, size, device=device) + x.roll(1, 1)
    return LinearJob("layer", weight, 4, None), Hessian(x.T @ x / len(x), len(x))


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--bits", nargs="*", type=int, default=[4])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    job, hessian = problem(options.size, "cuda")
    for bits in options.bits:
        one = LinearJob(job.key, job.weight, bits, None)

        def call(one: LinearJob = one) -> float:
            (result,) = quantize_group([one], hessian, QuantizeOptions(), share_key="layer")
            return result.report.proxy_error

        error = call()
        times = sorted(seconds(call) for _ in range(options.repeats))
        spent = 0.0
        encode = ldlq.trellis_encode

        def timed(tiles: Tensor, **more: Any) -> Any:
            nonlocal spent
            result = None

            def run() -> None:
                nonlocal result
                result = encode(tiles, **more)  # noqa: B023

            spent += seconds(run)
            return result

        ldlq.trellis_encode = timed
        try:
            call()
        finally:
            ldlq.trellis_encode = encode
        row = {
            "op": "layer",
            "shape": f"{options.size} x {options.size}",
            "bits": bits,
            "device": torch.cuda.get_device_name(),
            "seconds": round(times[len(times) // 2], 3),
            "search_seconds": round(spent, 3),
            "proxy_error": round(error, 6),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
