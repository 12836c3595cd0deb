"""Pages in files, so that they survive a restart: whole, checked, and within a size."""

from __future__ import annotations

import logging
import os
import re
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ..constants import PAGE_SIZE
from ..errors import ConfigError, Exl3Error
from .host_tier import Ids, PageRecord

logger = logging.getLogger(__name__)

# magic, version, bytes of the page, digest of model and format, key, length of the key of the page
# before it, that key; then come the ids as int64, the page, and a checksum over everything.
_HEADER = struct.Struct("<8sIQ16s16sB16s")
_MAGIC, _VERSION = b"EXL3PAGE", 1
_SUM_BYTES = 16
_FOLDER = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"([0-9a-f]{32})-((?:[0-9a-f]{2}){1,16})\.page")
_STAMP_S = 60  # seconds; use is noted no finer than this
_STALE_S = 3600  # seconds after which an unfinished file is rubbish


@dataclass(slots=True)
class _Entry:
    path: Path
    size: int
    previous: bytes
    stamp: float  # of the last use


class PageFiles:
    """One file per page, in a folder of its own for each model and cache format.

    A file that is damaged, or is not what its name says, is removed and counts as missing. What was
    not used for longest goes first, of equals the page furthest from the start of its text; a page
    never goes before those that follow it. Files of other processes count too. A page can be
    read back into text: the folders are for their owner only.

    Args:
        directory: made if missing. Only files that we have written are ever removed from it.
        max_bytes: for all files under `directory`.
        identity: names the model and what a page of its cache looks like.
        page_bytes: size of one page.
    Raises:
        ConfigError: less than two pages, or a folder that cannot be made.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, identity: str, page_bytes: int
    ) -> None:
        self.directory, self.max_bytes, self.page_bytes = Path(directory), max_bytes, page_bytes
        self.file_bytes = _HEADER.size + 8 * PAGE_SIZE + page_bytes + _SUM_BYTES
        if max_bytes < 2 * self.file_bytes:
            raise ConfigError(
                f"disk_cache_size is {max_bytes} bytes, expected at least two pages: "
                f"{2 * self.file_bytes}"
            )
        self._identity = blake2b(identity.encode(), digest_size=16).digest()
        self.folder = self.directory / self._identity.hex()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"disk_cache_dir {self.directory}: {error.strerror}") from error
        self._entries: dict[tuple[str, bytes], _Entry] = {}  # by folder and key
        self.total_bytes = 0
        self._lock = threading.RLock()  # the writer and readers of counts are different threads
        self.scan()
        self._trim(max_bytes)

    def __len__(self) -> int:
        """Pages of this model and format."""
        return sum(folder == self.folder.name for folder, _ in list(self._entries))

    def __contains__(self, key: bytes) -> bool:
        return (self.folder.name, key) in self._entries

    # The folder

    def scan(self) -> None:
        """Look at what is there; removes what writers that died have left."""
        entries: dict[tuple[str, bytes], _Entry] = {}
        for folder in self._list(self.directory):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for file in self._list(Path(folder.path)):
                self._note(folder.name, file, entries)
        with self._lock:
            self._entries = entries
            self.total_bytes = sum(entry.size for entry in entries.values())

    @staticmethod
    def _list(folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return list(found)
        except OSError:
            return []

    @staticmethod
    def _note(
        folder: str, file: os.DirEntry[str], entries: dict[tuple[str, bytes], _Entry]
    ) -> None:
        try:
            status = file.stat(follow_symlinks=False)
        except OSError:
            return
        name = _NAME.fullmatch(file.name)
        if name:
            key, previous = map(bytes.fromhex, name.groups())
            entry = _Entry(Path(file.path), status.st_size, previous, status.st_mtime)
            entries[folder, key] = entry
        elif file.name.endswith(".tmp") and time.time() - status.st_mtime > _STALE_S:
            Path(file.path).unlink(missing_ok=True)

    def _touch(self, key: bytes) -> None:
        """Note the use of a page and of all before it."""
        stamp = time.time() // _STAMP_S * _STAMP_S
        entry = self._entries.get((self.folder.name, key))
        while entry is not None and entry.stamp != stamp:
            entry.stamp = stamp
            try:
                os.utime(entry.path, (stamp, stamp))
            except OSError:
                return
            entry = self._entries.get((self.folder.name, entry.previous))

    def _remove(self, name: tuple[str, bytes]) -> None:
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                return
            self.total_bytes -= entry.size
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("page cache: cannot remove %s: %s", entry.path, error.strerror)

    def _make_room(self) -> int:
        """Remove files until one more fits, and some more, so that it is not done for every page.
        Returns how many."""
        if self.total_bytes + self.file_bytes <= self.max_bytes:
            return 0
        self.scan()  # others may have removed some, or written
        return self._trim(self.max_bytes - max(self.file_bytes, self.max_bytes // 20))

    def _trim(self, limit: int) -> int:
        if self.total_bytes <= limit:
            return 0
        depths: dict[tuple[str, bytes], int] = {}
        oldest = sorted(
            self._entries, key=lambda name: (self._entries[name].stamp, -self._depth(name, depths))
        )
        for removed, name in enumerate(oldest):
            if self.total_bytes <= limit:
                return removed
            self._remove(name)
        return len(oldest)

    def _depth(self, name: tuple[str, bytes], known: dict[tuple[str, bytes], int]) -> int:
        """Stored pages before this one."""
        way = []
        while name in self._entries and name not in known:
            way.append(name)
            known[name] = 0  # ends a circle, which only a forged name could make
            name = (name[0], self._entries[name].previous)
        depth = known.get(name, -1)
        for step in reversed(way):
            depth += 1
            known[step] = depth
        return depth

    # Pages

    def write(self, record: PageRecord, page: memoryview) -> int:
        """Store a page unless it is there. Returns how many others had to go.

        Raises:
            OSError: a full disk, no permission; nothing is left behind.
        """
        if record.key in self:
            self._touch(record.key)
            return 0
        removed = self._make_room()
        head = self._header(record)
        ids = np.ascontiguousarray(record.ids, "<i8")
        path = self.folder / f"{record.key.hex()}-{record.previous.hex()}.page"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
        try:
            # Not flushed to the device: the checksum finds what a power cut has spoilt.
            with os.fdopen(handle, "wb") as file:
                for part in (head, ids.data.cast("B"), page, _checksum(head, ids, page)):
                    file.write(part)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        entry = _Entry(path, self.file_bytes, record.previous, 0.0)
        with self._lock:
            self._entries[self.folder.name, record.key] = entry
            self.total_bytes += entry.size
        self._touch(record.key)
        return removed

    def read(self, key: bytes, page: memoryview) -> PageRecord | None:
        """Fill `page` from the file; None if there is none that can be trusted."""
        name = (self.folder.name, key)
        entry = self._entries.get(name)
        if entry is None:
            return None
        try:
            record = self._read(entry.path, key, page)
        except FileNotFoundError:  # another process made room
            record = None
        except (OSError, ValueError) as error:
            logger.warning("page cache: %s is computed again: %s", entry.path.name, error)
            record = None
        if record is None:
            self._remove(name)
        else:
            self._touch(key)
        return record

    def _read(self, path: Path, key: bytes, page: memoryview) -> PageRecord:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.file_bytes:
                raise ValueError(f"{size} bytes, expected {self.file_bytes}")
            head = file.read(_HEADER.size)
            ids = np.frombuffer(file.read(8 * PAGE_SIZE), "<i8").astype(np.int64)
            done = 0
            while done < len(page):
                count = file.readinto(page[done:])
                if not count:
                    raise ValueError("it ends early")
                done += count
            found = file.read(_SUM_BYTES)
        if found != _checksum(head, ids, page):
            raise ValueError("the checksum does not fit")
        length, previous = _HEADER.unpack(head)[-2:]
        record = PageRecord(key, previous[:length], ids)
        if head != self._header(record):
            raise ValueError("it is of another model, format or text")
        return record

    def _header(self, record: PageRecord) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.page_bytes,
            self._identity,
            record.key,
            len(record.previous),
            record.previous,
        )

    def check_integrity(self) -> None:
        """Raises Exl3Error if the counts contradict each other."""
        with self._lock:
            total = sum(entry.size for entry in self._entries.values())
            counted = self.total_bytes
        if total != counted:
            raise Exl3Error(f"page files: {total} bytes, {counted} counted")
        if total > self.max_bytes:
            raise Exl3Error(f"page files: {total} bytes, at most {self.max_bytes} allowed")


def _checksum(head: bytes, ids: Ids, page: memoryview) -> bytes:
    digest = blake2b(head, digest_size=_SUM_BYTES)
    digest.update(np.ascontiguousarray(ids, "<i8").data.cast("B"))
    digest.update(page)
    return digest.digest()
