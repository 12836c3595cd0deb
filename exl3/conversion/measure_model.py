"""Measuring which layers of a model need bits, from several EXL3 versions of it.

`prepare(parser.parse_args())` checks, `main` measures and writes a JSON file, which
`optimize_model` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import ConfigError, Exl3Error
from ..model import Config, Model
from ..util.file import write_json
from ..version import __version__
from .arguments import Parser
from .calibration import CalibrationPlan, make_calibration
from .command import run_command
from .convert_model import one_line
from .measurement import LEVELS, GroupResult, Measurement, check_same_model
from .progress import Progress

FORMAT = "exl3-measurement-1"

Prepared = tuple[dict[str, Any], Any, bool, str | None]


def _make_parser() -> Parser:
    parser = Parser(
        prog="python -m exl3.conversion.measure_model",
        description="Measure how each group of layers of several EXL3 versions changes the output.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    levels = "; ".join(f"{i}: {text}" for i, text in enumerate(LEVELS))
    add("-i", "--in_dir", nargs="+", metavar="DIR", help="EXL3 versions of one model, two or more")
    add("-r", "--ref_dir", metavar="DIR", help="the original model")
    add("-l", "--level", type=int, default=1, help=f"what is measured together: {levels}")
    add("-o", "--out_file", metavar="FILE", help="JSON file to write")
    add("-cr", "--cal_rows", type=int, default=10, help="calibration rows")
    add("-cc", "--cal_cols", type=int, default=1024, help="tokens per calibration row")
    add("-cd", "--cal_data", help="text file or directory to measure on")
    add("-d", "--device", type=int, default=0, help="only 0: this version measures on the CPU")
    add(
        "-ms",
        "--max_sys_memory",
        type=float,
        default=4.0,
        help="GiB for the reference's logits; if they need more, it takes longer",
    )
    add("-v", "--verbose", action="store_true", help="errors show where they came from")
    return parser


parser = _make_parser()


def prepare(args: argparse.Namespace) -> Prepared:
    """Check arguments and models. Returns (in_args, None, True, None), or with False the reason."""
    try:
        return _check(vars(args)), None, True, None
    except (Exl3Error, OSError, ImportError) as error:
        return {}, None, False, one_line(error)


def _check(values: dict[str, Any]) -> dict[str, Any]:
    for short, name in (("-i", "in_dir"), ("-r", "ref_dir"), ("-o", "out_file")):
        if not values[name]:
            raise ConfigError(f"{short} --{name} is required")
    if len(values["in_dir"]) < 2:
        raise ConfigError(
            f"-i --in_dir: one version leaves no choice, give two or more; got {values['in_dir']}"
        )
    if values["level"] not in range(len(LEVELS)):
        raise ConfigError(f"-l --level: expected 0 to 3, got {values['level']}")
    for name, least in (("cal_rows", 1), ("cal_cols", 2), ("max_sys_memory", 0)):
        if values[name] < least:
            raise ConfigError(f"--{name}: expected {least} or more, got {values[name]}")
    if values["device"] != 0:
        raise ConfigError(f"-d --device: only 0, the CPU, is possible; got {values['device']}")
    folder = Path(values["out_file"]).expanduser().parent
    if not folder.is_dir():
        raise ConfigError(f"-o --out_file: there is no folder {folder}")
    reference = Config.from_directory(values["ref_dir"])
    check_same_model(reference, [Config.from_directory(name) for name in values["in_dir"]])
    return values


def main(in_args: dict[str, Any], job_state: Any = None, console: Console | None = None) -> bool:
    """Measure and write the file; True when it is written."""
    console = console or Console(stderr=True)
    configs = [Config.from_directory(name) for name in in_args["in_dir"]]
    config = Config.from_directory(in_args["ref_dir"])
    plan = CalibrationPlan(
        in_args["cal_rows"], in_args["cal_cols"], cal_data=in_args.get("cal_data")
    )
    calibration = make_calibration(config, plan)
    config.infer_params.plain_dtype = torch.float32
    reference = Model.from_config(config)
    reference.load(device="cpu")  # where the groups are measured
    try:
        memory = int(in_args["max_sys_memory"] * 1024**3)
        measurement = Measurement(reference, configs, calibration.input_ids, memory)
        with Progress(console) as progress:
            progress.start(measurement.count(in_args["level"]))

            def step(name: str) -> None:
                progress.step(name)
                progress.advance(1)

            results = measurement.run(in_args["level"], step)
    finally:
        reference.unload()
    record = {"rows": plan.rows, "cols": plan.cols, **calibration.record}
    write_json(in_args["out_file"], _values(in_args, configs, results, record))
    _print(console, configs, results, in_args["out_file"])
    return True


def _values(
    in_args: dict[str, Any],
    configs: Sequence[Config],
    results: Sequence[GroupResult],
    calibration: dict[str, Any],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "exl3_version": __version__,
        "level": in_args["level"],
        "calibration": calibration,
        "versions": [
            {"directory": str(Path(c.directory).resolve()), "fingerprint": c.stc.fingerprint()}
            for c in configs
        ],
        "groups": [
            {
                "name": r.group.name,
                "keys": list(r.group.keys),
                "module": r.group.module,
                "head": r.group.is_head,
                "numel": r.numel,
                "candidates": [
                    {"version": c.version, "bits": c.bits, "kl": c.kl} for c in r.candidates
                ],
            }
            for r in results
        ],
    }


def _print(
    console: Console, configs: Sequence[Config], results: Sequence[GroupResult], file: str
) -> None:
    for index, config in enumerate(configs):
        body = [r for r in results if not r.group.is_head]
        numel = sum(r.numel for r in body)
        bits = sum(r.candidates[index].bits for r in body) / max(numel, 1)
        total = sum(r.candidates[index].kl for r in results)
        console.print(
            f"{config.directory}: {bits:.2f} bits per weight, KL {total:.4f} summed over groups",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"written: {file}", highlight=False, soft_wrap=True)


def run(argv: Sequence[str] | None = None) -> int:
    """The command line; errors are one line; returns the exit status."""
    return run_command(parser, prepare, main, argv)


if __name__ == "__main__":
    raise SystemExit(run())
