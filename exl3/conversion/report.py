"""The closing report of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..util.file import read_json
from .progress import clock
from .write import REPORT_NAME

_MAX_LAYERS = 400


def print_report(folder: Path, console: Console, *, seconds: float) -> None:
    """Bits, size, errors per layer and time, from the report file of a finished model."""
    values = read_json(folder / REPORT_NAME)
    table = Table("layer", "bits", "proxy error", "output error", box=None, pad_edge=False)
    rows = [row for module in values["modules"] for row in _rows(module)]
    for row in rows[:_MAX_LAYERS]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > _MAX_LAYERS:
        console.print(f"... and {len(rows) - _MAX_LAYERS} more in {REPORT_NAME}")
    for entry in values["bad_rows"]:
        console.print(f"calibration row {entry['row']} left out from {entry['module']} on")
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    console.print(
        f"{folder}: {values['bits']:.2f} bits per weight, head {values['options']['head_bits']}, "
        f"{files / 1e6:.1f} MB, mean proxy error {_mean_error(values):.3g}, "
        f"{clock(seconds)} in this run",
        highlight=False,
        soft_wrap=True,
    )


def _rows(module: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """One line per layer; the module's output error stands in its last line."""
    lines = []
    for layer in module["layers"]:
        last = layer is module["layers"][-1]
        output = f"{module['output_error']:.2e}" if last else ""
        note = "" if layer["feedback"] else " (plain rounding)"
        lines.append(
            (layer["key"] + note, str(layer["bits"]), f"{layer['proxy_error']:.2e}", output)
        )
    return lines


def _mean_error(values: dict[str, Any]) -> float:
    errors = [layer["proxy_error"] for m in values["modules"] for layer in m["layers"]]
    return sum(errors) / len(errors) if errors else 0.0
