"""Whole model on the CPU, SmolLM2-135M shape: decode and prefill against plain torch bfloat16.

    python -m tests.bench.bench_model [--bits 4] [--model DIR] [--profile]

Both programs run in turns in one process, so their ratio holds on a noisy machine. The baseline is
Transformers' Llama with random bfloat16 weights of the same shape and its own key/value cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.bench.random_model import SMOLLM2_135M, write_random_model

PREFILL = 512
STEPS = 64


class Exl3Runner:
    """The model with a paged cache, one sequence."""

    def __init__(self, directory: Path) -> None:
        from exl3 import Cache, Config, Model

        self.model = Model.from_config(Config.from_directory(str(directory)))
        self.cache = Cache(self.model, max_num_tokens=2048)
        self.model.load(device="cpu")
        self.table = torch.arange(8, dtype=torch.int32).view(1, 8)

    def params(self, past: int) -> dict[str, object]:
        return {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "block_table": self.table,
            "cache_seqlens": torch.tensor([past], dtype=torch.int32),
        }

    def prefill(self, ids: torch.Tensor) -> None:
        self.model.forward(ids, {**self.params(0), "last_tokens_only": 1})

    def decode(self, past: int) -> None:
        self.model.forward(torch.tensor([[7]]), self.params(past))


class TorchRunner:
    """Transformers' Llama in bfloat16."""

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

        fields = SMOLLM2_135M.config()
        fields.pop("architectures")
        config = AutoConfig.for_model(**fields)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.new_cache = DynamicCache
        self.cache = DynamicCache()

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> None:
        self.cache = self.new_cache()
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode(self, past: int) -> None:
        self.model(torch.tensor([[7]]), past_key_values=self.cache, use_cache=True)


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(runners: dict[str, Exl3Runner | TorchRunner], rounds: int) -> list[dict[str, object]]:
    """Rows for prefill and decode: tokens a second, median over the rounds."""
    ids = torch.randint(2, SMOLLM2_135M.vocab, (1, PREFILL))
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, runner in runners.items():
            prefill = seconds(lambda r=runner: r.prefill(ids))  # type: ignore[misc]
            steps = [
                seconds(lambda r=runner, i=i: r.decode(PREFILL + i))  # type: ignore[misc]
                for i in range(STEPS)
            ]
            if turn:  # the first round warms up
                times.setdefault((name, "prefill"), []).append(prefill)
                times.setdefault((name, "decode"), []).extend(steps)
    tokens = {"prefill": PREFILL, "decode": 1}
    rows = []
    for (name, work), values in times.items():
        rows.append(
            {
                "op": f"model_{work}",
                "engine": name,
                "shape": "SmolLM2-135M",
                "tokens_per_s": round(tokens[work] / statistics.median(values), 1),
                "best_tokens_per_s": round(tokens[work] / min(values), 1),
            }
        )
    return rows


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a converted model instead of random weights")
    parser.add_argument("--profile", action="store_true", help="only exl3's decode, for a profiler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = args.model or write_random_model(Path(folder), SMOLLM2_135M, bits=args.bits)
        runners: dict[str, Exl3Runner | TorchRunner] = {"exl3": Exl3Runner(directory)}
        if args.profile:
            for i in range(2000):
                runners["exl3"].decode(PREFILL + i % 512)
            return
        runners["torch_bf16"] = TorchRunner()
        rows = measure(runners, args.rounds)
    for row in rows:
        print(json.dumps(row))
    by = {(r["engine"], r["op"]): r["tokens_per_s"] for r in rows}
    for op in ("model_decode", "model_prefill"):
        ratio = by["exl3", op] / by["torch_bf16", op]  # type: ignore[operator]
        print(f"{op}: exl3 is {ratio:.2f} times plain torch bfloat16")


if __name__ == "__main__":
    main()
