"""Whole model on CUDA at the shape of Llama-3.1-8B with random weights: decode and prefill.

    python -m tests.bench.bench_cuda_model [--bits 4] [--layers 32] [--batch 1 4 16 64]

One JSON line per row: tokens/s of all sequences together beside the target (doc/targets), measured
with the logits' argmax read back every step, as a greedy generator does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from exl3 import Cache, Config, Model
from exl3.constants import PAGE_SIZE
from exl3.model.tune import tune_model
from exl3.ops.sampling import argmax
from exl3.settings import settings
from tests.bench.random_model import LLAMA_3_1_8B, Shape, random_config, write_random_model

TARGETS = {
    ("decode", 1, "short"): 700,
    ("decode", 4, "short"): 2400,
    ("decode", 16, "short"): 6000,
    ("decode", 64, "short"): 12000,
    ("decode", 1, "8k"): 600,
    ("prefill", 1, "2048"): 38000,
    ("prefill", 1, "4096"): 38000,
}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call that ends with the device idle."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Runner:
    """Sequences in neighbouring pages of one cache."""

    def __init__(self, model: Model, cache: Cache, batch: int, context: int) -> None:
        self.model, self.batch = model, batch
        pages = context // PAGE_SIZE + 2
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages) % cache.num_pages
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        self.params = {
            "attn_mode": "flash_attn",
            "cache": cache,
            "block_table": table,
            "cache_seqlens": self.lengths,
        }
        self.ids = torch.randint(0, 1000, (batch, 1))

    def step(self) -> None:
        logits = self.model.forward(self.ids, self.params)[:, -1]
        self.ids[:, 0] = argmax(logits, self.model.config.vocab_size).cpu()
        self.lengths += 1

    def prefill(self, tokens: int) -> None:
        ids = torch.randint(0, 1000, (1, tokens))
        past = torch.zeros(1, dtype=torch.int32)
        self.model.prefill(ids, self.params | {"cache_seqlens": past})


def show(kind: str, batch: int, context: str, rate: float, **more: object) -> None:
    target = TARGETS.get((kind, batch, context))
    row = {"bench": "cuda_model", "kind": kind, "batch": batch, "context": context}
    row |= {"tokens_per_s": round(rate, 1), "target": target}
    print(json.dumps(row | more), flush=True)


def device_step(runner: Runner, repeats: int) -> float:
    """Milliseconds that the device alone needs for a step."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        runner.model.forward(runner.ids, runner.params)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def measure(model: Model, cache: Cache, batches: list[int], steps: int) -> None:
    for batch, context, name in [*[(b, 64, "short") for b in batches], (1, 8000, "8k")]:
        runner = Runner(model, cache, batch, context)
        for _ in range(3):
            runner.step()
        time_s = seconds(runner.step, steps)
        device_ms = round(device_step(runner, 10), 3)
        show(
            "decode",
            batch,
            name,
            batch / time_s,
            step_ms=round(time_s * 1e3, 3),
            **{"device_ms": device_ms},
        )
    for tokens in (2048, 4096):
        runner = Runner(model, cache, 1, tokens)
        runner.prefill(tokens)
        time_s = seconds(lambda r=runner, t=tokens: r.prefill(t), 4)
        show("prefill", 1, str(tokens), tokens / time_s, ms=round(time_s * 1e3, 2))


def measure_load(shape: Shape, bits: int) -> None:
    """Seconds to load a model from files in the page cache, each time into a new `Model`."""
    with tempfile.TemporaryDirectory() as directory:
        with torch.device("cuda"):
            write_random_model(Path(directory), shape, bits=bits)
        torch.cuda.empty_cache()
        times = []
        for _ in range(3):
            model = Model.from_config(Config.from_directory(directory))
            start = time.perf_counter()
            model.load(device="cuda:0")
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            n_bytes = model.get_load_metrics()["bytes"]
            model.unload()
    row = {"bench": "cuda_model", "kind": "load", "gb": round(n_bytes / 1e9, 2), "target": 2}
    row |= {"seconds": [round(t, 2) for t in times]}
    print(json.dumps(row), flush=True)


def profile(model: Model, cache: Cache) -> None:
    """Device time of a decode step by kernel."""
    runner = Runner(model, cache, 1, 64)
    runner.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        runner.step()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14)[:6000])


def main() -> None:
    """Build the model on the device, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--load", action="store_true", help="measure loading from files, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    shape = replace(LLAMA_3_1_8B, layers=args.layers)
    with tempfile.TemporaryDirectory() as directory:
        config = random_config(Path(directory), shape, device="cuda", bits=args.bits)
        model = Model.from_config(config)
        cache = Cache(model, max_num_tokens=64 * 1024)
        model.load(device="cuda:0")
        if settings().cuda_tuning:
            tune_model(model, budget_s=60.0)  # all of it, as after a few loads
        measure(model, cache, args.batch, args.steps)
        if args.profile:
            profile(model, cache)
        peak = torch.cuda.max_memory_allocated()
        print(json.dumps({"bench": "cuda_model", "peak_gib": round(peak / 2**30, 2)}))
        model.unload()
    if args.load:
        measure_load(shape, args.bits)


if __name__ == "__main__":
    main()
