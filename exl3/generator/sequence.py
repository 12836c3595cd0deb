"""The tokens of a job, or of its negative prompt, and the pages that hold their keys and values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..constants import PAGE_SIZE
from .ids import IdBuffer
from .pages import ROOT, Page, PageTable, page_key
from .tiers import READ_AHEAD, Recall

MAX_RECALLS = (
    8  # pages brought back from a tier per step and job, so that others need not wait long
)


class Sequence:
    """Ids, pages and how far they are filled.

    `stored`: leading tokens whose keys and values are in the pages. `keyed`: leading pages that are
    complete, final, and known by their key. `mirrored`: leading tokens that a draft model's cache
    holds too; `readable`: those known to be tokens of it; only a draft model uses these two.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.input_ids = IdBuffer(ids)
        self.pages: list[Page] = []
        self.stored = 0
        self.keyed = 0
        self.mirrored = self.readable = 0
        self.block_table: Tensor = torch.zeros(0, dtype=torch.int32)
        self.root = ROOT  # key before the first page
        self.fresh = False  # every token is run: nothing is taken from other jobs' pages
        self.waiting = False  # the next page comes from a tier, in a later step
        self._may_copy = False  # the start of the next page may be known somewhere
        self._keys: list[bytes] = []  # of leading full pages; correct for the ids as they are

    def __len__(self) -> int:
        return self.input_ids.length

    @property
    def room(self) -> int:
        """Tokens that still fit the pages held; negative if the last one does not."""
        return len(self.pages) * PAGE_SIZE - len(self)

    @property
    def is_ingested(self) -> bool:
        """Whether all but the last token, which gives the logits, are stored."""
        return self.stored >= len(self) - 1

    def _key(self, number: int) -> bytes:
        ids = self.input_ids.numpy()
        while len(self._keys) <= number:
            start = len(self._keys) * PAGE_SIZE
            previous = self._keys[-1] if self._keys else self.root
            self._keys.append(page_key(previous, ids[start : start + PAGE_SIZE]))
        return self._keys[number]

    def _previous(self, number: int) -> bytes:
        return self._key(number - 1) if number else self.root

    def shareable(self, count: int, final: int) -> list[bytes]:
        """Keys of the leading full pages that may be taken from others."""
        if self.fresh:
            return []
        full = min(len(self) - 1, count * PAGE_SIZE, final - 1) // PAGE_SIZE
        return [self._key(number) for number in range(full)]

    def allocate(self, table: PageTable, count: int, final: int) -> tuple[int, int] | None:
        """Take `count` pages, with what is already stored in them.

        Args:
            count: pages wanted.
            final: leading tokens that will not be taken back; later ones are not shared.
        Returns:
            (pages reused whole, tokens reused), or None if too few pages are free.
        """
        keys = self.shareable(count, final)
        usable = 0 if self.fresh else min(len(self) - 1, count * PAGE_SIZE)
        ids = self.input_ids.numpy()[:usable]
        pages, shared, copied = table.allocate(keys, ids, count, self.root)
        if not pages and count:
            return None
        self.pages = pages
        self.keyed = shared
        self.stored = shared * PAGE_SIZE + copied
        self._may_copy = not copied
        self.block_table = torch.tensor([page.index for page in pages], dtype=torch.int32)
        return shared, self.stored

    def adopt(self, table: PageTable, end: int) -> int:
        """Take over pages of the prompt, up to token `end`, that another job has completed since,
        or that a tier has. Returns the number of tokens gained; `waiting` tells whether more will
        come."""
        before = self.stored
        self.waiting = False
        if self.fresh:
            return 0
        recalls = 0
        while self.stored == self.keyed * PAGE_SIZE and self.stored + PAGE_SIZE <= end:
            number = self.keyed
            page = table.exchange(self.pages[number], self._key(number))
            if page is None:
                page = self.pages[number]
                if recalls == MAX_RECALLS or not self._recall(table, page, number, end):
                    self.waiting |= recalls == MAX_RECALLS
                    break
                recalls += 1
            self.pages[number] = page
            self.block_table[number] = page.index
            self.keyed += 1
            self.stored += PAGE_SIZE
            if number + 1 < len(self.pages):
                table.link(self.pages[number + 1], self._key(number))
        self._copy_start(table)
        if self.mirrored == before:
            self.mirrored = self.stored
        return self.stored - before

    def _recall(self, table: PageTable, page: Page, number: int, end: int) -> bool:
        start = number * PAGE_SIZE
        ids = self.input_ids.numpy()[start : start + PAGE_SIZE]
        found = table.recall(page, self._key(number), ids)
        self.waiting = found is Recall.WAIT
        if found is not Recall.MISS:
            after = range(number + 1, min(number + READ_AHEAD, end // PAGE_SIZE))
            table.tiers.prefetch(self._key(later) for later in after)
        return found is Recall.HIT

    def _copy_start(self, table: PageTable) -> None:
        """Look once for the start of the first page that no tier has in full."""
        number = self.keyed
        if self.waiting or not self._may_copy or number == len(self.pages):
            return
        self._may_copy = False
        if self.stored == number * PAGE_SIZE:
            end = min(len(self) - 1, self.stored + PAGE_SIZE)
            tail = self.input_ids.numpy()[self.stored : end]
            self.stored += table.copy_start(self.pages[number], self._previous(number), tail)

    def store(self, table: PageTable, end: int, final: int) -> None:
        """Note that the tokens up to `end` are in the pages now.

        Args:
            final: leading tokens that will not be taken back.
        """
        ids = self.input_ids.numpy()
        start = self.stored
        while start < end:
            page = self.pages[start // PAGE_SIZE]
            offset = start % PAGE_SIZE
            count = min(PAGE_SIZE - offset, end - start)
            page.tokens[offset : offset + count] = ids[start : start + count]
            page.valid = offset + count
            start += count
        self.stored = end
        if end >= (self.keyed + 1) * PAGE_SIZE:
            self._complete(table, min(end, final - 1))

    def _complete(self, table: PageTable, end: int) -> None:
        """Key the full pages up to token `end`. Never one whose last token might have to be run
        again: hence `final - 1` above."""
        while (self.keyed + 1) * PAGE_SIZE <= end:
            number = self.keyed
            table.complete(self.pages[number], self._key(number))
            self.keyed += 1
            if self.keyed < len(self.pages):
                table.link(self.pages[self.keyed], self._key(number))

    def rewind(self, length: int) -> None:
        """Drop the ids from `length` on. The last one that stays will be run again."""
        self.input_ids.truncate(length)
        del self._keys[length // PAGE_SIZE :]
        self.stored = min(self.stored, length - 1)
        self.mirrored = min(self.mirrored, self.stored)
        self.limit_copies(self.stored)

    def limit_copies(self, end: int) -> None:
        """Let others copy what is stored up to token `end` at most."""
        for number in range(end // PAGE_SIZE, len(self.pages)):
            page = self.pages[number]
            page.valid = min(page.valid, max(0, end - number * PAGE_SIZE))

    def release(self, table: PageTable) -> None:
        """Give all pages back. Whatever is stored is final now."""
        if not self.pages:
            return
        self._complete(table, self.stored)
        for page in self.pages[self.keyed + 1 :]:  # not reachable by a key
            table.unlink(page)
        for page in self.pages[: self.keyed]:  # an equal page may have been given up meanwhile
            if page.key is not None:
                table.complete(page, page.key)
        table.release(self.pages)
        self.pages = []
        self.stored = self.keyed = self.mirrored = 0
        self.block_table = torch.zeros(0, dtype=torch.int32)
