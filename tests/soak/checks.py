"""Memory, idleness, and the answers of single requests."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch

from exl3 import ArgmaxSampler, AsyncGenerator, Generator, Job

from .load import Finished, Tally

STUCK_S = 120.0


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def watch(generator: AsyncGenerator, tally: Tally, every_s: float) -> list[tuple[float, int]]:
    """Until cancelled: integrity, life signs, memory as (seconds, bytes)."""
    memory: list[tuple[float, int]] = []
    start = time.monotonic()
    while True:
        try:
            await asyncio.sleep(every_s)
        except asyncio.CancelledError:
            return memory
        generator.generator.check_integrity()
        if generator.is_stuck(STUCK_S):
            tally.fault(f"stuck: {generator.generator.heartbeat()}")
        memory.append((time.monotonic() - start, resident_bytes()))


def growth(memory: list[tuple[float, int]]) -> dict[str, Any]:
    """Growth over the second half of the run, by least squares: bytes per minute and in all;
    and the course of it in MiB."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return {"bytes_per_minute": 0.0, "bytes": 0.0, "resident": float(resident_bytes())}
    times = torch.tensor([t for t, _ in half], dtype=torch.float64)
    sizes = torch.tensor([s for _, s in half], dtype=torch.float64)
    centred = times - times.mean()
    slope = float((centred * (sizes - sizes.mean())).sum() / (centred * centred).sum())
    span = float(times[-1] - times[0])
    every = max(1, len(memory) // 12)
    return {
        "bytes_per_minute": 60 * slope,
        "bytes": slope * span,
        "resident": half[-1][1],
        "mib": [size >> 20 for _, size in memory[::every]],
    }


async def idle_share(seconds: float) -> float:
    """Share of one core that this process uses while nothing is asked of it."""
    start, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - start)


def compare(
    model: Any, cache: Any, tokenizer: Any, sample: list[Finished]
) -> dict[str, float | int]:
    """Greedy requests again, one by one, on a cache without tiers.

    On the CPU they must be equal. On CUDA batches of other sizes round differently, so that tokens
    of almost equal logits may swap. Each token is therefore also judged by the logits of one pass
    over the whole text, without a cache: `worst_gap` is the most by which a drawn token fell short
    of the best, divided by what guidance multiplies rounding with.
    """
    generator = Generator(model, cache, tokenizer)
    equal, gaps = 0, [0.0]
    for done in sample:
        job = Job(
            [torch.tensor([text]) for text in done.prompts],
            cfg_scale=done.scale,
            max_new_tokens=max(1, len(done.tokens)),
            sampler=ArgmaxSampler(),
        )
        alone: list[int] = []
        generator.enqueue(job)
        while generator.num_remaining_jobs():
            for event in generator.iterate():
                alone += event["token_ids"][0].tolist() if "token_ids" in event else []
        equal += alone[: len(done.tokens)] == done.tokens
        if done.tokens:
            params = {"last_tokens_only": len(done.tokens) + 1}
            rows = [
                model.forward(torch.tensor([text + done.tokens]), params)[0, :-1]
                for text in done.prompts
            ]
            logits = rows[-1] + done.scale * (rows[0] - rows[-1])
            logits = logits[:, : tokenizer.actual_vocab_size]
            drawn = logits.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
            gap = float((logits.max(1).values - drawn).max())
            gaps.append(gap / (done.scale + abs(done.scale - 1)))
    return {"compared": len(sample), "equal": equal, "worst_gap": max(gaps)}
