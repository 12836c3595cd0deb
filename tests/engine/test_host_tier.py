"""Evicted pages in host memory: kept, found again, never mixed up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exl3 import Cache
from exl3.cache import CacheLayer_fp16
from exl3.cache.host_tier import HostTier, PageRecord
from exl3.cache.page_io import PageIO
from exl3.errors import ConfigError, Exl3Error, UnsupportedError
from exl3.generator import Generator
from exl3.generator.pages import ROOT, page_key
from tests.engine.fake import PAGE_BYTES, FakeCache, FakeModel
from tests.engine.test_generator import expect_alone, job, prompt, run


class TinyModel:
    """Two layers of different shape."""

    def __init__(self) -> None:
        self.config = None
        shapes = ((2, 8), (1, 24))
        self.attention = [SimpleNamespace(kv_heads=h, head_dim=d) for h, d in shapes]

    def get_cache_layers(self):
        return self.attention

    def attach_cache(self, cache) -> None:
        cache.alloc([torch.device("cpu")] * 2)

    def detach_cache(self, cache) -> None:
        cache.free()


def record(number: int) -> PageRecord:
    ids = np.full(256, number, np.int64)
    return PageRecord(page_key(ROOT, ids), ROOT, ids)


def filled(pages: int = 4) -> Cache:
    cache = Cache(TinyModel(), pages * 256)
    for tensor in cache.get_all_tensors():
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def test_a_page_of_several_caches_comes_back_bit_for_bit() -> None:
    caches = filled(), filled()
    io = PageIO(caches)
    assert io.size >= 2 * 2 * 256 * 2 * (16 + 24) and io.available()
    before = [t.clone() for cache in caches for t in cache.get_all_tensors()]
    (buffer,) = io.buffers(1)
    io.save(2, buffer)
    for cache in caches:
        for tensor in cache.get_all_tensors():
            tensor[2] = float("nan")
    io.load(buffer, 1)
    for old, new in zip(before, [t for c in caches for t in c.get_all_tensors()], strict=True):
        assert torch.equal(new[1], old[2])
        assert torch.equal(new[0], old[0]) and torch.equal(new[3], old[3])
    io.load(buffer, 2)
    assert torch.equal(caches[1].get_all_tensors()[3][2], before[-1][2])
    caches[1].free()
    assert not io.available()
    caches[0].free()
    with pytest.raises(ConfigError, match="not loaded"):
        PageIO(caches)


def test_a_layer_whose_tensors_are_no_pages_must_say_how() -> None:
    class Odd(CacheLayer_fp16):
        def get_tensors(self):
            return [torch.zeros(3, 256)]

    with pytest.raises(UnsupportedError, match="override page_tensors"):
        Cache(TinyModel(), 1024, layer_type=Odd).page_tensors(0)


def test_least_recently_stored_goes_first_and_one_that_went_back_before_it() -> None:
    cache = FakeCache(FakeModel(), 8 * 256)
    tier = HostTier(PageIO([cache]), 3 * PAGE_BYTES + 5)
    assert (tier.max_slots, tier.slot_size, len(tier)) == (3, PAGE_BYTES, 0)
    records = [record(i) for i in range(6)]
    for number in range(3):
        cache.slots[number] = number + 1
        tier.put(records[number], number)
    tier.put(records[0], 7)  # known: keeps its contents, becomes the youngest
    assert tier.get(records[2].key, 5) and (cache.slots[5] == 3).all()
    tier.demote(records[2].key)
    tier.put(records[3], 3)
    tier.put(records[4], 4)
    assert [r.key in tier for r in records] == [True, False, False, True, True, False]
    assert tier.get(records[0].key, 6) and (cache.slots[6] == 1).all()
    assert not tier.get(records[5].key, 6)
    assert tier.metrics == {"stored_pages": 5, "restored_pages": 2, "evicted_pages": 2}
    tier.check_integrity(page_key)
    tier._used[records[0].key][0].ids[0] = 99
    with pytest.raises(Exl3Error, match="does not fit"):
        tier.check_integrity(page_key)


def host(pages: int, slots: int, **kwargs) -> Generator:
    model = FakeModel(letters=b"abcdef \n")
    cache = FakeCache(model, pages * 256)
    size = slots * PAGE_BYTES
    return Generator(model, cache, model.tokenizer, cpu_cache_size=size, **kwargs)


def test_size_and_tensor_parallel_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least two pages: 4096"):
        host(4, 1)
    model = FakeModel()
    for size in (-1, "4", float("nan")):
        with pytest.raises(ConfigError, match="cpu_cache_size"):
            Generator(model, FakeCache(model, 1024), model.tokenizer, cpu_cache_size=size)
    assert host(4, 0).cpu_page_cache is None
    model.loaded_tp = True
    with pytest.raises(UnsupportedError, match="tensor parallel"):
        Generator(model, FakeCache(model, 1024), model.tokenizer, cpu_cache_size=1 << 20)


@pytest.mark.parametrize("length", [513, 600, 768, 769, 1000])
def test_an_evicted_prompt_is_not_computed_again(length: int) -> None:
    generator = host(4, 16)
    ids, other = prompt(length), prompt(1000, 3)
    for tokens in (ids, other):
        item = job(tokens, max_new_tokens=2)
        run(generator, item)
    assert generator.pagetable.metrics["evicted_pages"] and len(generator.cpu_page_cache)
    generator.model.forwards.clear()
    again = job(ids, max_new_tokens=2)
    events = run(generator, again)[again]
    expect_alone(generator, again, events, ids, 2)
    computed = sum(bsz * count for bsz, count in generator.model.forwards)
    # All full pages of the prompt come back; the rest may be found in part.
    assert computed <= (length - 1) % 256 + 2
    assert events[-1]["cached_tokens"] >= (length - 1) // 256 * 256
    assert events[-1]["cached_pages"] == (length - 1) // 256
    assert generator.pagetable.tiers.metrics["host_hits"] >= 1


def test_the_start_of_a_page_is_found_in_the_tier() -> None:
    generator = host(3, 16)
    ids = prompt(600)
    for tokens in (ids, prompt(700, 3)):
        run(generator, job(tokens, max_new_tokens=1))
    changed = [*ids[:500], *prompt(80, 5)]
    generator.model.forwards.clear()
    item = job(changed, max_new_tokens=1)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, changed, 1)
    assert events[-1]["cached_tokens"] == 500 and events[-1]["cached_pages"] == 1
    assert sum(count for _, count in generator.model.forwards) == 80


def test_a_long_prefix_comes_back_over_several_steps_and_may_be_cancelled() -> None:
    generator = host(24, 64)
    ids = prompt(22 * 256 + 1)
    for tokens in (ids, prompt(24 * 256, 3)):
        run(generator, job(tokens, max_new_tokens=1))
    item = job(ids, max_new_tokens=1)
    generator.enqueue(item)
    events = generator.iterate()
    assert [e.get("curr_progress") for e in events] == [None, 8 * 256]
    generator.cancel(item)
    generator.cancel(item)
    generator.check_integrity()
    assert generator.pagetable.num_free == 24 and not generator.num_remaining_jobs()
    generator.model.forwards.clear()
    again = job(ids, max_new_tokens=1)
    expect_alone(generator, again, run(generator, again)[again], ids, 1)
    assert sum(count for _, count in generator.model.forwards) == 1


def test_two_jobs_share_what_comes_back() -> None:
    generator = host(8, 64)
    ids = prompt(3 * 256 + 9)
    for tokens in (ids, prompt(8 * 256, 3)):
        run(generator, job(tokens, max_new_tokens=1))
    pair = [job(ids, max_new_tokens=5), job(ids, max_new_tokens=5)]
    for item, events in run(generator, *pair).items():
        expect_alone(generator, item, events, ids, 5)
        assert events[-1]["cached_tokens"] >= 768
    assert generator.cpu_page_cache.metrics["restored_pages"] <= 4


def test_a_new_generator_on_the_cache_frees_the_memory_of_the_old_one() -> None:
    generator = host(4, 16)
    run(generator, job(prompt(600)), check=False)
    run(generator, job(prompt(1000, 3)), check=False)
    tier = generator.cpu_page_cache
    assert len(tier)
    Generator(generator.model, generator.cache, generator.tokenizer)
    assert not len(tier) and generator.cpu_page_cache is None
