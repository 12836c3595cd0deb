"""Runs every bench that this machine can: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        if path.stem.startswith("bench_cuda") and not torch.cuda.is_available():
            print(f"== {path.stem}: skipped, no CUDA device", flush=True)
            continue
        print(f"== {path.stem}", flush=True)
        subprocess.run([sys.executable, "-m", f"tests.bench.{path.stem}"], check=True)


if __name__ == "__main__":
    main()
