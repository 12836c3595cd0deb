"""The pages of the cache: who holds them, what they contain, which to give up.

A page is complete when all its tokens are stored, and then has a key: a hash over its ids and the
key of the page before it. Equal keys mean equal prefixes, so complete pages are shared. Freed pages
keep their contents until they are needed for something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ..cache.host_tier import Ids, longest_start
from ..constants import PAGE_SIZE
from ..errors import Exl3Error
from ..tokenizer.embedding import FIRST_EMBEDDING_ID
from .tiers import Recall, Tiers

ROOT = b"exl3"  # key before the first page
_PROCESS = os.urandom(16)


def page_key(previous: bytes, ids: Ids) -> bytes:
    """Key of a complete page that holds `ids` after the page `previous`."""
    # Embeddings are numbered anew in every process: pages with one are known in this process only.
    own = _PROCESS if ids.max(initial=0) >= FIRST_EMBEDDING_ID else b""
    return blake2b(previous + ids.tobytes(), digest_size=16, key=own).digest()


def root_key(adapter_key: bytes) -> bytes:
    """Key before the first page of a sequence that runs with these adapters."""
    if not adapter_key:
        return ROOT
    return blake2b(ROOT + b"adapters" + adapter_key, digest_size=16).digest()


class Page:
    """One page; `number` is its place in the sequence that last filled it."""

    __slots__ = ("holders", "index", "key", "last_use", "number", "previous", "tokens", "valid")

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: Ids = np.zeros(PAGE_SIZE, np.int64)
        self.valid = 0  # leading tokens whose keys and values are stored
        self.key: bytes | None = None  # once complete and sure to stay so
        self.previous: bytes | None = None  # key of the page before it, once that is known
        self.number = 0
        self.holders = 0
        self.last_use = 0


class PageTable:
    """All pages of one cache.

    Args:
        max_pages: pages in the cache.
        copy: called `(source index, target index, tokens)`, copies the start of a page.
        partial: whether the start of a page may be copied (not with recurrent state).
        tiers: where complete pages go when their place is needed, and come back from.
    """

    def __init__(
        self,
        max_pages: int,
        copy: Callable[[int, int, int], Any],
        partial: bool = True,
        tiers: Tiers | None = None,
    ) -> None:
        self.max_pages = max_pages
        self.pages = [Page(index) for index in range(max_pages)]
        self.by_key: dict[bytes, Page] = {}
        self.after: dict[bytes, dict[int, Page]] = {}  # pages by the key of the page before them
        self.partial = partial
        self.tiers = Tiers() if tiers is None else tiers
        self.num_free = max_pages
        self.version = 0  # changes whenever a failed allocation might now succeed
        self.metrics = {"evicted_pages": 0, "reused_pages": 0, "copied_pages": 0}
        self._copy = copy
        self._clock = 0

    # Taking and giving back

    def match(self, keys: Sequence[bytes]) -> list[Page]:
        """The pages that hold the longest known prefix."""
        found = []
        for key in keys:
            page = self.by_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def missing(self, wants: Iterable[tuple[Sequence[bytes], int]]) -> int:
        """Free pages that `allocate` would lack for sequences of (keys, count), taken together; 0
        or less if there are enough."""
        fresh, idle = 0, set()
        for keys, count in wants:
            shared = self.match(keys[:count])
            fresh += count - len(shared)
            idle |= {page.index for page in shared if page.holders == 0}
        return fresh - (self.num_free - len(idle))

    def allocate(
        self, keys: Sequence[bytes], rest: Ids, count: int, root: bytes = ROOT
    ) -> tuple[list[Page], int, int]:
        """Pages for a sequence.

        Args:
            keys: keys of the leading full pages that may be shared.
            rest: ids of those pages and of what follows, as far as they may be reused.
            count: number of pages wanted.
            root: key before the first page.
        Returns:
            (pages, number of them reused whole, tokens copied into the page after those); no pages
            if too few are free.
        """
        if self.missing([(keys, count)]) > 0:
            return [], 0, 0
        shared = self.match(keys[:count])
        fresh = count - len(shared)
        self.hold(shared)
        previous = keys[len(shared) - 1] if shared else root
        source, common = None, 0
        if fresh and self.partial and not self._is_stored(keys, len(shared)):
            tail = rest[len(shared) * PAGE_SIZE : (len(shared) + 1) * PAGE_SIZE]
            source, common = self._longest_start(previous, tail)
            if self.tiers.longest_start(previous, tail, common)[1]:
                source, common = None, 0  # `copy_start` will do better
        pages = shared + self._take_fresh(fresh, source, common)
        if common:
            page = pages[len(shared)]
            page.tokens[:common] = rest[len(shared) * PAGE_SIZE :][:common]
            page.valid = common
        for number, page in enumerate(pages):
            page.number = number
        if fresh:
            self.link(pages[len(shared)], previous)
        self.touch(pages)
        self.metrics["reused_pages"] += len(shared)
        return pages, len(shared), common

    def _is_stored(self, keys: Sequence[bytes], number: int) -> bool:
        return number < len(keys) and keys[number] in self.tiers

    def _take_fresh(self, count: int, source: Page | None, common: int) -> list[Page]:
        """Empty pages, the first of them with the start of `source` copied in."""
        if not count:
            return []
        if source is None:
            return self._evict(count)
        if source.holders == 0 and self.num_free == count:  # nothing else is left: use it up
            others = [page for page in self._evict(count) if page is not source]
            return [source, *others]
        source.holders += 1  # must survive until it is copied
        self.num_free -= source.holders == 1
        pages = self._evict(count)
        source.holders -= 1
        self.num_free += source.holders == 0
        self._copy(source.index, pages[0].index, common)
        self.metrics["copied_pages"] += 1
        return pages

    def _take(self, page: Page) -> None:
        self.num_free -= page.holders == 0
        page.holders += 1

    def hold(self, pages: Iterable[Page]) -> None:
        """Keep pages from being given up until they are released."""
        for page in pages:
            self._take(page)

    def release(self, pages: Sequence[Page]) -> None:
        """Give pages back; their contents stay reusable."""
        self.touch(pages)
        for page in pages:
            page.holders -= 1
            self.num_free += page.holders == 0
        self.version += 1

    def touch(self, pages: Sequence[Page]) -> None:
        self._clock += 1
        for page in pages:
            page.last_use = self._clock

    def exchange(self, own: Page, key: bytes) -> Page | None:
        """The page with this key, in place of a page that its only holder has not filled."""
        page = self.by_key.get(key)
        if page is None or page is own:
            return None
        self._take(page)
        self.unlink(own)
        own.holders -= 1
        self.num_free += own.holders == 0
        page.last_use = self._clock
        self.version += 1
        self.metrics["reused_pages"] += 1
        return page

    # Contents

    def link(self, page: Page, previous: bytes) -> None:
        """Note which page comes before; its start can then be found and copied."""
        page.previous = previous
        self.after.setdefault(previous, {})[page.index] = page

    def complete(self, page: Page, key: bytes) -> None:
        """All tokens of the page are stored and final. It takes the place of an equal page that
        nobody holds."""
        page.key = key
        other = self.by_key.get(key)
        if other is not None and other is not page and other.holders == 0:
            self.unlink(other)
            other = None
        if other is None:
            self.by_key[key] = page
            self.tiers.completed(page)

    def recall(self, own: Page, key: bytes, ids: Ids) -> Recall:
        """Fill a page that its only holder has not filled from a tier, if one has it."""
        found = self.tiers.recall(key, own, ids)
        if found is Recall.HIT:
            own.tokens[:] = ids
            own.valid = PAGE_SIZE
            self.complete(own, key)
        return found

    def copy_start(self, own: Page, previous: bytes, ids: Ids) -> int:
        """Fill a page that its only holder has not filled with the longest start known of `ids`.
        Returns the number of tokens."""
        if not self.partial:
            return 0
        source, common = self._longest_start(previous, ids)
        key, more = self.tiers.longest_start(previous, ids, max(common, 1))
        if key is not None:
            self.tiers.copy(key, own)
            common = more
        elif source is not None:
            self._copy(source.index, own.index, common)
        if common:
            own.tokens[:common] = ids[:common]
            own.valid = common
            self.metrics["copied_pages"] += 1
        return common

    def unlink(self, page: Page) -> None:
        """Forget the contents."""
        self.tiers.dropped(page)
        if page.key is not None and self.by_key.get(page.key) is page:
            del self.by_key[page.key]
        if page.previous is not None:
            group = self.after[page.previous]
            del group[page.index]
            if not group:
                del self.after[page.previous]
        page.key = page.previous = None
        page.valid = 0

    def _longest_start(self, previous: bytes, ids: Ids) -> tuple[Page | None, int]:
        """The page after `previous` that shares the most leading ids, more than one."""
        group = self.after.get(previous, {}).values()
        return longest_start(((page, page.tokens[: page.valid]) for page in group), ids, 1)

    def _evict(self, count: int) -> list[Page]:
        """Empty `count` free pages and take them."""

        def order(page: Page) -> tuple[int, int, int]:
            if page.valid == 0:
                return 0, page.index, 0
            gone = page.previous is None or (
                page.number > 0
                and page.previous not in self.by_key
                and page.previous not in self.tiers
            )
            return 1 if gone else 2, page.last_use, -page.number

        free = sorted((page for page in self.pages if page.holders == 0), key=order)
        for page in free[:count]:
            self.metrics["evicted_pages"] += page.valid > 0
            if page.key is not None and self.by_key.get(page.key) is page:
                self.tiers.evicted(page)
            self.unlink(page)
            self._take(page)
        return free[:count]

    # Looking inside

    def dump_page_list(self) -> str:
        """One line per page, for people."""
        return "\n".join(
            f"{page.index:5d}  holders {page.holders:3d}  tokens {page.valid:3d}  "
            f"key {page.key.hex()[:8] if page.key else '-':8s}  "
            f"after {page.previous.hex()[:8] if page.previous else '-':8s}  used {page.last_use}"
            for page in self.pages
        )

    def check_integrity(self, held: Sequence[Sequence[Page]] = ()) -> None:
        """Check every invariant, given the pages that each running job holds.

        Raises:
            Exl3Error: the table contradicts itself; the text says where.
        """
        counts = [0] * self.max_pages
        for pages in held:
            for page in pages:
                counts[page.index] += 1
        for page in self.pages:
            where = f"page {page.index}"
            _require(page.holders == counts[page.index], f"{where}: {page.holders} holders")
            _require(0 <= page.valid <= PAGE_SIZE, f"{where}: {page.valid} tokens")
            if page.key is not None:
                _require(page.valid == PAGE_SIZE, f"{where} has a key but is not complete")
                _require(page.previous is not None, f"{where} has a key but no previous key")
                key = page_key(page.previous or b"", page.tokens)
                _require(key == page.key, f"{where}: the key does not fit the ids")
            if page.previous is not None:
                known = self.after.get(page.previous, {}).get(page.index)
                _require(known is page, f"{where} is not listed after its previous page")
        for key, page in self.by_key.items():
            _require(page.key == key, f"page {page.index} is listed under another key")
        listed = sum(len(group) for group in self.after.values())
        linked = sum(page.previous is not None for page in self.pages)
        _require(listed == linked, f"{listed} pages are listed by previous key, {linked} have one")
        free = sum(page.holders == 0 for page in self.pages)
        _require(free == self.num_free, f"{free} pages are free, {self.num_free} counted")
        self.tiers.check_integrity(page_key)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Exl3Error(f"page table: {what}")
