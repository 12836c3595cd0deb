"""The pages that the sequences of a job take for a round, all together or none."""

from __future__ import annotations

from bisect import bisect_right

from ..constants import PAGE_SIZE
from .pages import PageTable
from .sequence import Sequence

# Pages are taken for this many new tokens at a time when the job has no limit of its own.
UNLIMITED_WINDOW = 2048


def _pages(places: int) -> int:
    return -(-places // PAGE_SIZE)


def places_needed(sequences: list[Sequence], new_tokens: int) -> int:
    """Places for so many new tokens, the last of which needs none; pages are not shared."""
    first, *rest = (len(sequence) + new_tokens - 1 for sequence in sequences)
    return first + sum(_pages(places) * PAGE_SIZE for places in rest)


def most_new_tokens(sequences: list[Sequence], capacity: int) -> int:
    """New tokens that a cache of `capacity` places has room for; -1 if the prompts do not fit."""

    def needed(new_tokens: int) -> int:
        return places_needed(sequences, new_tokens)

    return bisect_right(range(capacity + 1), capacity, key=needed) - 1


def pages_wanted(sequences: list[Sequence], left: int, step: int | None) -> list[int]:
    """Pages of each sequence.

    Args:
        left: new tokens that are still to come at most.
        step: new tokens after which the job may go back to the queue; pages are then taken whole.
            None: pages for all of them.
    """
    counts = []
    for sequence in sequences:
        before = len(sequence) - 1
        count = _pages(before + left)
        counts.append(count if step is None else min(count, _pages(before + step)))
    return counts


def missing_pages(table: PageTable, sequences: list[Sequence], counts: list[int], held: int) -> int:
    """Free pages that `take_pages` would lack; 0 or less if there are enough."""
    wants = zip(sequences, counts, strict=True)
    return table.missing([(s.shareable(count, len(s) - held), count) for s, count in wants])


def take_pages(
    table: PageTable, sequences: list[Sequence], counts: list[int], held: int
) -> tuple[int, int] | None:
    """Take pages for every sequence.

    Args:
        held: tokens at the end that may be taken back; they are not shared.
    Returns:
        (pages reused whole, tokens reused), or None if too few pages are free.
    """
    if missing_pages(table, sequences, counts, held) > 0:
        return None
    # What a later sequence will share must not be given up for an earlier one.
    wants = zip(sequences[1:], counts[1:], strict=True)
    kept = [page for s, n in wants for page in table.match(s.shareable(n, len(s) - held))]
    table.hold(kept)
    pages = tokens = 0
    for sequence, count in zip(sequences, counts, strict=True):
        found = sequence.allocate(table, count, len(sequence) - held)
        assert found is not None
        pages, tokens = pages + found[0], tokens + found[1]
    if kept:
        table.release(kept)
    return pages, tokens
