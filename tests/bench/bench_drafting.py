"""Drafting on the CPU: what a pass over several rows costs, and what n-gram drafts gain.

    python -m tests.bench.bench_drafting [--model DIR]

The baseline is the same generator without drafts. All cases run in turns in one process, so ratios
hold on a machine that is not idle; answers are compared first. Without a model one with random
weights in the shape of SmolLM2-135M stands in, whose greedy answers soon go round in circles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from exl3 import ArgmaxSampler, Cache, Config, DefaultSampler, Generator, Job, Model, Tokenizer
from tests.bench.random_model import SMOLLM2_135M, write_random_model
from tests.engine.fake import FakeTokenizer

ROUNDS = 6
TOKENS = 120
ROWS = (1, 2, 3, 4, 5, 8, 12, 16)
PASSAGE = (
    "| river | length in km | countries |\n| Nile | 6650 | Egypt, Sudan, Uganda |\n"
    "| Amazon | 6400 | Brazil, Peru, Colombia |\n| Yangtze | 6300 | China |\n"
    "| Mississippi | 6275 | United States |\n| Yenisei | 5539 | Russia, Mongolia |\n\n"
)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "3 tokens": {"ngram_match_min": 2, "num_draft_tokens": 3},
    "3 tokens, dynamic": {
        "ngram_match_min": 2,
        "num_draft_tokens": 3,
        "dynamic_draft_tokens": True,
    },
    "15 tokens, dynamic": {
        "ngram_match_min": 2,
        "num_draft_tokens": 15,
        "dynamic_draft_tokens": True,
    },
}


def step_ms(model: Model, cache: Cache) -> dict[int, float]:
    """Median milliseconds of a pass, by rows, at a context of 200 tokens."""
    table = torch.arange(1, dtype=torch.int32)[None]
    params = {"attn_mode": "flash_attn", "cache": cache}
    empty = torch.zeros(1, dtype=torch.int32)
    ids = torch.randint(0, 1000, (1, 250))
    model.prefill(ids, {**params, "block_table": table, "cache_seqlens": empty})
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(25):
        for rows, own in times.items():
            lengths = torch.arange(200, 200 + rows, dtype=torch.int32)
            step = {"block_table": table.repeat(rows, 1), "cache_seqlens": lengths}
            start = time.perf_counter()
            model.forward(ids[:, :rows].view(-1, 1), {**params, **step})
            own.append((time.perf_counter() - start) * 1e3)
    return {rows: statistics.median(own) for rows, own in times.items()}


def answer(parts: tuple[Any, ...], ids: torch.Tensor, sampler: Any, case: dict[str, Any]) -> Any:
    """(tokens per second, drafted tokens accepted and rejected, ids of the answer)."""
    generator = Generator(*parts, **case)
    job = Job(ids.clone(), max_new_tokens=TOKENS, sampler=sampler, seed=1)
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        generator.iterate()
    said = job.sequences[0].input_ids.torch()[0, ids.shape[1] :].tolist()
    speed = len(said) / job.time_generate
    return speed, job.accepted_draft_tokens, job.rejected_draft_tokens, said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="EXL3 directory")
    given = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        directory = given or Path(folder)
        if given is None:
            write_random_model(directory, SMOLLM2_135M, bits=4)
        model = Model.from_config(config := Config.from_directory(str(directory)))
        cache = Cache(model, max_num_tokens=2048)
        model.load(device="cpu")
    tokenizer = FakeTokenizer() if given is None else Tokenizer.from_config(config)
    base = {"device": "cpu", "model": "random" if given is None else directory.name}
    times = step_ms(model, cache)
    for rows, ms in times.items():
        row = {"op": "decode pass", "rows": rows, "ms": round(ms, 2)}
        print(json.dumps({**row, "ratio": round(ms / times[1], 2), **base}), flush=True)
    texts = {"a table, copied": PASSAGE * 2, "a story": "Once upon a time there was a"}
    samplers = {"a table, copied": ArgmaxSampler(), "a story": DefaultSampler()}
    for name, text in texts.items():
        ids = tokenizer.encode(text)
        got: dict[str, list[Any]] = {case: [] for case in CASES}
        for turn in range(ROUNDS):
            cases = list(CASES)
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                parts = (model, cache, tokenizer)
                got[case].append(answer(parts, ids, samplers[name], CASES[case]))
                assert got[case][-1][3] == got["plain"][0][3], "drafts changed the answer"
        plain = statistics.median(run[0] for run in got["plain"])
        for case, runs in got.items():
            speed = statistics.median(run[0] for run in runs)
            row = {"op": "n-gram drafts", "text": name, "case": case, "accepted": runs[0][1]}
            row |= {"rejected": runs[0][2], "tokens_per_s": round(speed, 1)}
            print(json.dumps({**row, "ratio": round(speed / plain, 2), **base}), flush=True)


if __name__ == "__main__":
    main()
