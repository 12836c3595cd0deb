"""What the generator adds to a decode step: scheduling, sampling, text and events.

    python -m tests.bench.bench_generator

The model is a table of logits over 49152 tokens, so that nothing else is measured. Times are CPU
time of the thread, which other programs disturb little. The baseline is `torch.argmax` and, for
sampling, `torch.softmax` with `torch.multinomial`, over the same logits in the same run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from exl3 import ArgmaxSampler, ComboSampler, DefaultSampler, Generator, Job
from tests.engine.fake import FakeTokenizer

VOCAB = 49152
TOKENS = 200
ROUNDS = 20


class TableModel:
    """Gives the same logits at every step, at no cost."""

    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=1 << 20)
    loaded = True

    def __init__(self) -> None:
        self.caps: dict[str, Any] = {}
        self.logits = torch.randn(16, 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
        # What is drawn has text and ends nothing.
        self.logits[..., :260] = -30.0

    def prefill(self, ids: torch.Tensor, params: dict[str, Any]) -> None:
        pass

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return self.logits[: ids.shape[0]]


class WideTokenizer(FakeTokenizer):
    """The tokenizer of the tests, filled up with words."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes += [b" word%d" % i for i in range(VOCAB - len(self.bytes))]
        self.actual_vocab_size = VOCAB
        pieces = [data.decode("utf-8", "replace") for data in self.bytes]
        self._pieces = {False: pieces, True: pieces}


def thread_time(function: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of CPU time per item, of every round."""
    function()
    out = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        function()
        out.append((time.thread_time() - start) / count * 1e6)
    return out


def main() -> None:
    model, tokenizer = TableModel(), WideTokenizer()
    cache = SimpleNamespace(max_num_tokens=8192, copy_page=lambda *args: None)
    holder = type("Cache", (), vars(cache))()

    def run(batch: int, options: dict[str, Any]) -> None:
        generator = Generator(model, holder, tokenizer)
        stops = [1, "<|im_end|>", "\nUser:"]
        for seed in range(batch):
            ids = torch.randint(300, 400, (1, 20))
            job = Job(ids, max_new_tokens=TOKENS, seed=seed, stop_conditions=stops, **options)
            generator.enqueue(job)
        while generator.num_remaining_jobs():
            generator.iterate()

    def draw() -> None:
        for _ in range(TOKENS):
            torch.multinomial(model.logits[0].softmax(-1), 1)

    torch.set_num_threads(1)
    baseline = {
        "argmax": thread_time(lambda: [model.logits[0].argmax(-1) for _ in range(TOKENS)], TOKENS),
        "multinomial": thread_time(draw, TOKENS),
    }
    combo = ComboSampler(rep_p=1.1, temperature=0.8, min_p=0.05, top_p=0.9, temp_last=True)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "greedy": ("argmax", {"sampler": ArgmaxSampler()}),
        "default": ("multinomial", {"sampler": DefaultSampler()}),
        "all penalties and cuts": ("multinomial", {"sampler": combo}),
        "loop check": ("multinomial", {"stop_on_loop": (300, 3)}),
        "top 5": ("multinomial", {"return_top_tokens": 5, "return_probs": True}),
    }
    for name, (base, options) in cases.items():
        for batch in (1, 8):
            times = thread_time(lambda b=batch, o=options: run(b, o), TOKENS * batch)
            median = statistics.median(times)
            row = {
                "op": "generator step",
                "case": name,
                "batch": batch,
                "device": "cpu",
                "us_per_token": round(median, 1),
                "spread_us": round(max(times) - min(times), 1),
                f"torch_{base}_us": round(statistics.median(baseline[base]), 1),
                "ratio": round(median / statistics.median(baseline[base]), 2),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
