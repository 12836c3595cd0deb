"""Converting a model: command line, starting and resuming a job.

`prepare(parser.parse_args())` checks everything that can be checked before work starts; `main`
does the work. `run` is both, with an exit status.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler

from ..errors import ConfigError, Exl3Error, FormatError, StorageError
from ..model import Config, Model
from ..ops.registry import ops
from ..tokenizer import Tokenizer
from ..util.file import storage_errors
from ..version import __version__
from .arguments import STORED, check_values, given_values, make_parser, merge_resumed, with_defaults
from .checkpoint import (
    JobState,
    clear_job,
    holds_job,
    load_checkpoint,
    read_arguments,
    save_arguments,
)
from .progress import Progress
from .report import print_report
from .stages import Conversion
from .write import Output, write_model

logger = logging.getLogger(__name__)

parser = make_parser()

Prepared = tuple[dict[str, Any], JobState | None, bool, str | None]

_INTERRUPTED = 130


def prepare(args: argparse.Namespace) -> Prepared:
    """Check the arguments and the source, and set up or reopen the work directory.

    Returns:
        (in_args, job_state, ok, error): complete arguments, state to go on from, True, None; or
        with False the reason, and nothing was changed on disk.
    """
    try:
        given = given_values(args)
        in_args, job = _resume(given) if given.get("resume") else _begin(given)
    except (Exl3Error, OSError, ImportError) as error:
        if getattr(args, "verbose", False):
            logger.exception("cannot start")
        return {}, None, False, one_line(error)
    return in_args, job, True, None


def _begin(given: dict[str, Any]) -> tuple[dict[str, Any], JobState]:
    in_args = with_defaults(given)
    work = Path(in_args["work_dir"]).expanduser()
    _check_places(in_args)
    if holds_job(work) and not in_args["restart"]:
        raise ConfigError(
            f"{work}: holds a job already; -r resumes it, --restart starts anew and loses it, or"
            " give another -w"
        )
    config = open_model(in_args)
    _check_ready(config)
    in_args["source_fingerprint"] = config.source.fingerprint()
    in_args["exl3_version"] = __version__
    with storage_errors(work, "create"):
        work.mkdir(parents=True, exist_ok=True)
    clear_job(work)
    names = (*STORED, "source_fingerprint", "exl3_version")
    save_arguments(work, {name: in_args[name] for name in names})
    return in_args, JobState()


def _resume(given: dict[str, Any]) -> tuple[dict[str, Any], JobState]:
    work = Path(given["work_dir"]).expanduser()
    stored = read_arguments(work)
    in_args = merge_resumed(given, stored)
    _check_places(in_args)
    check_values({name: value for name, value in in_args.items() if value is not None})
    config = open_model(in_args)
    current = {
        "source_fingerprint": config.source.fingerprint(),
        "exl3_version": __version__,
    }
    for name, now in current.items():
        before = stored.get(name)
        if now != before and not in_args["override_anyway"]:
            what = f"source {in_args['in_dir']}" if name == "source_fingerprint" else "exl3"
            raise ConfigError(
                f"{what} changed since this job was started: {name} was {before}, now it is"
                f" {now}; start anew with --restart, or add --override_anyway"
            )
        in_args[name] = now
    job = load_checkpoint(work) or JobState()
    save_arguments(work, {name: in_args[name] for name in stored})
    return in_args, job


def _check_places(in_args: dict[str, Any]) -> None:
    """The three directories are different ones, and the output's has no tensors of others."""
    places = {
        name: Path(in_args[name]).expanduser().resolve()
        for name in ("in_dir", "out_dir", "work_dir")
    }
    for first, second in (("in_dir", "out_dir"), ("in_dir", "work_dir"), ("out_dir", "work_dir")):
        if places[first] == places[second]:
            raise ConfigError(
                f"--{first} and --{second} are both {places[first]}: they must differ"
            )
    out = places["out_dir"]
    if out.is_file():
        raise ConfigError(f"--out_dir {out}: is a file, expected a directory")
    if out.is_dir() and any(out.iterdir()):
        logger.warning("%s is not empty: files of the same names will be replaced", out)
        strays = [f.name for f in out.glob("*.safetensors") if not f.name.startswith("model")]
        if strays:
            raise ConfigError(
                f"{out}: holds {strays[0]}, which would become part of the model; remove it or"
                " give another -o"
            )
    _check_writable("out_dir", out)
    _check_writable("work_dir", places["work_dir"])


