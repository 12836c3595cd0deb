"""Kernel choices that are measured on the machine and kept in the user's cache folder.

A `Tunable` is one problem (an op, shapes, a range of row counts) with several ways to run it, the
built-in one first. What was measured is kept by machine (card, driver, toolkit, build of exl3): a
later process takes the same ways without measuring, and gives the same bits.

    python -m exl3.tuning                  shows what is kept
    python -m exl3.tuning --measure MODEL  loads a model on CUDA and measures all that is missing
    python -m exl3.tuning --clear          forgets everything
"""

from __future__ import annotations

import logging
import re
import sys
import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError, Exl3Error, FormatError, StorageError
from .settings import settings
from .util.file import file_lock, read_json, write_json

logger = logging.getLogger(__name__)

LOAD_SECONDS = 2.0
"""Most time that loading a model spends on measuring; the rest is measured at the next load."""
_WAIT_SECONDS = 5.0  # for another process that measures
_LEAST_GAIN = 0.03  # of the built-in way's time: less is noise
_STEADY = 1.25  # two times of one way that differ by more were disturbed
_FORMAT = 1
_MOST_MACHINES = 4  # kept in a file: drivers and builds come and go

Values = Mapping[str, str | int]
"""One way to run a problem, by name; empty: the built-in way."""


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a measurement holds for."""

    device: str
    capability: str
    driver: str
    cuda: str
    exl3: str
    """Version and digest of the CUDA library."""

    def file(self) -> Path:
        """Where choices for this card are kept."""
        name = re.sub(r"[^a-z0-9]+", "_", self.device.lower()).strip("_")
        return tuning_folder() / f"{name or 'device'}.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """The way that was fastest, and seconds of it and of the built-in way."""

    values: Values
    seconds: float
    built_in_seconds: float


class Tunable(ABC):
    """A problem with several ways to run it."""

    name: str
    """Op, shapes and rows: unique on a machine."""

    @abstractmethod
    def ways(self) -> Sequence[Values]:
        """What may be chosen; the first is the empty, built-in one."""

    @abstractmethod
    def seconds(self, values: Values) -> float:
        """Run that way and say how long one call took; infinity if it must not be taken."""

    @abstractmethod
    def take(self, values: Values) -> None:
        """Run that way from now on."""


def tuning_folder() -> Path:
    """Folder of the files, one for each kind of card."""
    return settings().cache_dir / "tuning"


def measure(
    tunables: Sequence[Tunable],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Measured]:
    """Time the ways of each problem; one is taken if it beats the built-in one by 3 % or more. Left
    out is what the time does not suffice for, and what did not run alone on the device."""
    end, found = clock() + budget_s, {}
    for tunable in tunables:
        if clock() >= end:
            break
        ways = list(tunable.ways())
        times = _steady_times(tunable, ways)
        if times is None:
            logger.info("%s: the device is busy, measured at another time", tunable.name)
            continue
        best = min(range(len(ways)), key=times.__getitem__)
        if times[best] > (1 - _LEAST_GAIN) * times[0]:
            best = 0
        found[tunable.name] = Measured(ways[best], times[best], times[0])
    return found


def _steady_times(tunable: Tunable, ways: Sequence[Values]) -> list[float] | None:
    """Seconds of each way; None if other work disturbs. The built-in way is timed before and after
    the others; a card that was idle starts slowly, so a difference is given a second chance."""
    for _ in range(2):
        times = [tunable.seconds(way) for way in ways]
        again = tunable.seconds(ways[0])
        if max(times[0], again) <= _STEADY * min(times[0], again):
            return [min(times[0], again), *times[1:]]
    return None


_unsaved: dict[Machine, dict[str, Measured]] = {}  # where the folder cannot be written


class ChoiceFile:
    """What is kept for one machine. Files are replaced whole; damage is reported and measured
    anew."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.path = machine, machine.file()
        self._reported = False

    def read(self) -> dict[str, Measured]:
        """By name of the problem; empty if there is nothing, or nothing that can be read."""
        own = [choices for machine, choices in self._sections() if machine == self.machine]
        return {**(own[0] if own else {}), **_unsaved.get(self.machine, {})}

    def add(self, fresh: Mapping[str, Measured]) -> None:
        """Keep these too; in memory alone, with a warning, if the folder cannot be written."""
        others = [section for section in self._sections() if section[0] != self.machine]
        newest = (self.machine, {**self.read(), **fresh})
        sections = [newest, *others][:_MOST_MACHINES]
        try:
            write_json(self.path, {"format": _FORMAT, "machines": list(map(_encode, sections))})
            _unsaved.pop(self.machine, None)
        except StorageError as error:
            if self.machine not in _unsaved:
                logger.warning("measured kernel choices are not kept: %s", error)
            _unsaved[self.machine] = newest[1]

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Whether no other process measures now; waits for one that does. Without a folder to lock
        in there is nobody to wait for."""
        with ExitStack() as stack:
            try:
                lock = file_lock(self.path.with_suffix(".lock"), _WAIT_SECONDS)
                held = stack.enter_context(lock)
            except StorageError:
                held = True
            yield held

    def _sections(self) -> list[tuple[Machine, dict[str, Measured]]]:
        if not self.path.is_file():
            return []
        try:
            return read_sections(self.path)
        except (FormatError, StorageError) as error:
            if not self._reported:
                logger.warning("%s; kernel choices are measured again", error)
            self._reported = True
            return []


def read_sections(path: Path) -> list[tuple[Machine, dict[str, Measured]]]:
    """All machines of a file with their choices.

    Raises:
        FormatError: not a file of this kind.
        StorageError: unreadable.
    """
    content = read_json(path)
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return [_decode(section) for section in content["machines"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: not what exl3.tuning writes ({error!r})") from error


def _encode(section: tuple[Machine, Mapping[str, Measured]]) -> dict[str, Any]:
    machine, choices = section
    return {
        "machine": asdict(machine),
        "choices": {
            name: {
                "values": dict(found.values),
                "microseconds": round(found.seconds * 1e6, 2),
                "built_in_microseconds": round(found.built_in_seconds * 1e6, 2),
            }
            for name, found in sorted(choices.items())
        },
    }


def _decode(section: Any) -> tuple[Machine, dict[str, Measured]]:
    machine = Machine(**{field.name: str(section["machine"][field.name]) for field in _FIELDS})
    choices = {}
    for name, entry in section["choices"].items():
        values = entry["values"]
        if not all(isinstance(value, str | int) for value in values.values()):
            raise ValueError(f"values {values!r} of {name}")
        seconds = (float(entry[key]) * 1e-6 for key in _MICROSECONDS)
        choices[name] = Measured(dict(values), *seconds)
    return machine, choices


_FIELDS = fields(Machine)
_MICROSECONDS = ("microseconds", "built_in_microseconds")


def tune(machine: Machine, tunables: Sequence[Tunable], budget_s: float = LOAD_SECONDS) -> int:
    """Take for each problem the way that is known to be fastest, measuring what is not known.

    Nothing changes after this call, so a process runs every problem one way. A choice that later
    proves not to fit the problem, because a file was edited, is dropped and measured again.

    Returns:
        How many problems are left to the built-in rules for want of time.
    """
    file, tunables = ChoiceFile(machine), list({t.name: t for t in tunables}.values())
    known = _fitting(file.read(), tunables)
    if any(tunable.name not in known for tunable in tunables):
        with file.lock() as alone:
            known = _fitting(file.read(), tunables)  # what another process found meanwhile
            missing = [tunable for tunable in tunables if tunable.name not in known]
            if alone and missing:
                start = time.monotonic()
                fresh = measure(missing, budget_s)
                file.add(fresh)
                known.update(fresh)
                seconds = time.monotonic() - start
                text = "measured %d of %d kernel choices in %.1f s"
                logger.info(text, len(fresh), len(missing), seconds)
    for tunable in tunables:
        if tunable.name in known:
            tunable.take(known[tunable.name].values)
    return sum(tunable.name not in known for tunable in tunables)


def _fitting(known: Mapping[str, Measured], tunables: Sequence[Tunable]) -> dict[str, Measured]:
    """What is known of these problems and can be taken."""
    found = {}
    for tunable in tunables:
        entry = known.get(tunable.name)
        if entry is not None and entry.values in tunable.ways():
            found[tunable.name] = entry
    return found


def describe(path: Path) -> str:
    """The contents of a file as a table."""
    lines = []
    for machine, choices in read_sections(path):
        lines.append(", ".join(f"{key} {value}" for key, value in asdict(machine).items()))
        width = max(map(len, choices), default=0)
        for name, found in choices.items():
            values = " ".join(map(str, found.values.values())) or "built in"
            gain = found.built_in_seconds / found.seconds if found.seconds else 1.0
            lines.append(
                f"  {name:{width}}  {values:12}  {found.seconds * 1e6:9.1f} us  {gain:5.2f} x"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = ArgumentParser(prog="python -m exl3.tuning", description="Measured kernel choices")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--clear", action="store_true", help="forget everything")
    group.add_argument("--measure", metavar="MODEL", help="model directory to measure for")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.measure:
            _measure_model(chosen.measure)
        sys.stdout.write(_clear() if chosen.clear else _show())
    except (Exl3Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _clear() -> str:
    files = _files()
    for path in files:
        path.unlink()
    return f"{len(files)} files removed from {tuning_folder()}\n"


def _show() -> str:
    files = _files()
    if not files:
        return f"nothing is kept in {tuning_folder()}\n"
    return "".join(f"{path}\n{describe(path)}\n" for path in files)


def _files() -> list[Path]:
    return sorted(tuning_folder().glob("*.json"))


def _measure_model(directory: str) -> None:
    import exl3_ext

    from .model import Config, Model
    from .model.tune import tune_model

    if not exl3_ext.has_cuda():
        raise ConfigError("--measure needs a CUDA device and the CUDA library of exl3")
    model = Model.from_config(Config.from_directory(directory))
    model.load()
    device = model.output_device
    if device is None or device.type != "cuda":
        raise ConfigError("--measure: EXL3_DEFAULT_DEVICE=cpu keeps the model from CUDA; unset it")
    left = tune_model(model, budget_s=600.0)
    if left:
        sys.stderr.write(f"{left} choices are not measured: other work disturbs, call this again\n")


if __name__ == "__main__":
    raise SystemExit(main())
