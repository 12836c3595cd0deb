"""Time to the first token of a prompt of 2049 tokens: computed, or found in a tier of the cache.

    python -m tests.bench.bench_tiers [--model DIR]

The model is SmolLM2-135M with random weights unless one is given. Files are in the system's page
cache, as after a restart of the program, not of the machine. The baseline is the prompt computed,
in the same run; the token drawn must be the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from exl3 import ArgmaxSampler, Cache, Config, Generator, Job, Model
from tests.bench.bench_generator import WideTokenizer
from tests.bench.random_model import SMOLLM2_135M, write_random_model

LENGTH = 2049
PAGES = LENGTH // 256 + 1
HOST_BYTES = 256 << 20


def ids(seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40000, (1, LENGTH), generator=source)


def first_token(generator: Generator, seed: int, cached: int) -> tuple[float, int]:
    """(seconds, token) of a prompt of which so many tokens must be found."""
    job = Job(ids(seed), max_new_tokens=1, sampler=ArgmaxSampler())
    start = time.perf_counter()
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        events = generator.iterate()
    seconds = time.perf_counter() - start
    assert events[-1]["cached_tokens"] == cached, events[-1]["cached_tokens"]
    return seconds, int(events[-1]["token_ids"][0, 0])


def measure(model: Model, folder: str, rounds: int) -> list[dict[str, object]]:
    cache, tokenizer = Cache(model, PAGES * 256), WideTokenizer()

    def new(**tiers: object) -> Generator:
        return Generator(model, cache, tokenizer, **tiers)

    found: dict[str, list[tuple[float, int]]] = {}

    def run(name: str, count: int, once: Callable[[int], tuple[float, int]]) -> None:
        found[name] = [once(i) for i in range(count)]

    run("computed", max(3, rounds // 4), lambda i: first_token(new(), 0, 0))
    warm = new()
    first_token(warm, 0, 0)
    run("cache", rounds, lambda i: first_token(warm, 0, LENGTH - 1))
    host = new(cpu_cache_size=HOST_BYTES)
    first_token(host, 0, 0)
    first_token(host, 1, 0)
    turns = [first_token(host, i % 2, LENGTH - 1) for i in range(2 * rounds)]
    found["host"] = turns[::2]
    saving = new(disk_cache_dir=folder)
    first_token(saving, 0, 0)
    saving.close()

    def restarted(i: int) -> tuple[float, int]:
        generator = new(disk_cache_dir=folder)
        out = first_token(generator, 0, LENGTH - 1)
        generator.close()
        return out

    run("disk", rounds, restarted)
    assert len({token for name in found for _, token in found[name]}) == 1
    base = statistics.median(seconds for seconds, _ in found["computed"])
    rows: list[dict[str, object]] = []
    for name, values in found.items():
        times = [seconds for seconds, _ in values]
        median = statistics.median(times)
        row = {"op": "first_token", "from": name, "tokens": LENGTH, "ms": round(median * 1e3, 2)}
        row["spread_ms"] = round((max(times) - min(times)) * 1e3, 2)
        row["times_computed"] = round(median / base, 4)
        row["page_bytes"] = cache.storage_size() // cache.num_pages
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as pages:
        directory = args.model or write_random_model(Path(folder), SMOLLM2_135M, bits=4)
        model = Model.from_config(Config.from_directory(str(directory)))
        model.load()
        for row in measure(model, pages, args.rounds):
            print(json.dumps(row))
        model.unload()


if __name__ == "__main__":
    main()
