"""Command line of the conversion: flags, legal ranges, and what a resumed job may change."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ConfigError
from ..ops.codebook import Codebook
from ..quant.allocation import check_bits
from ..quant.types import OUT_SCALES
from .device import conversion_device, device_name

logger = logging.getLogger(__name__)

CODEBOOKS = ("mul1", "mcg", "3inst")
assert set(CODEBOOKS) == {c.label for c in Codebook}


class Parser(argparse.ArgumentParser):
    """Bad arguments raise `ConfigError`, so that every error ends in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag. Parsed values are None unless given, so that a resumed job can tell."""

    flags: tuple[str, ...]
    help: str
    type: Callable[[str], Any] | None = str
    default: Any = None
    resume: str = "run"
    """`change`: a resumed job takes a new value; `fixed`: it refuses; `run`: holds for one run."""
    choices: tuple[str, ...] | None = None
    many: bool = False
    unknown: Any = None
    """Value for a job that was started when there was no such argument; None: the default."""

    @property
    def name(self) -> str:
        return self.flags[-1].lstrip("-")


def _flag(*flags: str, resume: str = "run", text: str) -> Argument:
    return Argument(flags, text, type=None, default=False, resume=resume)


ARGUMENTS = (
    Argument(("-i", "--in_dir"), "model directory or .gguf file to convert", resume="change"),
    Argument(("-o", "--out_dir"), "directory for the converted model", resume="change"),
    Argument(("-w", "--work_dir"), "directory for the state of the job"),
    Argument(("-b", "--bits"), "average bits per weight, 1 to 8", float, resume="fixed"),
    Argument(("-hb", "--head_bits"), "bits of the output head, 16: leave it", int, 6, "fixed"),
    Argument(("-mb", "--mtp_bits"), "bits of multi-token prediction layers", int, 4, "fixed"),
    _flag("-hq", "--hq", resume="fixed", text="raise sensitive layers to the architecture's floor"),
    Argument(("-cr", "--cal_rows"), "calibration rows", int, 250, "fixed"),
    Argument(("-cc", "--cal_cols"), "tokens per calibration row", int, 2048, "fixed"),
    Argument(
        ("-cd", "--cal_data"),
        "text file, or directory of text files, to calibrate on",
        str,
        None,
        "fixed",
    ),
    Argument(
        ("--cal_dataset",),
        "public data set to calibrate on: REPO[:split/column]",
        str,
        None,
        "fixed",
    ),
    Argument(("--seed",), "seed of calibration text and random signs", int, 0, "fixed"),
    Argument(
        ("--sensitivity",),
        "weigh errors by what they do to the model's output; takes a pass before the conversion",
        bool,
        True,
        "fixed",
        unknown=False,
    ),
    Argument(("-cb", "--codebook"), "codebook", str, "mul1", "fixed", CODEBOOKS),
    Argument(("--out_scales",), "output channel scales", str, "always", "fixed", OUT_SCALES),
    Argument(("-ss", "--shard_size"), "MB per output file, 0: one file", int, 8192, "change"),
    Argument(
        ("-cpi", "--checkpoint_interval"), "least seconds between checkpoints", int, 120, "change"
    ),
    Argument(
        ("-lcpi", "--last_checkpoint_index"),
        "no checkpoint after this module (for debugging)",
        int,
        -1,
        "change",
    ),
    Argument(
        ("-d", "--devices"),
        "number of the CUDA device to convert on, or cpu (default: device 0 if there is one)",
        device_name,
        None,
        "change",
        many=True,
    ),
    Argument(
        ("-dr", "--device_ratios"), "share of the work per device", int, None, "change", many=True
    ),
    _flag("-r", "--resume", text="continue the job in the work directory from its checkpoint"),
    _flag("--restart", text="start anew although the work directory holds a job, which is lost"),
    _flag("--override_anyway", text="let a resumed job change values that are fixed"),
    _flag("-v", "--verbose", text="log details; errors show where they came from"),
    _flag("-img", "--image_dump", text="save weights as images into the work directory"),
    Argument(("--max_module",), "stop after this module", int),
    _flag("-pm", "--parallel_mode", text="accepted, does nothing"),
)
NAMES = tuple(a.name for a in ARGUMENTS)
STORED = tuple(a.name for a in ARGUMENTS if a.resume != "run")


def make_parser() -> Parser:
    """The parser of `convert.py`; flags that are not given parse as None."""
    parser = Parser(prog="convert.py", description="Convert a model to EXL3.", allow_abbrev=False)
    for a in ARGUMENTS:
        if a.type is bool:
            switch = argparse.BooleanOptionalAction
            parser.add_argument(*a.flags, action=switch, default=None, help=a.help)
            continue
        shown = "" if a.default in (None, False) else f" (default: {a.default})"
        if a.type is None:
            parser.add_argument(*a.flags, action="store_true", default=None, help=a.help)
            continue
        parser.add_argument(
            *a.flags,
            type=a.type,
            choices=a.choices,
            default=None,
            help=a.help + shown,
            metavar=None if a.choices else a.name.upper(),
            nargs="+" if a.many else None,
        )
    return parser


def given_values(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that were given, by name.

    Raises:
        ConfigError: no work directory, or a value outside its range.
    """
    given = {name: getattr(args, name, None) for name in NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    check_values(given)
    if not given.get("work_dir"):
        raise ConfigError("-w --work_dir is required: the directory for the state of the job")
    return given


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a new job.

    Raises:
        ConfigError: one of -i, -o and -b is missing.
    """
    for short, name in (("-i", "in_dir"), ("-o", "out_dir"), ("-b", "bits")):
        if name not in given:
            raise ConfigError(
                f"{short} --{name} is required to start a conversion (or -r to resume one)"
            )
    return {a.name: given.get(a.name, a.default) for a in ARGUMENTS}


def merge_resumed(given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a resumed job: those stored, changed by those given where that is allowed.

    Raises:
        ConfigError: another value for a fixed argument, without --override_anyway.
    """
    merged = {
        a.name: stored.get(a.name, a.default if a.unknown is None else a.unknown) for a in ARGUMENTS
    }
    for a in ARGUMENTS:
        if a.name not in given:
            continue
        new, old = given[a.name], merged[a.name]
        merged[a.name] = new
        if a.resume == "run" or new == old:
            continue
        if a.resume == "fixed" and not given.get("override_anyway"):
            raise ConfigError(
                f"--{a.name}: this job was started with {old}, now {new} was given; leave it out"
                " to go on, start anew with another work directory, or add --override_anyway"
            )
        logger.warning("--%s changed from %s to %s", a.name, old, new)
    return merged


def check_values(values: Mapping[str, Any]) -> None:
    """Legal ranges of the values that are there.

    Raises:
        ConfigError: names the flag, the value and the range.
    """
    if "bits" in values:
        bits = values["bits"]
        if not math.isfinite(bits):
            raise ConfigError(f"-b --bits: expected a number from 1 to 8, got {bits}")
        try:
            check_bits(bits)
        except ConfigError as error:
            raise ConfigError(f"-b --{error}") from None
    if values.get("head_bits", 6) not in (*range(1, 9), 16):
        raise ConfigError(
            "-hb --head_bits: expected a whole number from 1 to 8, or 16 to leave the head"
            f" unquantised, got {values['head_bits']}"
        )
    if values.get("mtp_bits", 4) not in range(1, 9):
        raise ConfigError(
            f"-mb --mtp_bits: expected a whole number from 1 to 8, got {values['mtp_bits']}"
        )
    for flag, name, least in (
        ("-cr", "cal_rows", 1),
        ("-cc", "cal_cols", 2),
        ("-ss", "shard_size", 0),
        ("-cpi", "checkpoint_interval", 0),
        ("--max_module", "max_module", 0),
    ):
        if values.get(name, least) < least:
            raise ConfigError(f"{flag} --{name}: expected {least} or more, got {values[name]}")
    if values.get("cal_data") and values.get("cal_dataset"):
        raise ConfigError("--cal_data and --cal_dataset exclude each other: give one of them")
    if values.get("resume") and values.get("restart"):
        raise ConfigError("--resume and --restart exclude each other: give one of them")
    _check_devices(values)


def _check_devices(values: Mapping[str, Any]) -> None:
    devices, ratios = values.get("devices"), values.get("device_ratios")
    if ratios is not None and len(ratios) != len(devices or [0]):
        raise ConfigError(
            f"-dr --device_ratios: {len(ratios)} ratios for {len(devices or [0])} devices;"
            " give one per device"
        )
    conversion_device(devices)
