"""The paged cache: life with its model, pages and errors."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3 import Cache, Config, Model
from exl3.cache import CacheLayer_fp16, CacheLayer_quant
from exl3.errors import ConfigError, UnsupportedError

TINY = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"


@pytest.fixture
def model() -> Model:
    return Model.from_config(Config.from_directory(str(TINY)))


def test_attributes(model: Model) -> None:
    cache = Cache(model, 1024, max_batch_size=128, max_history=4)
    assert (cache.max_num_tokens, cache.num_layers, cache.num_slots) == (1024, 3, 128)
    assert cache.layer_type is CacheLayer_fp16 and cache.model is model
    assert cache.config is model.config and cache.max_history == 4
    model.load()
    assert [tuple(t.shape) for t in cache.get_all_tensors()] == [(4, 256, 2, 64)] * 6
    assert cache.storage_size() == sum(t.nbytes for t in cache.get_all_tensors())


def test_created_after_loading(model: Model) -> None:
    model.load()
    assert len(Cache(model, 256).get_all_tensors()) == 6


@pytest.mark.parametrize("size", [0, -256, 255, 1000])
def test_size_must_be_whole_pages(model: Model, size: int) -> None:
    with pytest.raises(ConfigError, match="256"):
        Cache(model, size)


@pytest.mark.parametrize("size", [1024.0, "1024", None, True])
def test_size_must_be_a_whole_number(model: Model, size) -> None:
    with pytest.raises(ConfigError, match=r"max_num_tokens is .* expected a whole number"):
        Cache(model, size)
    with pytest.raises(ConfigError, match="max_batch_size is"):
        Cache(model, 1024, max_batch_size=size)


def test_numpy_sizes(model: Model) -> None:
    assert Cache(model, np.int64(1024)).max_num_tokens == 1024


@pytest.mark.parametrize("wrong", [None, "model", 1024, Model])
def test_cache_wants_a_model(wrong) -> None:
    with pytest.raises(ConfigError, match="expected a Model"):
        Cache(wrong, 1024)


def test_layer_arguments(model: Model) -> None:
    with pytest.raises(TypeError, match="k_bits"):
        Cache(model, 256, k_bits=4)
    quant = {"layer_type": CacheLayer_quant}
    for options, word in (({}, "k_bits"), ({"k_bits": 4}, "v_bits")):
        with pytest.raises(TypeError, match=word):
            Cache(model, 256, **quant, **options)
    with pytest.raises(TypeError, match="bits"):
        Cache(model, 256, **quant, k_bits=4, v_bits=4, bits=4)
    for k_bits, v_bits, word in ((1, 4, "k_bits"), (4, 9, "v_bits"), (4.5, 4, "k_bits")):
        with pytest.raises(ConfigError, match=word):
            Cache(model, 256, **quant, k_bits=k_bits, v_bits=v_bits)
    with pytest.raises(UnsupportedError, match="compand_a"):
        Cache(model, 256, **quant, k_bits=4, v_bits=4, compand_a=1.0)


def test_attach_and_detach(model: Model) -> None:
    cache = Cache(model, 256)
    with pytest.raises(ConfigError, match="attached"):
        cache.attach_to_model(model)
    model.load()
    cache.detach_from_model()
    cache.detach_from_model()
    assert cache.model is None and cache.get_all_tensors() == [] and model.caches() == []
    cache.attach_to_model(model)
    assert len(cache.get_all_tensors()) == 6


def test_model_holds_weak_references(model: Model) -> None:
    model.load()
    caches = [Cache(model, 256), Cache(model, 512)]
    assert model.caches() == caches and len(model.cache_weakrefs) == 2
    caches.pop()
    gc.collect()
    assert model.caches() == caches


def test_cache_outlives_its_model(model: Model) -> None:
    cache = Cache(model, 256)
    other = Model.from_config(model.config)
    own = Cache(other, 256)
    del other
    gc.collect()
    assert own.model is None
    own.detach_from_model()
    assert cache.model is model


def test_copy_page(model: Model) -> None:
    model.load()
    a, b = Cache(model, 512), Cache(model, 768)
    for index, tensor in enumerate(a.get_all_tensors()):
        tensor.copy_(torch.randn(tensor.shape) + index)
    a.copy_page(b, 1, 2, 100)
    for source, target in zip(a.get_all_tensors(), b.get_all_tensors(), strict=True):
        assert torch.equal(target[2, :100], source[1, :100])
        assert not target[2, 100:].any() and not target[:2].any()
    a.copy_page(a, 0, 1, 256)
    for tensor in a.get_all_tensors():
        assert torch.equal(tensor[0], tensor[1])
    for pages in ((2, 0, 1), (0, 3, 1), (-1, 0, 1), (0, 0, 257)):
        with pytest.raises(ConfigError, match="copy_page"):
            a.copy_page(b, *pages)


def test_direct_access(model: Model) -> None:
    model.load()
    cache = Cache(model, 1024)
    keys = torch.randn(2, 3, 2, 64)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    cache.update_layer_direct(1, torch.tensor([255, 0]), table, (keys, keys + 1), 3)
    k, v = cache.get_layer(1, torch.tensor([258, 3]), table)
    assert torch.equal(k[3, 255], keys[0, 0].half()) and torch.equal(k[1, :2], keys[0, 1:].half())
    assert torch.equal(v[0, :3], (keys[1] + 1).half())


def test_no_recurrent_state(model: Model) -> None:
    cache = Cache(model, 256)
    assert cache.get_all_recurrent_layers() == []
    with pytest.raises(UnsupportedError, match="recurrent"):
        cache.get_new_state()
