"""The work directory: what a job was asked to do, and how far it has come.

    args.json              arguments of the job and fingerprint of its source
    sensitivity/           what the pass before the conversion found out, one file per block
    qtensors/              finished modules, one file each
    ckpt/                  job.json, state.safetensors, original_input_ids.safetensors
    ckpt_old/              the checkpoint before
    ckpt_new/              one being written

A checkpoint is written whole into `ckpt_new`, then two renames make it `ckpt`. A crash at any
point leaves `ckpt`, or between the renames `ckpt_old`, complete; work after it is done again and
gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError, FormatError
from ..loader import load_tensors, save_tensors
from ..util.file import fsync_directory, read_json, storage_errors, write_json

ARGS_NAME = "args.json"
QTENSORS = "qtensors"
SENSITIVITY = "sensitivity"
_CURRENT, _OLD, _NEW = "ckpt", "ckpt_old", "ckpt_new"
_JOB, _STATE, _IDS = "job.json", "state.safetensors", "original_input_ids.safetensors"


@dataclass(slots=True)
class JobState:
    """How far a conversion has come."""

    next_module_idx: int = 0
    q_strategy: dict[str, int] = field(default_factory=dict)
    """Bits per Hessian group."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    """Calibration rows left out: {"row": .., "module": ..}."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """One entry per finished module that had layers to quantise."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """Where the calibration text came from."""
    state: Tensor | None = None
    """float32 (rows, cols, hidden): what the next module reads; None before the first."""
    input_ids: Tensor | None = None
    """int64 (rows, cols)."""


_TENSORS = ("state", "input_ids")


def qtensors_file(work: Path, module_key: str) -> Path:
    """Where a finished module is kept."""
    return work / QTENSORS / f"{module_key}.safetensors"


def holds_job(work: Path) -> bool:
    """True if a job was started in this directory."""
    return any((work / name).exists() for name in (ARGS_NAME, _CURRENT, _OLD, _NEW, QTENSORS))


def clear_job(work: Path) -> None:
    """Remove a job; other files of the directory stay."""
    with storage_errors(work, "clear"):
        (work / ARGS_NAME).unlink(missing_ok=True)  # first: without it nothing can be resumed
        for name in (_NEW, _CURRENT, _OLD, QTENSORS, SENSITIVITY, "images", "debug"):
            _remove(work / name)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def save_arguments(work: Path, arguments: dict[str, Any]) -> None:
    """Keep what the job was asked to do."""
    write_json(work / ARGS_NAME, arguments)


def read_arguments(work: Path) -> dict[str, Any]:
    """The stored arguments.

    Raises:
        ConfigError: the directory holds no job.
    """
    if not (work / ARGS_NAME).is_file():
        raise ConfigError(
            f"{work}: no {ARGS_NAME}, so there is no conversion to resume; start one with -i -o -w"
            " -b"
        )
    return read_json(work / ARGS_NAME)


def save_checkpoint(work: Path, job: JobState) -> None:
    """Make `job` the state to resume from.

    Raises:
        StorageError: the disk is full or not writable; the checkpoint before stays.
    """
    new, current, old = work / _NEW, work / _CURRENT, work / _OLD
    with storage_errors(new):
        _remove(new)
        new.mkdir(parents=True)
    if job.state is not None:
        save_tensors(new / _STATE, {"state": job.state.cpu()})
    if job.input_ids is not None:
        save_tensors(new / _IDS, {"input_ids": job.input_ids})
    values = {f.name: getattr(job, f.name) for f in fields(job) if f.name not in _TENSORS}
    write_json(new / _JOB, {**values, "has_state": job.state is not None})
    with storage_errors(current, "replace"):
        _remove(old)
        if current.exists():
            os.replace(current, old)
            fsync_directory(work)
        os.replace(new, current)
        fsync_directory(work)


def load_checkpoint(work: Path) -> JobState | None:
    """The last complete checkpoint, or None if there is none yet.

    Raises:
        FormatError: a damaged checkpoint.
    """
    for folder in (work / _CURRENT, work / _OLD):
        if folder.is_dir():
            return _read(folder)
    return None


def _read(folder: Path) -> JobState:
    values = read_json(folder / _JOB)
    has_state = values.pop("has_state", False)
    expected = {f.name for f in fields(JobState)} - set(_TENSORS)
    if set(values) != expected:
        raise FormatError(
            f"{folder / _JOB}: expected the keys {sorted(expected)}, got {sorted(values)}; it was"
            " written by another version: start anew with --restart"
        )
    job = JobState(**values)
    job.input_ids = load_tensors(folder / _IDS)["input_ids"]
    if has_state:
        job.state = load_tensors(folder / _STATE)["state"]
    return job
