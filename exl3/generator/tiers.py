"""Where complete pages are kept once the cache needs their place: host memory, then disk."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.disk_tier import DiskTier, Recall
from ..cache.host_tier import HostTier, Ids, PageRecord
from ..cache.page_files import PageFiles
from ..cache.page_io import PageIO
from ..errors import ConfigError, UnsupportedError
from ..version import __version__

if TYPE_CHECKING:
    from .pages import Page

__all__ = ["Recall", "TierSizes", "Tiers", "make_tiers"]

logger = logging.getLogger(__name__)

READ_AHEAD = 8  # pages of a prompt that are asked for at once


class Tiers:
    """The tiers of one cache; without any, everything is a miss."""

    def __init__(
        self,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        io: PageIO | None = None,
    ) -> None:
        self.host, self.disk = host, disk
        self.metrics = {"host_hits": 0, "disk_hits": 0, "unsaved_pages": 0}
        self._io = io
        self._lock = threading.RLock()  # a generator may be closed in another thread
        self._unsaved: OrderedDict[bytes, Page] = OrderedDict()  # complete, not on disk yet

    def __contains__(self, key: bytes) -> bool:
        return (self.host is not None and key in self.host) or (
            self.disk is not None and key in self.disk
        )

    # Pages that come back

    def recall(self, key: bytes, page: Page, ids: Ids) -> Recall:
        """Copy the stored page with these ids into `page`, whose contents are not needed."""
        if self.host is not None and self.host.get(key, page.index):
            self.host.demote(key)
            self.metrics["host_hits"] += 1
            return Recall.HIT
        if self.disk is None:
            return Recall.MISS
        found = self.disk.fetch(key, ids, page.index)
        self.metrics["disk_hits"] += found is Recall.HIT
        return found

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Start reading pages that will be asked for next, as long as there is one."""
        for key in keys:
            if self.host is not None and key in self.host:
                continue
            if self.disk is None or key not in self.disk or not self.disk.request(key):
                return

    def longest_start(self, previous: bytes, ids: Ids, least: int) -> tuple[bytes | None, int]:
        """The page after `previous` that shares more than `least` leading ids: (key, number).
        Files are not searched."""
        return (None, 0) if self.host is None else self.host.longest_start(previous, ids, least)

    def copy(self, key: bytes, page: Page) -> None:
        """Copy a page that `longest_start` found."""
        assert self.host is not None
        self.host.get(key, page.index)

    def wait(self, timeout_s: float) -> None:
        """Until a page may have come, or the time is over."""
        if self.disk is not None:
            self.disk.wait(timeout_s)

    # Pages that go

    def completed(self, page: Page) -> None:
        """All tokens of a page are stored and it has its key."""
        if self.disk is not None and page.key is not None and not self.disk.knows(page.key):
            self._unsaved[page.key] = page

    def dropped(self, page: Page) -> None:
        """The contents of a page are forgotten."""
        if page.key is not None and self._unsaved.get(page.key) is page:
            del self._unsaved[page.key]

    def evicted(self, page: Page) -> None:
        """The cache needs the place of a complete page."""
        assert page.key is not None
        if self.host is not None:
            self.host.put(PageRecord.of(page), page.index)
        if self._unsaved.pop(page.key, None) is not None and not self._save(page):
            self.metrics["unsaved_pages"] += 1

    def write_behind(self, at_most: int) -> bool:
        """Hand complete pages over to be written. True if some are left."""
        if not self._unsaved:
            return False
        with self._lock:
            while self._unsaved and at_most > 0:
                key, page = next(iter(self._unsaved.items()))
                if not self._save(page):
                    break
                del self._unsaved[key]
                at_most -= 1
            return bool(self._unsaved)

    def is_writing(self) -> bool:
        """Whether pages are on their way to files, so that there will be room for more."""
        return self.disk is not None and self.disk.is_busy()

    def _save(self, page: Page) -> bool:
        if self.disk is None or page.key is None:
            return True
        return self.disk.knows(page.key) or self.disk.offer(PageRecord.of(page), page.index)

    def flush(self, timeout_s: float) -> None:
        """Write what is not on disk yet, as far as the time allows and the cache still exists."""
        end, disk = time.monotonic() + timeout_s, self.disk
        if disk is None or self._io is None or not self._io.available():
            return
        while (self.write_behind(1 << 30) or disk.is_busy()) and time.monotonic() < end:
            if not disk.is_busy():  # writing has failed
                return
            disk.wait(end - time.monotonic())

    def close(self, timeout_s: float = 0.0) -> None:
        """Give memory back; from now on everything is a miss. Harmless twice."""
        if timeout_s > 0:
            try:
                self.flush(timeout_s)
            except ConfigError as error:  # the model is being unloaded
                logger.warning("page cache: not everything was saved: %s", error)
        with self._lock:
            host, disk = self.host, self.disk
            self.host = self.disk = None
            self._unsaved.clear()
        if host is not None:
            host.clear()
        if disk is not None:
            disk.close(timeout_s)

    def check_integrity(self, page_key: Callable[[bytes, Ids], bytes]) -> None:
        """Raises Exl3Error if a tier contradicts itself or holds a page under a wrong key."""
        if self.host is not None:
            self.host.check_integrity(page_key)
        if self.disk is not None:
            self.disk.check_integrity()


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What a generator was asked for, in bytes; None or 0: not that tier."""

    cpu_cache_size: Any
    disk_cache_dir: Any
    disk_cache_size: Any

    def __post_init__(self) -> None:
        for name in ("cpu_cache_size", "disk_cache_size"):
            size = getattr(self, name)
            if size is None:
                continue
            if not isinstance(size, int | float) or not 0 <= size < 1 << 60:
                raise ConfigError(f"{name} is {size!r}, expected bytes, 0 for none")
        if not isinstance(self.disk_cache_dir, str | Path | None):
            raise ConfigError(f"disk_cache_dir is {self.disk_cache_dir!r}, expected a path")


def make_tiers(models: list[Any], caches: list[Any], sizes: TierSizes) -> Tiers:
    """The tiers that a generator was asked for.

    Args:
        models, caches: those whose pages go together: a model, and perhaps its drafter.
    Raises:
        UnsupportedError: with tensor parallel.
        ConfigError: less than two pages, or a folder that cannot be used.
    """
    host_bytes = int(sizes.cpu_cache_size or 0)
    disk_bytes = int(sizes.disk_cache_size or 0) if sizes.disk_cache_dir else 0
    if not (host_bytes or disk_bytes):
        return Tiers()
    if any(getattr(model, "loaded_tp", False) for model in models):
        raise UnsupportedError("cpu_cache_size, disk_cache_dir: not with tensor parallel; use 0")
    io = PageIO(caches)
    host = HostTier(io, host_bytes) if host_bytes else None
    disk = None
    if disk_bytes:
        identity = json.dumps([__version__, io.describe(), *(m.fingerprint() for m in models)])
        disk = DiskTier(io, PageFiles(sizes.disk_cache_dir, disk_bytes, identity, io.size))
    return Tiers(host, disk, io)
