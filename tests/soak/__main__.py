"""`python -m tests.soak --model DIR`: 64 requests at once, five minutes; prints a JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3 import AsyncGenerator, AsyncJob, Cache, Config, Model, Tokenizer

from .checks import compare, growth, idle_share, watch
from .load import Prompts, Tally, client

DEMO = Path(__file__).parents[2] / "demo" / "SmolLM2-135M-Instruct-exl3-4bpw"
MAX_IDLE = 0.01  # of a core


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and the limits.

    `max_gap`: logits by which a greedy token may fall short of the best; one of another request's
    text falls short by several. `max_growth`: bytes over the second half.
    """

    model: Path
    seconds: float = 300.0
    clients: int = 64
    cache_tokens: int = 16384
    host_pages: int = 16
    disk_pages: int = 100
    longest: int = 1500
    ngram: int = 0
    seed: int = 0
    max_gap: float = 0.5
    max_growth: int = 48 << 20


def page_bytes(cache: Cache) -> int:
    return cache.storage_size() // cache.num_pages


async def soak(plan: Plan, model: Any, tokenizer: Any, folder: str) -> dict[str, Any]:
    """Run the load; returns the figures. `faults` lists what went wrong."""
    cache = Cache(model, plan.cache_tokens)
    size = page_bytes(cache)
    generator = AsyncGenerator(
        model,
        cache,
        tokenizer,
        cpu_cache_size=plan.host_pages * (size + 4096),
        disk_cache_dir=folder if plan.disk_pages else None,
        disk_cache_size=plan.disk_pages * (size + 8192),
        ngram_match_min=plan.ngram,
    )
    for tensor in cache.get_all_tensors():
        tensor.zero_()  # so that all of its memory is taken now
    tally = Tally()
    prompts = Prompts(tokenizer, plan.longest, plan.seed)
    loop = asyncio.get_running_loop()
    await warm_up(generator, plan)
    watcher = asyncio.create_task(watch(generator, tally, max(0.5, plan.seconds / 120)))
    until = loop.time() + plan.seconds
    seeds = range(plan.seed * 1000, plan.seed * 1000 + plan.clients)
    results = await asyncio.gather(
        *(client(generator, prompts, tally, until, seed) for seed in seeds), return_exceptions=True
    )
    for error in results:
        if error is not None:
            tally.fault(f"a client failed: {error!r}")
    watcher.cancel()
    try:
        memory = await watcher
    except Exception as error:
        memory = []
        tally.fault(f"the watcher failed: {error!r}")
    engine = generator.generator
    figures: dict[str, Any] = {**tally.counts, "engine": engine.metrics, "memory": growth(memory)}
    if engine.num_remaining_jobs() or generator.jobs or generator.error:
        tally.fault(f"left over: {engine.num_remaining_jobs()} jobs, error {generator.error!r}")
    if engine.pagetable.num_free != engine.pagetable.max_pages:
        tally.fault(f"{engine.pagetable.num_free} of {engine.pagetable.max_pages} pages are free")
    engine.check_integrity()
    await asyncio.sleep(2)  # what is left is written to disk
    figures["idle_share"] = await idle_share(5)
    await generator.close()
    cache.detach_from_model()
    reference = Cache(model, 4096)
    figures.update(compare(model, reference, tokenizer, tally.greedy))
    figures["exact"] = model.output_device.type == "cpu"
    figures["faults"] = tally.faults + verdict(plan, figures)
    return figures


async def warm_up(generator: AsyncGenerator, plan: Plan) -> None:
    """Batches of every size, one less at each step: the steps recorded for them take memory that
    is kept. And a long prompt."""
    count = min(plan.clients, plan.cache_tokens // 256 - 1)
    limits = range(2, count + 2)
    jobs = [
        AsyncJob(generator, torch.tensor([[5 + i]]), max_new_tokens=limit)
        for i, limit in enumerate(limits)
    ]
    jobs.append(AsyncJob(generator, torch.full((1, plan.longest), 9), max_new_tokens=1))
    for job in jobs:
        async for _ in job:
            pass


def verdict(plan: Plan, figures: dict[str, Any]) -> list[str]:
    """Limits that the figures break."""
    out = []
    if figures["exact"] and figures["equal"] < figures["compared"]:
        out.append(f"{figures['equal']} of {figures['compared']} greedy answers are those alone")
    if figures["worst_gap"] > plan.max_gap:
        out.append(f"a greedy token falls short of the best by {figures['worst_gap']:.2f}")
    if figures["memory"]["bytes"] > plan.max_growth:
        out.append(
            f"memory grew by {figures['memory']['bytes'] / 2**20:.0f} MiB in the second half"
        )
    if figures["idle_share"] > MAX_IDLE:
        out.append(f"idle, it uses {figures['idle_share']:.2%} of a core")
    return out


def run(plan: Plan) -> dict[str, Any]:
    """Load the model, run, unload."""
    config = Config.from_directory(str(plan.model))
    model = Model.from_config(config)
    tokenizer = Tokenizer.from_config(config)
    model.load()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(soak(plan, model, tokenizer, folder))
    finally:
        model.unload()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEMO, help="converted model directory")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--cache-tokens", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--ngram", type=int, default=0, help="ngram_match_min: draft from the text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    figures = run(
        Plan(
            args.model,
            args.seconds,
            args.clients,
            args.cache_tokens,
            longest=args.longest,
            ngram=args.ngram,
            seed=args.seed,
        )
    )
    sys.stdout.write(json.dumps(figures) + "\n")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