def _check_writable(name: str, folder: Path) -> None:
    """Raises StorageError if no file can be made in a folder, or where it is to be made."""
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            error.errno or 0,
            f"--{name} {folder}: cannot write in {there}: {reason}; give another folder",
        ) from error


def open_model(in_args: dict[str, Any]) -> Config:
    """The source model, checked as far as headers tell.

    Raises:
        ConfigError, FormatError, UnsupportedError: not a model that can be converted.
    """
    config = Config.from_directory(in_args["in_dir"])
    model = Model.from_config(config)
    if not model.caps.get("can_quantize", True):
        raise ConfigError(f"{in_args['in_dir']}: {config.architecture} cannot be quantised")
    if any(key.endswith(".trellis") for key in config.stc.keys()):  # noqa: SIM118
        raise ConfigError(
            f"{in_args['in_dir']}: is an EXL3 model already; convert from the original checkpoint"
        )
    return config


def _check_ready(config: Config) -> None:
    """What would end the job later: settings, compiled library, tokenizer, tensors left out.

    Raises:
        ConfigError, FormatError, SettingsError, StorageError, ImportError
    """
    ops()
    Tokenizer.from_config(config)
    for top in Model.from_config(config).modules:
        for module in top:
            if not module.children() and not module.stored_bytes(config.stc):
                raise FormatError(
                    f"{config.directory}: tensor {module.key}.weight is missing; fetch the model"
                    " again"
                )


def main(in_args: dict[str, Any], job_state: JobState, console: Console | None = None) -> bool:
    """Run a prepared job to its end, or to `--max_module`.

    Returns:
        True if the model was written.
    Raises:
        Exl3Error: the job cannot go on; what is finished stays in the work directory.
    """
    console = console or Console(stderr=True)
    started = time.monotonic()
    config = open_model(in_args)
    with Progress(console) as progress:
        finished = Conversion(in_args, job_state, config).run(progress)
    if not finished:
        console.print(f"stopped after module {in_args['max_module']}; -r goes on from here")
        return False
    folder = write_model(Output.of(in_args, job_state, config))
    print_report(folder, console, seconds=time.monotonic() - started)
    return True


def run(argv: Sequence[str] | None = None) -> int:
    """`convert.py`: parse, prepare, convert. Errors are one line; returns the exit status."""
    console = Console(stderr=True, soft_wrap=True)
    verbose = False
    work = ""
    try:
        args = parser.parse_args(argv)
        verbose = bool(args.verbose)
        _set_up_logging(console, verbose)
        in_args, job_state, ok, error = prepare(args)
        if not ok or job_state is None:
            raise ConfigError(error or "cannot start")
        work = in_args["work_dir"]
        main(in_args, job_state, console)
    except KeyboardInterrupt:
        hint = (
            f"go on with: convert.py -w {shlex.quote(work)} -r" if work else "nothing was started"
        )
        console.print(f"interrupted; {hint}", highlight=False, markup=False)
        return _INTERRUPTED
    except torch.OutOfMemoryError as error:
        console.print(
            f"error: the GPU's memory is full ({one_line(error)}); free some, or go on on the CPU"
            f" with: convert.py -w {shlex.quote(work)} -r -d cpu",
            style="red",
            highlight=False,
            markup=False,
        )
        return 1
    except (Exl3Error, OSError, ImportError, MemoryError, ArithmeticError) as error:
        if verbose:
            console.print_exception()
        console.print(f"error: {one_line(error)}", style="red", highlight=False, markup=False)
        return 1
    return 0


def one_line(error: BaseException) -> str:
    """The message of an error as one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _set_up_logging(console: Console, verbose: bool) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False)
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
