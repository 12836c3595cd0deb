"""Where complete pages are kept once the cache needs their place: host memory, then disk."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..cache.host_tier import HostTier, Ids, PageRecord
from ..cache.page_io import PageIO
from ..errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from .pages import Page


class Recall(Enum):
    """What came of asking the tiers for a page."""

    MISS = 0
    HIT = 1
    WAIT = 2  # it is on its way


class Tiers:
    """The tiers of one cache; without any, everything is a miss."""

    def __init__(self, host: HostTier | None = None) -> None:
        self.host = host
        self.metrics = {"host_hits": 0}

    def __bool__(self) -> bool:
        return self.host is not None

    def __contains__(self, key: bytes) -> bool:
        return self.host is not None and key in self.host

    def recall(self, key: bytes, page: Page) -> Recall:
        """Copy a stored page into `page`, whose contents are not needed."""
        if self.host is not None and self.host.get(key, page.index):
            self.host.demote(key)
            self.metrics["host_hits"] += 1
            return Recall.HIT
        return Recall.MISS

    def copy(self, key: bytes, page: Page) -> None:
        """Copy a page that `longest_start` found."""
        assert self.host is not None
        self.host.get(key, page.index)

    def longest_start(self, previous: bytes, ids: Ids, least: int) -> tuple[bytes | None, int]:
        """The page after `previous` that shares more than `least` leading ids: (key, number)."""
        return (None, 0) if self.host is None else self.host.longest_start(previous, ids, least)

    def evicted(self, page: Page) -> None:
        """The cache needs the place of a complete page."""
        if self.host is not None:
            self.host.put(PageRecord.of(page), page.index)

    def close(self) -> None:
        """Give memory back; from now on everything is a miss. Harmless twice."""
        if self.host is not None:
            self.host.clear()
        self.host = None

    def check_integrity(self, page_key: Callable[[bytes, Ids], bytes]) -> None:
        """Raises Exl3Error if a tier contradicts itself or holds a page under a wrong key."""
        if self.host is not None:
            self.host.check_integrity(page_key)


def make_tiers(model: Any, caches: Sequence[Any], cpu_cache_size: float | None) -> Tiers:
    """The tiers that a generator was asked for.

    Args:
        caches: those that share the page numbers.
        cpu_cache_size: bytes of host memory; 0: none.
    Raises:
        UnsupportedError: with tensor parallel.
        ConfigError: less than two pages, or not a number.
    """
    size = 0 if cpu_cache_size is None else cpu_cache_size
    if not isinstance(size, numbers.Real) or not 0 <= size < 1 << 60:
        raise ConfigError(f"cpu_cache_size is {cpu_cache_size!r}, expected bytes, 0 for none")
    if not size:
        return Tiers()
    if getattr(model, "loaded_tp", False):
        raise UnsupportedError("cpu_cache_size: not with tensor parallel; use 0")
    return Tiers(HostTier(PageIO(caches), int(size)))
