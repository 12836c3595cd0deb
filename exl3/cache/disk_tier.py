"""Third tier of the cache: pages in files, read and written by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
from torch import Tensor

from ..errors import Exl3Error
from .host_tier import Ids, PageRecord
from .page_files import PageFiles
from .page_io import Fence, PageIO

logger = logging.getLogger(__name__)

# Pages on their way, and their bytes; writes may take half of them.
_MAX_BUFFERS, _MIN_BUFFERS, _MAX_BYTES = 16, 4, 256 << 20
_ABANDONED_S = 2.0  # a page that was read and not fetched for so long makes room for another
_RETRY_S = 60.0  # after a write that failed, none is tried for so long


@dataclass(slots=True)
class _Buffer:
    data: Tensor
    fence: Fence | None = None  # copies from or to it that the device may still be doing

    def bytes(self) -> memoryview:
        """The contents, once copies are done."""
        if self.fence is not None:
            self.fence.wait()
            self.fence = None
        return self.data.numpy().data


class Recall(Enum):
    """What came of asking for a page."""

    MISS = 0
    HIT = 1
    WAIT = 2  # it is on its way: ask again


@dataclass(slots=True)
class _Read:
    key: bytes
    buffer: _Buffer
    done_at: float | None = None
    record: PageRecord | None = None


@dataclass(slots=True)
class _Queue:
    """What the thread works on. It must not refer to the tier, which ends it when it goes."""

    files: PageFiles
    changed: threading.Condition = field(default_factory=threading.Condition)
    reads: deque[_Read] = field(default_factory=deque)
    writes: deque[tuple[PageRecord, _Buffer]] = field(default_factory=deque)
    free: list[_Buffer] = field(default_factory=list)
    writing: dict[bytes, _Buffer] = field(default_factory=dict)
    stop: bool = False
    no_writes_before: float = 0.0
    metrics: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("written_pages", "read_pages", "missed_pages", "removed_pages", "failed_writes"), 0
        )
    )

    def run(self) -> None:
        while True:
            with self.changed:
                while not (self.reads or self.writes or self.stop):
                    self.changed.wait()
                if self.reads:
                    work = partial(self._read, self.reads.popleft())
                elif self.writes:
                    work = partial(self._write, *self.writes.popleft())
                else:
                    return
            work()

    def _read(self, read: _Read) -> None:
        try:
            record = self.files.read(read.key, read.buffer.bytes())
        except Exception:
            logger.exception("page cache: reading failed")
            record = None
        with self.changed:
            self.metrics["read_pages" if record else "missed_pages"] += 1
            read.record, read.done_at = record, time.monotonic()
            self.changed.notify_all()

    def _write(self, record: PageRecord, buffer: _Buffer) -> None:
        removed, failed = 0, False
        try:
            removed = self.files.write(record, buffer.bytes())
        except Exception as error:
            failed = True
            logger.warning(
                "page cache: cannot write to %s, next try in %d s: %s",
                self.files.folder,
                int(_RETRY_S),
                error,
            )
        with self.changed:
            self.metrics["failed_writes" if failed else "written_pages"] += 1
            self.metrics["removed_pages"] += removed
            if failed:
                self.no_writes_before = time.monotonic() + _RETRY_S
            del self.writing[record.key]
            self.free.append(buffer)
            self.changed.notify_all()

    def end(self) -> None:
        """Let the thread end once it has written what it was given."""
        with self.changed:
            self.stop = True
            self.changed.notify_all()


class DiskTier:
    """Pages of one model in files. All calls return at once, except `wait` and `close`.

    `metrics` counts pages written, read, found missing or damaged, removed to make room, and
    writes that failed.
    """

    def __init__(self, io: PageIO, files: PageFiles) -> None:
        self._io = io
        self._queue = _Queue(files)
        self._reads: dict[bytes, _Read] = {}
        self._max_buffers = max(_MIN_BUFFERS, min(_MAX_BUFFERS, _MAX_BYTES // io.size))
        self._allocated = 0
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _Queue.end, self._queue)
        self._finalizer.atexit = False

    @property
    def metrics(self) -> dict[str, int]:
        """Counts since the start."""
        return dict(self._queue.metrics)

    @property
    def files(self) -> PageFiles:
        return self._queue.files

    def __len__(self) -> int:
        """Pages that can be read."""
        return len(self.files)

    def __contains__(self, key: bytes) -> bool:
        return key in self.files

    def knows(self, key: bytes) -> bool:
        """Whether the page is stored, or about to be."""
        return key in self._queue.writing or key in self.files

    # Writing

    def offer(self, record: PageRecord, page: int) -> bool:
        """Have a page of the cache written; False if too many are on their way."""
        with self._queue.changed:
            if self._queue.stop or time.monotonic() < self._queue.no_writes_before:
                return False
            if len(self._queue.writing) >= self._max_buffers // 2:
                return False
        buffer = self._buffer()
        if buffer is None:
            return False
        self._io.save(page, buffer.data)
        buffer.fence = self._io.fence()
        with self._queue.changed:
            self._queue.writing[record.key] = buffer
            self._queue.writes.append((record, buffer))
            self._start()
        return True

    # Reading

    def request(self, key: bytes) -> bool:
        """Have a page read; False if there is no buffer for it now."""
        if key in self._reads:
            return True
        buffer = self._buffer()
        if buffer is None:
            return False
        read = self._reads[key] = _Read(key, buffer)
        with self._queue.changed:
            self._queue.reads.append(read)
            self._start()
        return True

    def fetch(self, key: bytes, ids: Ids, page: int) -> Recall:
        """Copy a page to a page of the cache, once it has been read.

        Args:
            ids: what the page must hold; anything else is a miss.
        """
        read = self._reads.get(key)
        if read is None:
            if key not in self.files or self._queue.stop:
                return Recall.MISS
            self.request(key)
            return Recall.WAIT
        if read.done_at is None:
            return Recall.WAIT
        del self._reads[key]
        hit = read.record is not None and np.array_equal(read.record.ids, ids)
        if hit:
            self._io.load(read.buffer.data, page)
            read.buffer.fence = self._io.fence()
        with self._queue.changed:
            self._queue.free.append(read.buffer)
        return Recall.HIT if hit else Recall.MISS

    def _buffer(self) -> _Buffer | None:
        with self._queue.changed:
            if self._queue.free:
                return self._queue.free.pop()
        if self._allocated < self._max_buffers:
            try:
                found = self._io.buffers(self._max_buffers - self._allocated)
            except (RuntimeError, MemoryError) as error:  # no reason to end anybody's request
                logger.warning("page cache: no memory for buffers: %s", error)
                self._max_buffers = self._allocated
                return None
            new = [_Buffer(data) for data in found]
            self._allocated += len(new)
            with self._queue.changed:
                self._queue.free += new[1:]
            return new[0]
        limit = time.monotonic() - _ABANDONED_S
        for key, read in self._reads.items():
            if read.done_at is not None and read.done_at < limit:
                del self._reads[key]
                return read.buffer
        return None

    # The thread

    def _start(self) -> None:
        self._queue.changed.notify_all()
        if self._thread is None:
            name = "exl3 page files"
            self._thread = threading.Thread(target=self._queue.run, name=name, daemon=True)
            self._thread.start()

    def is_busy(self) -> bool:
        """Whether a page is on its way to or from a file."""
        with self._queue.changed:
            return bool(self._queue.writing) or any(r.done_at is None for r in self._reads.values())

    def wait(self, timeout_s: float) -> None:
        """Until something was read or written, or the time is over."""
        with self._queue.changed:
            if self._queue.writing or any(r.done_at is None for r in self._reads.values()):
                self._queue.changed.wait(timeout_s)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the thread after what it still has to write; wait for that up to a time."""
        self._queue.end()
        if self._thread is not None and timeout_s > 0:
            self._thread.join(timeout_s)

    def check_integrity(self) -> None:
        """Raises Exl3Error if buffers or files do not add up."""
        with self._queue.changed:
            count = len(self._queue.free) + len(self._queue.writing) + len(self._reads)
            if count != self._allocated:
                raise Exl3Error(f"disk tier: {count} buffers, {self._allocated} were allocated")
        self.files.check_integrity()
