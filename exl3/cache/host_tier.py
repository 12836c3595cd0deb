"""Second tier of the cache: pages that were evicted, kept in host memory."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError, Exl3Error
from .page_io import PageIO

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What a stored page holds."""

    key: bytes
    previous: bytes  # key of the page before it
    ids: Ids  # (256,)

    @classmethod
    def of(cls, page: Any) -> PageRecord:
        """The record of a complete page of the page table."""
        return cls(page.key, page.previous, page.tokens.copy())


def longest_start(candidates: Iterator[tuple[Any, Ids]], ids: Ids, least: int) -> tuple[Any, int]:
    """The candidate whose ids share the most leading ones with `ids`, more than `least`.

    Returns:
        (its name, ids shared), or (None, 0).
    """
    best, common = None, least
    for name, own in candidates:
        width = min(own.size, ids.size)
        if width <= common:
            continue
        differs = np.flatnonzero(own[:width] != ids[:width])
        same = int(differs[0]) if differs.size else width
        if same > common:
            best, common = name, same
    return best, common if best is not None else 0


class HostTier:
    """Slots in host memory, one page each, found by the key of the page.

    The least recently stored page goes first, except that a page which went back to the cache is
    the first of all: it is not needed twice, and while it is still there, evicting it again costs
    no copy.

    Args:
        max_bytes: memory for all slots; it is taken when first needed.
    Raises:
        ConfigError: less than two pages.
    """

    def __init__(self, io: PageIO, max_bytes: int) -> None:
        self._io = io
        self.slot_size = io.size
        self.max_slots = int(max_bytes) // io.size
        if self.max_slots < 2:
            raise ConfigError(
                f"cpu_cache_size is {int(max_bytes)} bytes, expected 0 or at least two pages: "
                f"{2 * io.size}"
            )
        self.metrics = {"stored_pages": 0, "restored_pages": 0, "evicted_pages": 0}
        self._used: OrderedDict[bytes, tuple[PageRecord, Tensor]] = OrderedDict()
        self._after: dict[bytes, set[bytes]] = {}  # keys by the key of the page before them
        self._free: list[Tensor] = []
        self._allocated = 0

    def __len__(self) -> int:
        """Pages stored."""
        return len(self._used)

    def __contains__(self, key: bytes) -> bool:
        return key in self._used

    def put(self, record: PageRecord, page: int) -> None:
        """Keep a page of the cache, in place of the oldest one if there is no room."""
        if record.key in self._used:
            self._used.move_to_end(record.key)
            return
        slot = self._slot()
        if slot is None:
            return
        self._io.save(page, slot)
        self._used[record.key] = (record, slot)
        self._after.setdefault(record.previous, set()).add(record.key)
        self.metrics["stored_pages"] += 1

    def get(self, key: bytes, page: int) -> bool:
        """Copy a stored page into a page of the cache; False if it is not here."""
        found = self._used.get(key)
        if found is None:
            return False
        self._io.load(found[1], page)
        self.metrics["restored_pages"] += 1
        return True

    def demote(self, key: bytes) -> None:
        """The page is in the cache again: its slot is the first to be used for another."""
        self._used.move_to_end(key, last=False)

    def longest_start(self, previous: bytes, ids: Ids, least: int = 1) -> tuple[bytes | None, int]:
        """The page after `previous` that shares more than `least` leading ids: (key, number)."""
        keys = self._after.get(previous, ())
        return longest_start(((key, self._used[key][0].ids) for key in keys), ids, least)

    def _slot(self) -> Tensor | None:
        if not self._free and self._allocated < self.max_slots:
            try:
                self._free = self._io.buffers(self.max_slots - self._allocated)
            except (RuntimeError, MemoryError) as error:  # no reason to end anybody's request
                logger.warning("host tier: no memory after %d slots: %s", self._allocated, error)
                self.max_slots = self._allocated
            self._allocated += len(self._free)
        if self._free:
            return self._free.pop()
        if not self._used:
            return None
        _, (record, slot) = self._used.popitem(last=False)
        self._forget(record)
        self.metrics["evicted_pages"] += 1
        return slot

    def _forget(self, record: PageRecord) -> None:
        group = self._after[record.previous]
        group.discard(record.key)
        if not group:
            del self._after[record.previous]

    def clear(self) -> None:
        """Drop all pages and give the memory back."""
        self._used.clear()
        self._after.clear()
        self._free = []
        self._allocated = 0

    def check_integrity(self, page_key: Callable[[bytes, Ids], bytes]) -> None:
        """Raises Exl3Error if the tier contradicts itself."""
        slots = [slot.data_ptr() for _, slot in self._used.values()]
        slots += [slot.data_ptr() for slot in self._free]
        if len(set(slots)) != len(slots) or len(slots) != self._allocated:
            raise Exl3Error(f"host tier: {len(slots)} slots, {self._allocated} were allocated")
        if self._allocated > self.max_slots:
            raise Exl3Error(f"host tier: {self._allocated} slots, at most {self.max_slots}")
        for key, (record, _) in self._used.items():
            if record.key != key or page_key(record.previous, record.ids) != key:
                raise Exl3Error(f"host tier: page {key.hex()}: the key does not fit the ids")
            if key not in self._after.get(record.previous, ()):
                raise Exl3Error(f"host tier: page {key.hex()} is not listed after its previous")
        if sum(map(len, self._after.values())) != len(self._used):
            raise Exl3Error("host tier: pages are listed that are not stored")
