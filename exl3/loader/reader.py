"""Reading ranges of files into tensors, on one thread or several, with figures."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import FormatError
from ..util.file import storage_errors

# One read per thread: large enough for a disk to stream, small enough to spread a tensor.
_CHUNK_BYTES = 8 << 20
_THREADS = 4


@dataclass(slots=True)
class LoadMetrics:
    """What was read so far and how fast. `seconds` adds up over threads that call `get`."""

    n_bytes: int = 0
    tensors: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, n_bytes: int, seconds: float) -> None:
        with self._lock:
            self.n_bytes += n_bytes
            self.tensors += 1
            self.seconds += seconds

    def text(self) -> str:
        rate = self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"read {self.tensors} tensors, {self.n_bytes / 2**20:.1f} MiB "
            f"in {self.seconds:.2f} s: {rate:.2f} GB/s"
        )

    def print(self) -> None:
        sys.stdout.write(f" -- {self.text()}\n")


class RangeReader:
    """Reads byte ranges. A file is open only during a call, so 300 shards need few handles."""

    def __init__(self, threaded: bool) -> None:
        self.metrics = LoadMetrics()
        self._threaded = threaded
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, path: Path, *, offset: int, target: Tensor, identity: tuple[int, int]) -> None:
        """Fill the contiguous tensor `target` from `offset` on.

        `identity` is (size, mtime_ns) from when the file was indexed.

        Raises:
            FormatError: the file was replaced, or ends early.
        """
        start = time.perf_counter()
        n_bytes = target.numel() * target.itemsize
        with _opened(path, identity) as handle:
            if n_bytes:
                self._fill(handle, offset, target)
        self.metrics.add(n_bytes, time.perf_counter() - start)

    def _fill(self, handle: int, offset: int, target: Tensor) -> None:
        view = target.view(-1).view(torch.uint8).numpy().data
        ranges = range(0, len(view), _CHUNK_BYTES)
        if not self._threaded or len(ranges) == 1:
            _pread(handle, view, offset)
            return
        pool = self._executor()
        jobs = [pool.submit(_pread, handle, view[i : i + _CHUNK_BYTES], offset + i) for i in ranges]
        errors = [job.exception() for job in jobs]  # all must end before the file is closed
        for error in errors:
            if error is not None:
                raise error

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="exl3-read")
            return self._pool

    def close(self) -> None:
        """End the threads; a later read starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


@contextmanager
def _opened(path: Path, identity: tuple[int, int]) -> Iterator[int]:
    """A file for reading, checked to be the one that was indexed."""
    with storage_errors(path, "read"):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(handle)
            if (status.st_size, status.st_mtime_ns) != identity:
                raise FormatError(f"{path}: changed since it was indexed; open it again")
            yield handle
        except EOFError as error:
            raise FormatError(f"{path}: {error}; the file was cut short") from error
        finally:
            os.close(handle)


def read_range(path: Path, *, offset: int, target: Tensor, identity: tuple[int, int]) -> None:
    """`RangeReader.read` of a uint8 tensor (n,) on the calling thread."""
    with _opened(path, identity) as handle:
        _pread(handle, target.numpy().data, offset)


def _pread(handle: int, view: memoryview, offset: int) -> None:
    """Fill `view`; the kernel may return less than asked (2 GiB at most on Linux)."""
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], offset + done)
        if count == 0:
            raise EOFError(f"no data at byte {offset + done}, {len(view) - done} more expected")
        done += count
