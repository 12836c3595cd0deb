"""A whole conversion and where its time goes: `python -m tests.bench.bench_conversion MODEL`.

Parts are timed with the device waited for before and after each; `rest` is what is left of the
whole. The output is deleted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = {
    "text": ("conversion.calibration", ("prose", "source_code", "_stream")),
    "own text": ("conversion.calibration", ("sample_text",)),
    "sensitivity": ("conversion.stages", ("measure_sensitivity",)),
    "read": ("conversion.stages", ("load_sensitivity",)),
    "passes": ("conversion.stages", ("run_rows",)),
    "prepare": ("quant.quantize", ("_prepare",)),
    "search": ("quant.quantize", ("ldlq",)),
    "finish": ("quant.quantize", ("_finish",)),
    "write": ("conversion.stages", ("save_tensors",)),
    "output": ("conversion.convert_model", ("write_model",)),
}


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)

    def watch(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any, **named: Any) -> Any:
            start = now()
            try:
                return call(*args, **named)
            finally:
                self.spent[part] += now() - start

        return timed


def now() -> float:
    """Seconds, once the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--rows", default="250")
    parser.add_argument("--columns", default="2048")
    options, more = parser.parse_known_args()
    clock = Clock()
    start = time.perf_counter()
    for part, (name, functions) in PARTS.items():
        module = importlib.import_module(f"exl3.{name}")
        for function in functions:
            setattr(module, function, clock.watch(part, getattr(module, function)))
    from exl3.conversion.convert_model import run

    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        places = ["-o", str(Path(folder, "out")), "-w", str(Path(folder, "work"))]
        sizes = ["-b", options.bits, "-hb", "6", "-cr", options.rows, "-cc", options.columns]
        status = run(["-i", options.model, *places, *sizes, *more])
    whole = time.perf_counter() - start
    row = {
        "bench": "conversion",
        "options": [*sizes, *more],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "status": status,
        "seconds": round(whole, 2),
        **{part: round(spent, 2) for part, spent in clock.spent.items()},
        "rest": round(whole - sum(clock.spent.values()), 2),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
