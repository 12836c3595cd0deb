"""A model on a quantised cache: close to the plain one, and equal to itself however it is run."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from typing import Any

import pytest
import torch

from exl3 import Cache, CacheLayer_quant, Config, Generator, Model, Tokenizer, model_init
from exl3.errors import ConfigError
from exl3.model.decode import DecodeGraphs
from tests.engine.test_generator import run, tokens
from tests.engine.test_real_model import DIRECTORY, job, prompt

BITS = (5, 3)


@pytest.fixture(scope="module")
def model():
    model = Model.from_config(Config.from_directory(str(DIRECTORY)))
    model.load()
    yield model
    model.unload()


def quant_cache(model: Model, size: int, bits: tuple[int, int] = BITS) -> Cache:
    return Cache(model, size, layer_type=CacheLayer_quant, k_bits=bits[0], v_bits=bits[1])


def rectangle(cache: Cache, rows: int, past: int) -> dict[str, Any]:
    shape = (rows, cache.max_num_tokens // rows)
    return {"attn_mode": "flash_attn", "cache": cache, "batch_shape": shape, "past_len": past}


def decode(model: Model, cache: Cache, ids: torch.Tensor, prefill: int = 0) -> torch.Tensor:
    """Logits after each token from `prefill` on, one step at a time."""
    if prefill:
        model.prefill(ids[:, :prefill], rectangle(cache, ids.shape[0], 0))
    steps = [
        model.forward(ids[:, i : i + 1], rectangle(cache, ids.shape[0], i))
        for i in range(prefill, ids.shape[1])
    ]
    return torch.cat(steps, 1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    valid = b.isfinite()
    return float((a - b)[valid].std() / b[valid].std())


def test_more_bits_are_closer_to_the_plain_cache(model: Model) -> None:
    ids = prompt(90)
    want = decode(model, Cache(model, 256), ids, prefill=50)
    errors = [
        distance(decode(model, quant_cache(model, 256, (b, b)), ids, prefill=50), want)
        for b in (2, 4, 8)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.04


def test_sizes_and_life() -> None:
    model = Model.from_config(Config.from_directory(str(DIRECTORY)))
    cache = quant_cache(model, 512)
    assert cache.get_all_tensors() == []
    with pytest.raises(ConfigError, match="not loaded"):
        cache.layers[0].kv()
    for _ in range(2):
        model.load()
        tensors = cache.get_all_tensors()
        assert len(tensors) == 12 and all(t.shape[:2] == (2, 256) for t in tensors)
        assert cache.storage_size() == sum(t.nbytes for t in tensors)
        assert cache.storage_size() == 3 * 2 * 512 * 2 * 64 * (4 + 0.5) / 8
        assert cache.layers[0].overhead_size() == 0
        model.unload()
        assert cache.get_all_tensors() == []
    assert cache.layers[0].tp_export(None)["args"] == {
        "max_num_tokens": 512,
        "k_bits": 5,
        "v_bits": 3,
    }


def test_copy_page(model: Model) -> None:
    a, b = quant_cache(model, 512), quant_cache(model, 768)
    for tensor in a.get_all_tensors():
        tensor.copy_(torch.randint(1, 9, tensor.shape).to(tensor.dtype))
    a.copy_page(b, 1, 2, 100)
    for source, target in zip(a.get_all_tensors(), b.get_all_tensors(), strict=True):
        assert torch.equal(target[2, :100], source[1, :100])
        assert not target[2, 100:].any() and not target[:2].any()
    for other in (quant_cache(model, 512, (5, 4)), Cache(model, 512)):
        with pytest.raises(ConfigError, match="same bits"):
            other.copy_page(a, 0, 0, 1)


def test_direct_access(model: Model) -> None:
    cache = quant_cache(model, 1024, (8, 7))
    # At 7 bits the largest error of so many values comes near the bound, whatever they are.
    keys = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    past = torch.tensor([255, 0])
    cache.update_layer_direct(1, past, table, (keys, keys + 1), 3)
    k, v = cache.get_layer(1, past + 3, table)
    close = {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(k[3, 255].float(), keys[0, 0], **close)
    torch.testing.assert_close(k[1, :2].float(), keys[0, 1:], **close)
    torch.testing.assert_close(v[0, :3].float(), keys[1] + 1, **close)
    assert not k[3, :255].any() and not k[2].any()
    before = [t.clone() for t in cache.get_all_tensors()]
    k[0, 3] = 0.5
    cache.update_layer(1, torch.tensor([255, 3]), table, (k, v), 1)
    k, _ = cache.get_layer(1, past, table)
    torch.testing.assert_close(k[0, 3].float(), torch.full((2, 64), 0.5), **close)
    for now, old in zip(cache.get_all_tensors(), before, strict=True):
        assert torch.equal(now[0, :3], old[0, :3])


def test_recorded_steps_equal_single_ops(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.cat([prompt(12, seed) for seed in range(3)])
    cache = quant_cache(model, 3 * 256)
    recorded = decode(model, cache, ids)
    assert len(model._graphs._steps[cache]) == 1
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    assert torch.equal(decode(model, quant_cache(model, 3 * 256), ids), recorded)


def test_pages_equal_a_rectangle_and_chunks_equal_the_whole(model: Model) -> None:
    ids = torch.cat([prompt(300, seed) for seed in range(2)])
    cache = quant_cache(model, 1024)
    model.prefill(ids[:, :290], rectangle(cache, 2, 0))
    want = model.forward(ids[:, 290:], rectangle(cache, 2, 290))
    for chunk in (290, 100):
        cache = quant_cache(model, 1280)
        params = {"attn_mode": "flash_attn", "cache": cache}
        params["block_table"] = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
        for start in range(0, 300, chunk):
            piece = ids[:, start : min(start + chunk, 300)]
            past = torch.full((2,), start, dtype=torch.int32)
            got = model.forward(piece, {**params, "cache_seqlens": past})
        # Other row counts take other kernels: values that lie between two levels may turn.
        assert distance(got[:, -10:], want) < 0.02, chunk


def test_cold_warm_batched_and_chunked(model: Model) -> None:
    tokenizer = Tokenizer.from_config(model.config)
    lengths = (5, 255, 256, 257, 300, 520)
    cold = {}
    for n in lengths:
        alone = Generator(model, quant_cache(model, 2048), tokenizer)
        item = job(prompt(n), return_logits=True)
        cold[n] = run(alone, item)[item]
    generator = Generator(model, quant_cache(model, 4096), tokenizer, max_chunk_size=256)
    for _ in range(2):
        items = [job(prompt(n), return_logits=True) for n in lengths]
        events = run(generator, *items)
        for n, item in zip(lengths, items, strict=True):
            got, want = (
                torch.cat([e["logits"][0] for e in es if "logits" in e])
                for es in (events[item], cold[n])
            )
            pairs = zip(tokens(events[item]), tokens(cold[n]), strict=True)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), 5) + 1
            assert (got - want)[:same, : tokenizer.actual_vocab_size].abs().max() < 0.2
    assert events[items[-1]][-1]["cached_tokens"] > 500


def test_command_line(model: Model) -> None:
    parser = ArgumentParser(allow_abbrev=False)
    model_init.add_args(parser)
    for words, bits in ((["-cq", "4"], (4, 4)), (["-cq", "6, 3"], (6, 3))):
        args = parser.parse_args(["-m", str(DIRECTORY), "-cs", "512", *words])
        _, _, cache, _ = model_init.init(args, load_tokenizer=False, quiet=True)
        assert cache.layer_type is CacheLayer_quant
        assert (cache.layers[0].k_bits, cache.layers[0].v_bits) == bits


def test_pages_come_back_from_host_memory(model: Model) -> None:
    tokenizer = Tokenizer.from_config(model.config)
    generator = Generator(model, quant_cache(model, 1024), tokenizer, cpu_cache_size=1 << 22)
    items = [job(prompt(700, seed)) for seed in (0, 1, 0)]
    first, _, again = (tokens(run(generator, item)[item]) for item in items)
    assert again == first and generator.cpu_page_cache.metrics["restored_pages"] > 0


def test_random_jobs_get_what_they_get_alone(model: Model) -> None:
    """Shared prefixes, jobs that come and are cancelled around, a cache too small for all."""
    tokenizer = Tokenizer.from_config(model.config)
    chosen = random.Random(7)
    lengths = [chosen.choice((20, 200, 255, 256, 257, 400, 511)) for _ in range(14)]
    ids = [prompt(n, chosen.choice((0, 1))) for n in lengths]
    generator = Generator(model, quant_cache(model, 1536), tokenizer, max_chunk_size=256)
    items = [job(x, return_logits=True) for x in ids]
    rest = [job(prompt(300, 9), max_new_tokens=50) for _ in range(3)]
    for at, item in enumerate(items):
        generator.enqueue(item)
        if at % 5 == 1:
            generator.enqueue(rest[at // 5])
    found: dict[Any, list[dict]] = {item: [] for item in [*items, *rest]}
    steps = 0
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            found[event["job"]].append(event)
        steps += 1
        if steps % 6 == 0 and rest:
            generator.cancel(rest.pop())
    for x, item in zip(ids, items, strict=True):
        alone = Generator(model, quant_cache(model, 1536), tokenizer)
        single = job(x, return_logits=True)
        first, want = (
            next(e["logits"][0] for e in events if "logits" in e)
            for events in (found[item], run(alone, single)[single])
        )
        width = tokenizer.actual_vocab_size
        assert (first[:1] - want[:1])[:, :width].abs().max() < 0.2
    generator.check_integrity()
