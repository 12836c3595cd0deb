"""Pages in files: they survive a restart, and damage is a miss, never a wrong page."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from exl3 import Config, Model
from exl3.cache.disk_tier import DiskTier, Recall
from exl3.cache.host_tier import PageRecord
from exl3.cache.page_files import PageFiles
from exl3.cache.page_io import PageIO
from exl3.errors import ConfigError, Exl3Error
from exl3.generator import Generator
from exl3.generator.pages import ROOT, page_key
from tests.engine.fake import PAGE_BYTES, FakeCache, FakeModel
from tests.engine.test_generator import expect_alone, job, prompt, run

ROOT_FOLDER = Path(__file__).parents[2]


def chain(length: int, seed: int = 0) -> list[PageRecord]:
    out, previous = [], ROOT
    for i in range(length):
        ids = np.full(256, 1000 * seed + i, np.int64)
        out.append(PageRecord(page_key(previous, ids), previous, ids))
        previous = out[-1].key
    return out


def page(number: int) -> memoryview:
    return np.full(PAGE_BYTES, number, np.uint8).data


def files(path: Path, pages: float = 100, identity: str = "m") -> PageFiles:
    probe = PageFiles(path, 1 << 30, identity, PAGE_BYTES)
    return PageFiles(path, int(pages * probe.file_bytes), identity, PAGE_BYTES)


def read(store: PageFiles, record: PageRecord) -> int | None:
    """The number that `page` was made with."""
    out = np.zeros(PAGE_BYTES, np.uint8)
    found = store.read(record.key, out.data)
    if found is None:
        return None
    assert found.key == record.key and found.previous == record.previous
    assert (found.ids == record.ids).all() and (out == out[0]).all()
    return int(out[0])


def test_written_pages_are_read_back_also_by_another_process(tmp_path: Path) -> None:
    records = chain(3)
    store = files(tmp_path)
    for i, record in enumerate(records):
        assert store.write(record, page(i)) == 0 and store.write(record, page(9)) == 0
    again = files(tmp_path)
    assert len(again) == 3 and [read(again, record) for record in records] == [0, 1, 2]
    assert stat.S_IMODE(again.folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in again.folder.iterdir())
    other = files(tmp_path, identity="another model")
    assert len(other) == 0 and read(other, records[0]) is None
    assert other.total_bytes == store.total_bytes  # they count, they are not read
    again.check_integrity()


DAMAGE = {
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "empty": lambda data: b"",
    "page": lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:],
    "ids": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "key": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "size": lambda data: data[:12] + b"\xff" * 8 + data[20:],
    "checksum": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_a_miss_with_a_warning(tmp_path: Path, kind: str, caplog) -> None:
    (record,) = chain(1)
    store = files(tmp_path)
    store.write(record, page(7))
    (path,) = store.folder.iterdir()
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert read(store, record) is None
    assert path.name in caplog.text and not path.exists() and record.key not in store
    store.write(record, page(8))
    assert read(store, record) == 8


def test_a_file_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    first, second = chain(2)
    store = files(tmp_path)
    store.write(first, page(1))
    store.write(second, page(2))
    names = {p.name[:32]: p for p in store.folder.iterdir()}
    os.replace(names[first.key.hex()], names[second.key.hex()])
    assert read(store, second) is None and read(store, first) is None
    other = files(tmp_path, identity="b")
    store.write(first, page(1))
    (path,) = store.folder.iterdir()
    os.replace(path, other.folder / path.name)
    assert read(files(tmp_path, identity="b"), first) is None


def test_what_was_not_used_for_longest_goes_first_and_ends_before_starts(tmp_path: Path) -> None:
    old, young = chain(3, 1), chain(3, 2)
    store = files(tmp_path)
    for record in (*old, *young):
        store.write(record, page(1))
    for path in store.folder.iterdir():
        if path.name[:32] in {record.key.hex() for record in old}:
            os.utime(path, (1e9, 1e9))
    for room, left in ((5, (2, 3)), (4, (1, 3)), (3, (0, 3)), (2, (0, 2))):
        store = files(tmp_path, room)
        kept = tuple(sum(r.key in store for r in group) for group in (old, young))
        assert kept == left
        assert all(r.key in store for r in young[: left[1]])
    store.write(chain(1, 3)[0], page(3))
    assert len(store) <= 2 and store.total_bytes <= store.max_bytes
    store.check_integrity()


def test_use_of_a_page_is_use_of_those_before_it(tmp_path: Path) -> None:
    records = chain(3)
    store = files(tmp_path)
    for record in records:
        store.write(record, page(1))
    for path in store.folder.iterdir():
        os.utime(path, (1e9, 1e9))
    store = files(tmp_path)
    assert read(store, records[1]) == 1
    ages = {p.name[:32]: time.time() - p.stat().st_mtime for p in store.folder.iterdir()}
    assert [ages[r.key.hex()] < 3600 for r in records] == [True, True, False]


def test_only_our_own_files_are_ever_removed(tmp_path: Path) -> None:
    store = files(tmp_path)
    store.write(chain(1)[0], page(1))
    stale, fresh = store.folder / "a.tmp", store.folder / "b.tmp"
    foreign = [tmp_path / "notes.txt", store.folder / "x.page", tmp_path / ("0" * 32)]
    for path in (stale, fresh, *foreign):
        path.write_bytes(b"x" * 5000)
    os.utime(stale, (1e9, 1e9))
    store = PageFiles(tmp_path, 2 * store.file_bytes, "m", PAGE_BYTES)
    for seed in range(4):
        store.write(chain(1, 5 + seed)[0], page(1))
    assert not stale.exists() and fresh.exists() and all(p.exists() for p in foreign)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    model = FakeModel()
    cache = FakeCache(model, 1024)
    io = PageIO([cache])
    tier = DiskTier(io, files(tmp_path))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with caplog.at_level(logging.WARNING):
        assert tier.offer(chain(1)[0], 0)
        tier.wait(5)
    assert tier.metrics["failed_writes"] == 1 and "full" in caplog.text
    assert not list(tier.files.folder.iterdir())
    assert not tier.offer(chain(1)[0], 0)  # not again so soon
    tier.check_integrity()
    tier.close(5)


def test_reads_come_later_and_abandoned_ones_make_room(tmp_path: Path, monkeypatch) -> None:
    cache = FakeCache(FakeModel(), 4096)
    tier = DiskTier(PageIO([cache]), files(tmp_path))
    records = chain(40)
    for i, record in enumerate(records):
        tier.files.write(record, page(i))
    first = records[0]
    assert tier.fetch(first.key, first.ids, 3) is Recall.WAIT
    while (found := tier.fetch(first.key, first.ids, 3)) is Recall.WAIT:
        tier.wait(1)
    assert found is Recall.HIT and (cache.slots[3].view(np.uint8) == 0).all()
    wanted = records[5]
    while (found := tier.fetch(wanted.key, first.ids, 3)) is Recall.WAIT:
        tier.wait(1)
    assert found is Recall.MISS  # other ids than those asked for
    asked = [record for record in records if tier.request(record.key)]
    assert 4 <= len(asked) <= 16
    while tier.is_busy():
        tier.wait(1)
    tier.check_integrity()
    late = records[len(asked) + 1]
    assert tier.fetch(late.key, late.ids, 2) is Recall.WAIT and not tier.request(late.key)
    monkeypatch.setattr("exl3.cache.disk_tier._ABANDONED_S", 0.0)
    while (found := tier.fetch(late.key, late.ids, 2)) is Recall.WAIT:
        tier.wait(1)
    assert found is Recall.HIT
    tier.check_integrity()
    tier.close(5)
    assert tier._thread is not None and not tier._thread.is_alive()


def test_the_thread_ends_with_the_tier(tmp_path: Path) -> None:
    tier = DiskTier(PageIO([FakeCache(FakeModel(), 1024)]), files(tmp_path))
    tier.offer(chain(1)[0], 0)
    thread = tier._thread
    del tier
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()
    assert len(files(tmp_path)) == 1  # what it was given is written first


def disk(path: Path, pages: int, *, host: int = 0, files: float = 1000, **kwargs) -> Generator:
    model = FakeModel(letters=b"abcdef \n")
    return Generator(
        model,
        FakeCache(model, pages * 256),
        model.tokenizer,
        cpu_cache_size=host * PAGE_BYTES,
        disk_cache_dir=path,
        disk_cache_size=int(files * (PAGE_BYTES + 2200)),
        **kwargs,
    )


def computed(generator: Generator) -> int:
    total = sum(bsz * count for bsz, count in generator.model.forwards)
    generator.model.forwards.clear()
    return total


@pytest.mark.parametrize("host", [0, 4])
def test_a_prompt_survives_a_restart(tmp_path: Path, host: int) -> None:
    ids = prompt(2000)
    generator = disk(tmp_path, 10, host=host)
    run(generator, job(ids, max_new_tokens=3))
    generator.close()
    generator.close()
    with pytest.raises(ConfigError, match="closed"):
        generator.enqueue(job(ids))
    generator = disk(tmp_path, 10, host=host)
    again = job(ids, max_new_tokens=3)
    events = run(generator, again)[again]
    expect_alone(generator, again, events, ids, 3)
    assert events[-1]["cached_pages"] == 7 and computed(generator) == 1999 - 7 * 256 + 3
    assert generator.metrics["disk_hits"] == 7
    generator.close()


def test_pages_that_left_the_cache_come_back_from_disk(tmp_path: Path) -> None:
    generator = disk(tmp_path, 4, host=2)
    texts = [prompt(1000, start) for start in range(4)]
    for ids in texts:
        run(generator, job(ids, max_new_tokens=2))
        generator.pagetable.tiers.flush(5)
    computed(generator)
    for ids in texts:
        item = job(ids, max_new_tokens=2)
        expect_alone(generator, item, run(generator, item)[item], ids, 2)
    assert computed(generator) < 4 * 400
    assert generator.metrics["disk_hits"] >= 6
    generator.close()


def test_a_spoilt_file_is_computed_again(tmp_path: Path) -> None:
    ids = prompt(1500)
    generator = disk(tmp_path, 8)
    run(generator, job(ids, max_new_tokens=1))
    generator.close()
    for path in tmp_path.rglob("*.page"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 255
        path.write_bytes(data)
    generator = disk(tmp_path, 8)
    item = job(ids, max_new_tokens=5)
    expect_alone(generator, item, run(generator, item)[item], ids, 5)
    assert generator.metrics["disk_hits"] == 0
    assert generator.disk_page_cache.metrics["missed_pages"] >= 1
    generator.close()


def test_cancel_while_pages_are_being_read(tmp_path: Path) -> None:
    ids = prompt(5000)
    generator = disk(tmp_path, 24)
    run(generator, job(ids, max_new_tokens=1))
    generator.close()
    generator = disk(tmp_path, 24)
    for steps in (1, 2, 3):
        item = job(ids, max_new_tokens=1)
        generator.enqueue(item)
        for _ in range(steps):
            generator.iterate()
        generator.cancel(item)
        generator.check_integrity()
        assert generator.pagetable.num_free == 24
    item = job(ids, max_new_tokens=4)
    expect_alone(generator, item, run(generator, item)[item], ids, 4)
    generator.close()


def test_other_jobs_run_while_one_waits_for_files(tmp_path: Path, monkeypatch) -> None:
    ids = prompt(1000)
    generator = disk(tmp_path, 12)
    run(generator, job(ids, max_new_tokens=1))
    generator.close()
    generator = disk(tmp_path, 12)
    original = PageFiles.read

    def slow(self, key, buffer):
        time.sleep(0.05)
        return original(self, key, buffer)

    monkeypatch.setattr(PageFiles, "read", slow)
    waits, quick = job(ids, max_new_tokens=2), job(prompt(20, 2), max_new_tokens=8)
    order = []
    generator.enqueue([waits, quick])
    while generator.num_remaining_jobs():
        order += [e["job"] for e in generator.iterate() if e["eos"]]
        generator.check_integrity()
    assert order == [quick, waits] and waits.cached_pages == 3
    generator.close()


def test_close_after_the_tensors_are_gone(tmp_path: Path) -> None:
    generator = disk(tmp_path, 8)
    run(generator, job(prompt(2000), max_new_tokens=1))
    generator.cache.page_tensors = lambda page: []
    start = time.monotonic()
    generator.close()
    assert time.monotonic() - start < 5


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two pages"):
        disk(tmp_path, 4, files=1)
    with pytest.raises(ConfigError, match="disk_cache_dir is 3"):
        disk(3, 4)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        disk(tmp_path / "file", 4)


def test_integrity_check_covers_the_files(tmp_path: Path) -> None:
    generator = disk(tmp_path, 8)
    run(generator, job(prompt(600), max_new_tokens=1))
    generator.pagetable.tiers.flush(5)
    generator.check_integrity()
    generator.disk_page_cache.files.total_bytes += 1
    with pytest.raises(Exl3Error, match="page files"):
        generator.check_integrity()
    generator.close()


def test_no_memory_for_the_tiers_ends_no_request(tmp_path: Path, monkeypatch, caplog) -> None:
    def buffers(self, at_most):
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(PageIO, "buffers", buffers)
    generator = disk(tmp_path, 4, host=4)
    with caplog.at_level(logging.WARNING):
        for start in range(3):
            item, ids = job(prompt(900, start), max_new_tokens=3), prompt(900, start)
            expect_alone(generator, item, run(generator, item)[item], ids, 3)
    assert caplog.text.count("no memory") == 2
    assert generator.cpu_page_cache.max_slots == 0 and len(generator.disk_page_cache) == 0
    generator.close()


def test_files_belong_to_one_model_and_order_of_layers() -> None:
    directory = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"

    def fingerprint(change: dict, **arguments) -> str:
        config = Config.from_directory(str(directory), **arguments)
        config.config_dict = {**config.config_dict, **change}
        return Model.from_config(config).fingerprint()

    same = fingerprint({})
    assert fingerprint({}) == same
    assert fingerprint({"rope_theta": 1.0}) != same
    assert fingerprint({}, layer_map="0,0") != same


WRITER = """
import sys
from tests.engine.test_disk_tier import chain, files, page
from pathlib import Path

store = files(Path(sys.argv[1]), 40)
records = [chain(20, seed) for seed in range(6)]
for turn in range(10**6):
    for number, record in enumerate(records[turn % 6]):
        if record.key in store and turn % 3 == 0:
            store._remove((store.folder.name, record.key))
        store.write(record, page(number))
"""


def test_writers_that_are_killed_leave_whole_pages_or_none(tmp_path: Path, caplog) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT_FOLDER)
        for _ in range(2)
    ]
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.rglob("*.page"))) < 30 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    store = files(tmp_path, 1000)
    found = [
        (number, read(store, record))
        for seed in range(6)
        for number, record in enumerate(chain(20, seed))
    ]
    assert sum(got is not None for _, got in found) >= 10
    assert all(got in (None, number) for number, got in found)
    assert "computed again" not in caplog.text  # renamed when whole: none is damaged
    store.check_integrity()
