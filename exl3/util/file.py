"""Files: atomic writes, JSON read with clear errors, and results cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import FormatError, StorageError

R = TypeVar("R")

# JSON files beside a model are small; more than this is damage, or not a file of ours.
_MAX_JSON_BYTES = 512 << 20


@contextmanager
def storage_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn an `OSError` (full disk, no permission) into a `StorageError` that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        kept = "" if action in ("read", "list", "lock") else "; nothing was left half-written"
        raise StorageError(error.errno or 0, f"{path}: cannot {action}: {reason}{kept}") from error


def fsync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable; systems that cannot are let off."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that appears under `path` whole, or not at all.

    It is written beside `path` under a temporary name, flushed to disk, then renamed. If the
    body raises, the temporary file is removed and an older file under `path` stays as it was.

    Raises:
        StorageError: the disk is full or the folder cannot be written; names `path`.
    """
    target = Path(path)
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(_file_mode(target))
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(target.parent)


def _file_mode(target: Path) -> int:
    """The mode of the file to be replaced, else what a plain `open` would give."""
    with suppress(OSError):
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file atomically; text is stored as UTF-8."""
    with atomic_file(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json(path: str | os.PathLike[str], value: object, *, indent: int | None = 2) -> None:
    """Write a JSON file atomically, keys in their given order."""
    atomic_write(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        FormatError: not JSON, not an object, or of a size that no such file has.
        StorageError: missing or unreadable.
    """
    file = Path(path)
    with storage_errors(file, "read"):
        size = file.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise FormatError(f"{file}: {size} bytes, expected at most {_MAX_JSON_BYTES}")
        data = file.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not valid JSON ({error}); fetch or write it again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def file_lock(path: str | os.PathLike[str], timeout_s: float) -> Iterator[bool]:
    """Hold a lock that at most one process has; it goes with the process. The file `path` stays.

    Yields:
        Whether it was had in time. True also where the system has no such locks.
    Raises:
        StorageError: the file cannot be made.
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    target = Path(path)
    with storage_errors(target, "lock"):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield _locked(handle, fcntl, timeout_s)
    finally:
        os.close(handle)


def _locked(handle: int, fcntl: Any, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


def _cache_file(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    base = Path(main).resolve().parent if main else Path.cwd()
    key = json.dumps({"args": args, "kwargs": kwargs}, sort_keys=True)
    digest = hashlib.sha256(key.encode("utf-8")).hexdigest()
    return base / "__disk_lru_cache__" / name / f"{digest}.json"


def disk_lru_cache(name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Keep a function's results in `__disk_lru_cache__` beside the main script.

    Results are keyed by the arguments as JSON, so arguments and results must be JSON values.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            path = _cache_file(name, args, kwargs)
            with suppress(OSError, ValueError, KeyError, TypeError):
                return json.loads(path.read_bytes())["result"]
            result = function(*args, **kwargs)
            atomic_write(path, json.dumps({"args": args, "kwargs": kwargs, "result": result}))
            return result

        return wrapper

    return decorate


def disk_lru_cache_clear(name: str, *args: Any, **kwargs: Any) -> None:
    """Forget the stored result of these arguments."""
    _cache_file(name, args, kwargs).unlink(missing_ok=True)
