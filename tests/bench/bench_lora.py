"""A model with adapters on every linear layer against the same model without:
`python -m tests.bench.bench_lora [--model DIR] [--rank 16]`.

Both run in turns in one process, so that their ratio holds on a noisy machine. Random weights of
SmolLM2-135M's shape unless a converted model is given. The answer is checked first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from exl3.model.lora import LoRA
from tests.bench.bench_model import PREFILL, Exl3Runner, seconds
from tests.bench.random_model import SMOLLM2_135M, write_random_model
from tests.model.peft_adapters import PeftAdapter

STEPS = 16


def check(runner: Exl3Runner, loras: list[LoRA]) -> None:
    """The adapter changes the logits as its formula says, on the slow path."""
    ids = torch.randint(2, 1000, (1, 24))
    exact = runner.model.forward(ids, {"loras": loras, "reconstruct": True})
    plain = runner.model.forward(ids, {"loras": [], "reconstruct": True})
    fused = runner.model.forward(ids, {"loras": loras})
    assert (fused - exact)[exact.isfinite()].std() < 0.3 * (plain - exact)[exact.isfinite()].std()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        directory = args.model or write_random_model(root / "model", SMOLLM2_135M)
        runner = Exl3Runner(directory)
        adapter = PeftAdapter(runner.model, rank=args.rank, size=0.05)
        lora = LoRA.from_directory(runner.model, adapter.save(root))
    check(runner, [lora])
    ids = torch.randint(2, 1000, (1, PREFILL))
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for name, loras in (("plain", []), ("adapter", [lora])):

            def run(ids: torch.Tensor, past: int, loras: list[LoRA] = loras) -> None:
                params = {**runner.params(past), "loras": loras, "last_tokens_only": 1}
                runner.model.forward(ids, params)

            prefill = seconds(lambda run=run: run(ids, 0))  # type: ignore[misc]
            steps = [
                seconds(lambda run=run, i=i: run(ids[:, :1], PREFILL + i))  # type: ignore[misc]
                for i in range(STEPS)
            ]
            if turn:  # the first round warms up
                times.setdefault((name, "prefill"), []).append(prefill)
                times.setdefault((name, "decode"), []).extend(steps)
    for work in ("prefill", "decode"):
        plain, adapted = (statistics.median(times[name, work]) for name in ("plain", "adapter"))
        row = {
            "op": f"lora_{work}",
            "rank": args.rank,
            "plain_us": round(plain * 1e6),
            "adapter_us": round(adapted * 1e6),
            "ratio": round(adapted / plain, 2),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
