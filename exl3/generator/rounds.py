"""The pages that the sequences of a job take for a round, all together or none."""

from __future__ import annotations

from bisect import bisect_right

from ..constants import PAGE_SIZE
from ..errors import CacheFullError
from .pages import PageTable
from .sequence import Sequence

# Pages are taken for this many new tokens at a time when the job has no limit of its own.
UNLIMITED_WINDOW = 2048


def _pages(places: int) -> int:
    return -(-places // PAGE_SIZE)


class Rounds:
    """How far a job may go, and with how many pages.

    Args:
        sequences: those of the job, one or two; they grow together.
        limit: new tokens in all, or None.
        step: new tokens after which the job may go back to the queue, or None.
    """

    def __init__(self, sequences: list[Sequence], limit: int | None, step: int | None) -> None:
        self._sequences = sequences
        self._limit = limit
        self._step = UNLIMITED_WINDOW if limit is None and step is None else step
        self.most = 0  # new tokens that the cache has room for

    def check(self, capacity: int) -> None:
        """Compare with the places of a cache; before the first token.

        Raises:
            CacheFullError: the job can never run.
        """
        self.most = bisect_right(range(capacity + 1), capacity, key=self._places) - 1
        tokens = 1 if self._limit is None else self._limit
        if self._step is not None:
            tokens = min(tokens, 1)
        if tokens > self.most:
            lengths = " and ".join(str(len(sequence)) for sequence in self._sequences)
            raise CacheFullError(
                f"job cannot be enqueued: a prompt of {lengths} tokens"
                + ("" if self._limit is None else f" and {self._limit} new tokens")
                + f" needs {self._places(tokens)} places in the cache, which has {capacity}"
            )

    def _places(self, new_tokens: int) -> int:
        """Places for so many new tokens, the last of which needs none; pages are not shared."""
        first, *rest = (len(sequence) + new_tokens - 1 for sequence in self._sequences)
        return first + sum(_pages(places) * PAGE_SIZE for places in rest)

    def _counts(self, new_tokens: int) -> list[int]:
        """Pages that each sequence needs in the next round."""
        left = self.most if self._limit is None else min(self.most, self._limit)
        left -= new_tokens
        ends = [len(sequence) - 1 for sequence in self._sequences]
        if self._step is None:
            return [_pages(end + left) for end in ends]
        return [min(_pages(end + left), _pages(end + self._step)) for end in ends]

    def _wants(self, counts: list[int], held: int) -> list[tuple[list[bytes], int]]:
        """Keys of the pages that others may have, and the number wanted, of each sequence."""
        pairs = zip(self._sequences, counts, strict=True)
        return [(s.shareable(count, len(s) - held), count) for s, count in pairs]

    def missing(self, table: PageTable, new_tokens: int, held: int) -> int:
        """Free pages that `take` would lack; 0 or less if there are enough."""
        return table.missing(self._wants(self._counts(new_tokens), held))

    def take(self, table: PageTable, new_tokens: int, held: int) -> tuple[int, int] | None:
        """Take pages for every sequence.

        Args:
            new_tokens: those that there are.
            held: as many at the end may be taken back; they are not shared.
        Returns:
            (pages reused whole, tokens reused), or None if too few pages are free.
        """
        counts = self._counts(new_tokens)
        wants = self._wants(counts, held)
        if table.missing(wants) > 0:
            return None
        # What a later sequence will share must not be given up for an earlier one.
        kept = [page for keys, _ in wants[1:] for page in table.match(keys)]
        table.hold(kept)
        pages = tokens = 0
        for sequence, count in zip(self._sequences, counts, strict=True):
            found = sequence.allocate(table, count, len(sequence) - held)
            assert found is not None
            pages, tokens = pages + found[0], tokens + found[1]
        if kept:
            table.release(kept)
        return pages, tokens
