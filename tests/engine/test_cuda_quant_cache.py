"""A model on a quantised cache on CUDA: close to the plain cache, and equal to itself."""

from __future__ import annotations

import pytest
import torch

from exl3 import Cache, Config, Generator, Model, Tokenizer
from exl3.model.decode import DecodeGraphs
from tests.engine.test_generator import run, tokens
from tests.engine.test_quant_cache import decode, distance, quant_cache, rectangle
from tests.engine.test_real_model import DIRECTORY, job, prompt

pytestmark = pytest.mark.cuda


@pytest.fixture
def model(device: torch.device):
    model = Model.from_config(Config.from_directory(str(DIRECTORY)))
    model.load(device=str(device))
    yield model
    model.unload()


def test_more_bits_are_closer_and_captured_steps_equal_single_ops(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(90)
    want = decode(model, Cache(model, 256), ids, prefill=50)
    caches = [quant_cache(model, 256, (b, b)) for b in (2, 4, 8)]
    captured = [decode(model, cache, ids, prefill=50) for cache in caches]
    assert all(len(model._graphs._steps[cache]) == 1 for cache in caches)
    errors = [distance(got, want) for got in captured]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.03
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    again = decode(model, quant_cache(model, 256, (4, 4)), ids, prefill=50)
    assert distance(again, captured[1]) < 1e-3


def test_chunked_equals_whole(model: Model) -> None:
    """Also a first chunk, which could be attended to without the cache."""
    ids = prompt(200)
    whole, parts = quant_cache(model, 256, (4, 4)), quant_cache(model, 256, (4, 4))
    want = model.forward(ids, rectangle(whole, 1, 0))
    got = [model.forward(ids[:, at : at + 70], rectangle(parts, 1, at)) for at in range(0, 200, 70)]
    # A first pass that did not read the cache would be off by 0.17, the error of 4 bits.
    assert distance(torch.cat(got, 1), want) < 0.08


def test_cold_and_warm(model: Model) -> None:
    tokenizer = Tokenizer.from_config(model.config)
    generator = Generator(model, quant_cache(model, 2048), tokenizer, max_chunk_size=256)
    first, again = [], []
    for results in (first, again):
        for n in (255, 256, 300, 600):
            item = job(prompt(n))
            events = run(generator, item)[item]
            results.append(tokens(events))
    assert sum(a == b for a, b in zip(first, again, strict=True)) >= 3
    assert events[-1]["cached_tokens"] > 500
