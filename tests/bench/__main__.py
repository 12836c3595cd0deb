"""Runs every bench that this machine can: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {path.stem}", flush=True)
        subprocess.run([sys.executable, "-m", f"tests.bench.{path.stem}"], check=True)


if __name__ == "__main__":
    main()
