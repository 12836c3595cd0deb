"""Contract 1 to 3 on the CPU, to the bit: a token's logits and what it leaves in the cache depend
on the tokens before it alone, not on how many come with it, in this sequence or in others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, FAMILIES, random_ids, write_random_exl3

from exl3 import Cache, CacheLayer_quant, Config, Model

LENGTH = 300
BATCHES = (1, 2, 15, 16, 17, 33, 200)
CHUNKS = (7, 128, LENGTH)


def load(directory: Path, family: str, bits: int) -> Model:
    write_random_exl3(directory, json.loads((CONFIGS / f"{family}.json").read_text()), bits)
    model = Model.from_config(Config.from_directory(str(directory)))
    model.load()
    return model


def params(cache: Cache, past: int, rows: int = 1) -> dict[str, Any]:
    shape = (rows, 512 if rows == 1 else 256)
    return {"attn_mode": "flash_attn", "cache": cache, "batch_shape": shape, "past_len": past}


def in_chunks(model: Model, cache: Cache, ids: torch.Tensor, size: int) -> torch.Tensor:
    """Logits of every token, `size` tokens a pass."""
    parts = [
        model.forward(ids[:, i : i + size], params(cache, i, ids.shape[0]))
        for i in range(0, ids.shape[1], size)
    ]
    return torch.cat(parts, 1)


def contents(cache: Cache, length: int) -> list[torch.Tensor]:
    """What the first tokens of a cache that holds one sequence have left in it."""
    return [t.flatten(0, 1)[:length].clone() for t in cache.get_all_tensors()]


def check_chunks(model: Model, cache: Cache, chunks: tuple[int, ...]) -> None:
    ids = random_ids(1, LENGTH)
    want = in_chunks(model, cache, ids, 1)
    kept = contents(cache, LENGTH)
    assert want.shape[1] == LENGTH and not torch.equal(want[0, 0], want[0, 1])
    for size in chunks:
        for tensor in cache.get_all_tensors():
            tensor.zero_()
        assert torch.equal(in_chunks(model, cache, ids, size), want), size
        for now, before in zip(contents(cache, LENGTH), kept, strict=True):
            assert torch.equal(now, before), size


def check_batches(model: Model, batches: tuple[int, ...]) -> None:
    most = max(batches)
    ids = random_ids(most, 3)
    cache = Cache(model, 256 * most + 256)
    want = in_chunks(model, cache, ids, 3)  # most * 3 rows a pass
    for rows in batches:
        assert torch.equal(in_chunks(model, cache, ids[:rows], 1), want[:rows]), rows


@pytest.fixture
def model(tmp_path: Path, bits: int) -> Iterator[Model]:
    model = load(tmp_path, "llama", bits)
    yield model
    model.unload()


@pytest.mark.parametrize("bits", range(1, 9))
def test_chunks_of_any_size(isa: str, model: Model) -> None:
    check_chunks(model, Cache(model, 512), CHUNKS if isa != "generic" else CHUNKS[1:])


@pytest.mark.parametrize("bits", [4])
def test_chunks_on_a_quantised_cache(isa: str, model: Model) -> None:
    cache = Cache(model, 512, layer_type=CacheLayer_quant, k_bits=6, v_bits=5)
    check_chunks(model, cache, (7, LENGTH))


@pytest.mark.parametrize("bits", range(1, 9))
def test_batches_of_any_size(isa: str, model: Model) -> None:
    check_batches(model, BATCHES if isa != "generic" else (1, 16, 33))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Head norms, biases, windows."""
    model = load(tmp_path, family, 4)
    check_chunks(model, Cache(model, 512), (7, LENGTH))
    check_batches(model, (1, 5, 40))
    model.unload()
