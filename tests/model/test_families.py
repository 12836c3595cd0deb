"""Every family against Transformers, on tiny random weights; and the engine's equivalences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Tiny, random_ids

from exl3 import Cache, Model

Make = Callable[..., Tiny]
TOLERANCE = 5e-4  # float32 against float32, summed in another order; logits reach +-20
CACHED = 2e-2  # keys and values in float16: 2^-11 of values of about 3, over three layers


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual[..., : expected.shape[-1]], expected, rtol=tolerance, atol=tolerance
    )


def paged(cache: Cache, table: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    return {
        "attn_mode": "flash_attn",
        "cache": cache,
        "block_table": torch.tensor(table, dtype=torch.int32),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }


def rectangle(cache: Cache, shape: tuple[int, int], past: int) -> dict[str, Any]:
    return {"attn_mode": "flash_attn", "cache": cache, "batch_shape": shape, "past_len": past}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny: Make, family: str) -> None:
    made = tiny(family)
    ids = random_ids(2, 40)
    logits = made.load().forward(ids)
    assert logits.dtype == torch.float32 and logits.shape == (2, 40, 384)
    assert (logits[..., 300:] == -torch.inf).all()
    close(logits, made.expected(ids), TOLERANCE)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_head_counts(tiny: Make, family: str, heads: tuple[int, int]) -> None:
    made = tiny(family, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    ids = random_ids(1, 24)
    close(made.load().forward(ids), made.expected(ids), TOLERANCE)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_sliding_window_edges(tiny: Make, family: str, length: int) -> None:
    made, ids = tiny(family), random_ids(1, length, seed=length)
    model = made.load()
    close(model.forward(ids), made.expected(ids), TOLERANCE)
    cache = Cache(model, 256)
    close(model.forward(ids, rectangle(cache, (1, 256), 0)), made.expected(ids), CACHED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights(tiny: Make, dtype: torch.dtype) -> None:
    """float16 weights compute in float32; bfloat16 ones in bfloat16 unless asked otherwise."""
    made, ids = tiny("llama", dtype), random_ids(1, 20)
    expected = made.expected(ids)
    model = made.load()
    close(model.forward(ids), expected, TOLERANCE if dtype == torch.float16 else 0.5)
    if dtype == torch.bfloat16:
        model.unload()
        model.config.infer_params.plain_dtype = torch.float32
        model.load()
        close(model.forward(ids), expected, TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_uncached(tiny: Make, family: str) -> None:
    made, ids = tiny(family), random_ids(2, 30)
    model = made.load()
    whole = model.forward(ids)
    cache = Cache(model, 1024)
    close(model.forward(ids, rectangle(cache, (2, 256), 0)), whole, CACHED)
    steps = [model.forward(ids[:, i : i + 1], rectangle(cache, (2, 512), i)) for i in range(30)]
    close(torch.cat(steps, 1), whole, CACHED)


@pytest.mark.parametrize("cuts", [(1,), (7, 8, 29), (255, 256, 257)], ids=str)
def test_chunked_equals_whole(tiny: Make, cuts: tuple[int, ...]) -> None:
    model = tiny("qwen2").load()
    ids = random_ids(1, 300 if cuts[-1] > 100 else 30)
    cache, other = Cache(model, 512), Cache(model, 512)
    whole = model.forward(ids, rectangle(cache, (1, 512), 0))
    edges = [0, *cuts, ids.shape[1]]
    parts = [model.forward(ids[:, a:b], rectangle(other, (1, 512), a)) for a, b in pairwise(edges)]
    close(torch.cat(parts, 1), whole, 3e-3)  # a float16 key may round the other way


def test_batched_equals_single_and_scattered_equals_contiguous(tiny: Make) -> None:
    model = tiny("llama").load()
    cache = Cache(model, 256 * 8)
    ids = random_ids(3, 20)
    single = [model.forward(row[None], rectangle(cache, (1, 256), 0)) for row in ids]
    for tensor in cache.get_all_tensors():
        tensor.fill_(float("nan"))
    tables = [[6, -1], [0, 10**6], [3, 3]]  # entries past the used ones are never read
    batched = model.forward(ids, paged(cache, tables, [0, 0, 0]))
    close(batched, torch.cat(single), 1e-4)
    step = model.forward(ids[:, :1], paged(cache, tables, [20, 20, 20]))
    assert step.shape[:2] == (3, 1) and not step.isnan().any()


def test_rows_of_different_length(tiny: Make) -> None:
    model = tiny("qwen3").load()
    cache = Cache(model, 256 * 4)
    ids, lengths = random_ids(2, 12), [5, 11]
    expected = []
    for row, length in zip(ids, lengths, strict=True):
        expected.append(model.forward(row[None, : length + 1])[:, -1:])
    for row, (length, page) in enumerate(zip(lengths, (2, 1), strict=True)):
        model.prefill(ids[row : row + 1, :length], paged(cache, [[page]], [0]))
    last = torch.stack([ids[row, length] for row, length in enumerate(lengths)])[:, None]
    step = model.forward(last, paged(cache, [[2], [1]], lengths))
    close(step, torch.cat(expected), CACHED)


def test_prefill_then_step_equals_forward(tiny: Make) -> None:
    model = tiny("mistral").load()
    cache, ids = Cache(model, 512), random_ids(1, 25)
    expected = model.forward(ids)[:, -1:]
    model.prefill(ids[:, :24], rectangle(cache, (1, 256), 0))
    close(model.forward(ids[:, 24:], rectangle(cache, (1, 256), 24)), expected, CACHED)


def test_positions_and_last_tokens(tiny: Make) -> None:
    model, ids = tiny("llama").load(), random_ids(2, 10)
    base = model.forward(ids)
    torch.testing.assert_close(model.forward(ids, {"last_tokens_only": 3}), base[:, -3:])
    shifted = torch.arange(7, 17).expand(2, 10)
    for params in (
        {"position_ids": shifted},
        {"positions": torch.tensor([7, 7])},
        {"position": 7},
    ):
        close(model.forward(ids, params), base[..., :300], 1e-3)  # RoPE is relative
    uneven = torch.arange(10).expand(2, 10) * 2
    difference = model.forward(ids, {"position_ids": uneven})[..., :300] - base[..., :300]
    assert difference.abs().max() > 0.1


def test_layer_map(tiny: Make) -> None:
    made, ids = tiny("llama"), random_ids(1, 12)
    plain, repeated = made.load(), made.load(layer_map="..1,0..")
    assert [b.layer for b in repeated.blocks] == [0, 1, 0, 1, 2]
    assert repeated.get_layer_instances(1) == [1, 3]
    x = plain.embedding.forward(ids[0])
    from exl3.modules import Batch

    batch = Batch.dense(1, 12)
    for layer in (0, 1, 0, 1, 2):
        x = plain.blocks[layer].forward(x, batch)
    expected = plain.head.logits(x, batch, plain.final_norm)
    whole = repeated.forward(ids)
    close(whole[0, :, :300], expected[:, :300], 1e-5)
    cache = Cache(repeated, 256)
    assert cache.num_layers == 5
    close(repeated.forward(ids, rectangle(cache, (1, 256), 0))[..., :300], whole[..., :300], CACHED)


def test_a_tied_head_may_have_its_own_tensor(tiny: Make, tmp_path: Any) -> None:
    """The flag says tied, but the file has `lm_head.weight`: the tensor wins."""
    from shutil import copytree

    from safetensors.torch import load_file, save_file

    made, ids = tiny("qwen2"), random_ids(1, 5)
    directory = tmp_path / "own"
    copytree(made.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, directory / "model.safetensors")
    own: Model = Tiny(directory, None).load()
    close(own.forward(ids)[..., :300], 2 * made.load().forward(ids)[..., :300], 1e-5)
