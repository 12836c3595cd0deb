"""The page table by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from exl3.errors import Exl3Error
from exl3.generator.pages import ROOT, PageTable, page_key
from exl3.generator.sequence import Sequence


def ids(length: int, family: int = 0) -> np.ndarray:
    return (np.arange(length, dtype=np.int64) * 7 + family) % 97


def table(pages: int) -> PageTable:
    return PageTable(pages, lambda source, target, count: None)


def fill(pages: PageTable, tokens: np.ndarray, count: int | None = None) -> Sequence | None:
    """A sequence that has run all its tokens."""
    sequence = Sequence(tokens)
    count = -(-tokens.size // 256) if count is None else count
    if sequence.allocate(pages, count, tokens.size) is None:
        return None
    sequence.store(pages, tokens.size, tokens.size)
    return sequence


def test_eviction_takes_empty_pages_then_the_oldest_sequence_from_its_end() -> None:
    pages = table(8)
    for family in (1, 2):
        fill(pages, ids(768, family)).release(pages)  # type: ignore[union-attr]
    fill(pages, ids(768, 1)).release(pages)  # family 1 is the younger one now
    known = lambda family: len(pages.match(_keys(ids(768, family))))  # noqa: E731
    assert (known(1), known(2)) == (3, 3)
    held = fill(pages, ids(300, 3))
    assert (known(1), known(2)) == (3, 3)  # two pages were empty
    for left in (2, 1, 0):
        assert fill(pages, ids(200, 10 + left)) is not None
        assert (known(1), known(2)) == (3, left)
    assert held is not None


def _keys(tokens: np.ndarray) -> list[bytes]:
    sequence = Sequence(tokens)
    return [sequence._key(i) for i in range(tokens.size // 256)]


def test_the_oldest_sequence_loses_its_last_page_first() -> None:
    pages = table(6)
    for family in (1, 2):
        fill(pages, ids(768, family)).release(pages)  # type: ignore[union-attr]
    for count, left in ((1, (2, 3)), (2, (1, 3)), (3, (0, 3)), (4, (0, 2))):
        taken = Sequence(ids(count * 256, 3))
        assert taken.allocate(pages, count, 1) is not None
        assert tuple(len(pages.match(_keys(ids(768, f)))) for f in (1, 2)) == left
        taken.rewind(1)
        taken.release(pages)
        pages.check_integrity()


def test_pages_whose_prefix_is_gone_go_before_whole_sequences() -> None:
    pages = table(4)
    fill(pages, ids(512, 1)).release(pages)  # type: ignore[union-attr]
    fill(pages, ids(512, 2)).release(pages)  # type: ignore[union-attr]
    first = pages.by_key[_keys(ids(256, 2))[0]]
    pages.unlink(first)  # as if it had been given up
    fill(pages, ids(512, 5)).release(pages)  # type: ignore[union-attr]
    assert len(pages.match(_keys(ids(512, 1)))) == 2


def test_partial_copy_wants_more_than_one_token() -> None:
    copies = []
    pages = PageTable(4, lambda *args: copies.append(args))
    fill(pages, ids(300)).release(pages)  # type: ignore[union-attr]
    other = ids(300)
    other[257:] = 99
    sequence = Sequence(other)
    assert sequence.allocate(pages, 2, 300) == (1, 256) and not copies
    sequence.release(pages)
    other[257] = ids(300)[257]
    sequence = Sequence(other)
    assert sequence.allocate(pages, 2, 300) == (1, 258) and copies[0][2] == 2
    pages.check_integrity([sequence.pages])


def test_the_copied_page_may_be_the_only_one_left() -> None:
    copies = []
    pages = PageTable(2, lambda *args: copies.append(args))
    fill(pages, ids(500)).release(pages)  # type: ignore[union-attr]
    sequence = Sequence(np.concatenate([ids(400), ids(100, 5)]))
    assert sequence.allocate(pages, 2, 500) == (1, 400) and not copies
    pages.check_integrity([sequence.pages])


def test_integrity_check_finds_faults() -> None:
    pages = table(3)
    held = fill(pages, ids(600))
    assert held is not None
    pages.check_integrity([held.pages])
    with pytest.raises(Exl3Error, match="holders"):
        pages.check_integrity()
    pages.pages[0].tokens[0] += 1
    with pytest.raises(Exl3Error, match="key"):
        pages.check_integrity([held.pages])
    assert pages.dump_page_list().count("\n") == 2


@pytest.mark.parametrize("seed", range(10))
def test_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    pages = table(rng.randint(3, 12))
    running: list[Sequence] = []
    for _ in range(150):
        if running and rng.random() < 0.5:
            sequence = running[rng.randrange(len(running))]
            if rng.random() < 0.5:
                sequence.release(pages)
                running.remove(sequence)
            elif sequence.room > 0:
                sequence.input_ids.append(rng.randint(0, 1))
                final = len(sequence) - rng.randint(0, 3)
                sequence.store(pages, len(sequence), max(final, sequence.keyed * 256 + 1))
                if len(sequence) - 1 > max(sequence.keyed * 256, 2) and rng.random() < 0.3:
                    sequence.rewind(len(sequence) - 1)
        else:
            length = rng.choice([3, 200, 256, 257, 500, 512, 513, 700])
            added = fill(pages, ids(length, rng.randint(0, 2)))
            if added is not None:
                running.append(added)
        pages.check_integrity([s.pages for s in running])
    for sequence in running:
        sequence.release(pages)
    pages.check_integrity()
    assert pages.num_free == pages.max_pages


def test_pages_with_embeddings_are_known_in_their_process_only(monkeypatch) -> None:
    plain, image = ids(256), ids(256)
    image[7] = 1_000_000_000
    before = page_key(ROOT, plain), page_key(ROOT, image)
    assert before == (page_key(ROOT, plain), page_key(ROOT, image))
    monkeypatch.setattr("exl3.generator.pages._PROCESS", b"another process")
    assert page_key(ROOT, plain) == before[0] and page_key(ROOT, image) != before[1]
