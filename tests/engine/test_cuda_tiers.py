"""Pages of a cache on CUDA: through pinned memory and files, and back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3 import Cache, CacheLayer_quant, Config, Generator, Model, Tokenizer
from exl3.cache.page_io import PageIO
from tests.engine.test_generator import run, tokens
from tests.engine.test_real_model import DIRECTORY, job, prompt

KINDS = [{}, {"layer_type": CacheLayer_quant, "k_bits": 4, "v_bits": 3}]


@pytest.fixture
def loaded(device: torch.device):
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    model.load(device=str(device))
    yield model, Tokenizer.from_config(config)
    model.unload()


def fill(cache: Cache) -> None:
    for tensor in cache.get_all_tensors():
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device=raw.device))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_comes_back_bit_for_bit(loaded, kind: dict) -> None:
    cache = Cache(loaded[0], 4 * 256, **kind)
    fill(cache)
    io = PageIO([cache])
    before = [t.view(-1).view(torch.uint8).cpu() for t in cache.get_all_tensors()]
    buffer = io.buffers(2)[1]
    assert buffer.is_pinned()
    io.save(2, buffer)
    for part in cache.page_tensors(2):
        part.zero_()  # later work of the stream must not reach the copy
    fence = io.fence()
    fence.wait()
    kept = buffer.clone()
    io.load(buffer, 1)
    io.load(buffer, 2)
    io.fence().wait()
    assert torch.equal(buffer, kept)
    for old, tensor in zip(before, cache.get_all_tensors(), strict=True):
        old, new = old.view(4, -1), tensor.view(-1).view(torch.uint8).cpu().view(4, -1)
        assert torch.equal(new[1], old[2]) and torch.equal(new[2], old[2])
        assert torch.equal(new[0], old[0]) and torch.equal(new[3], old[3])
    cache.detach_from_model()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["host", "disk", "both"])
def test_evicted_prompts_come_back(loaded, kind: dict, where: str, tmp_path: Path) -> None:
    model, tokenizer = loaded
    cache = Cache(model, 768, **kind)
    sizes: dict = {} if where == "disk" else {"cpu_cache_size": 1 << 22}
    if where != "host":
        sizes["disk_cache_dir"] = tmp_path
    generator = Generator(model, cache, tokenizer, **sizes)

    def ask(seed: int) -> tuple[list[int], int]:
        # Two pages and the token that is run: the steps are the same, to the bit, cold and warm.
        item = job(prompt(513, seed), max_new_tokens=20)
        events = run(generator, item)[item]
        generator.pagetable.tiers.flush(5)
        return tokens(events), events[-1]["cached_tokens"]

    first = [ask(seed) for seed in range(4)]
    again = [ask(seed) for seed in range(4)]
    assert [said for said, _ in again] == [said for said, _ in first]
    assert all(cached == 512 for _, cached in again)
    hits = generator.metrics
    assert hits["host_hits"] + hits["disk_hits"] >= 6
    generator.close()
    cache.detach_from_model()
