"""A model on CUDA: golden logits, the CPU's results, captured steps, batches."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_exl3 import relative_error
from tiny_models import GOLDEN, make_tiny, random_ids

from exl3 import Cache, Config, Model
from exl3.errors import UnsupportedError
from exl3.model.decode import DecodeGraphs
from exl3.model.load_options import LoadArguments
from exl3.modules import Batch, LoadOptions

HALF = 0.01  # float16 activations: relative to the standard deviation of the logits
ROUNDED = 0.05  # and the CPU's 8-bit activations


def load(device: torch.device | str) -> Model:
    model = Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))
    model.load(device=str(device))
    return model


@pytest.fixture
def cuda_model(device: torch.device) -> Model:
    return load(device)


def decode(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position, one step at a time; (bsz, length, V_pad) on the host."""
    cache = Cache(model, 256 * ids.shape[0])
    params: dict[str, Any] = {"attn_mode": "flash_attn", "cache": cache}
    params["batch_shape"] = (ids.shape[0], 256)
    steps = [
        model.forward(ids[:, i : i + 1], {**params, "past_len": i}).cpu()
        for i in range(ids.shape[1])
    ]
    cache.detach_from_model()
    return torch.cat(steps, 1)


@pytest.mark.cuda
def test_golden_logits(cuda_model: Model) -> None:
    golden = load_file(GOLDEN / "tiny_llama_exl3.logits.safetensors")
    ids, expected = golden["input_ids"], golden["logits"]
    for params in ({}, {"reconstruct": True}):
        got = cuda_model.forward(ids, params)[0]
        assert got.dtype == torch.float32 and got.is_cuda
        assert relative_error(got.cpu(), expected) < HALF


@pytest.mark.cuda
def test_cpu_equals_cuda_in_every_mode(cuda_model: Model) -> None:
    ids = random_ids(2, 40, 512)
    want = load("cpu").forward(ids)
    whole = cuda_model.forward(ids).cpu()
    assert relative_error(whole, want) < ROUNDED
    assert relative_error(decode(cuda_model, ids), whole) < HALF
    cache = Cache(cuda_model, 1024)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    cuda_model.prefill(ids[:, :33], {**params, "past_len": 0})
    rest = cuda_model.forward(ids[:, 33:], {**params, "past_len": 33}).cpu()
    assert relative_error(rest, whole[:, 33:]) < HALF
    last = cuda_model.forward(ids[:, 33:], {**params, "past_len": 33, "last_tokens_only": 1})
    assert relative_error(last.cpu(), whole[:, -1:]) < HALF


@pytest.mark.cuda
def test_captured_step_equals_single_ops(
    cuda_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(3, 12, 512)
    captured = decode(cuda_model, ids)
    assert not cuda_model._graphs._refused
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    assert torch.equal(decode(cuda_model, ids), captured)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captured_step_of_a_plain_model(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    tiny = make_tiny(tmp_path, "qwen3", dtype)
    model = Model.from_config(Config.from_directory(str(tiny.directory)))
    model.load(device=str(device))
    ids = random_ids(3, 12, 300)
    captured = decode(model, ids)
    assert not model._graphs._refused and model._graphs._linears
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    assert torch.equal(decode(model, ids), captured)
    assert relative_error(captured, model.forward(ids).cpu()) < ROUNDED


@pytest.mark.cuda
def test_attention_may_round_as_products_may(device: torch.device, tmp_path: Path) -> None:
    """As float16 where float32 products may read fewer bits, and only there."""
    tiny = make_tiny(tmp_path, "llama")
    model = Model.from_config(Config.from_directory(str(tiny.directory)))
    block = model.blocks[0]
    block.load(model.config.stc, LoadOptions(torch.float32, device))
    x = torch.randn(260, block.attention_norm.dim, device=device)
    batch = Batch.dense(2, 130).to(device)
    exact = block.forward(x.clone(), batch)
    torch.set_float32_matmul_precision("high")
    try:
        rounded = block.forward(x.clone(), batch)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert rounded.dtype == torch.float32
    assert 1e-6 < relative_error(rounded.cpu(), exact.cpu()) < 3e-3


@pytest.mark.cuda
def test_steps_are_captured_again_after_unloading(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that all graphs share outlives the last of them."""
    results = []
    for _ in range(3):
        model = load(device)
        results.append(decode(model, random_ids(2, 5, 512)))
        model.unload()
        del model
        gc.collect()
    assert "recorded step failed" not in caplog.text
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.cuda
def test_long_prompts_in_one_pass_or_in_parts(cuda_model: Model) -> None:
    ids = random_ids(2, 200, 512)
    cache = Cache(cuda_model, 1024)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    whole = cuda_model.forward(ids, {**params, "past_len": 0}).cpu()
    keys = cache.kv(1)[0].clone()
    first = cuda_model.forward(ids[:, :33], {**params, "past_len": 0}).cpu()
    rest = cuda_model.forward(ids[:, 33:], {**params, "past_len": 33}).cpu()
    assert relative_error(torch.cat([first, rest], 1), whole) < HALF
    torch.testing.assert_close(cache.kv(1)[0], keys, rtol=0.01, atol=0.01)
    assert relative_error(cuda_model.forward(ids).cpu(), whole) < HALF


@pytest.mark.cuda
def test_runs_repeat(cuda_model: Model) -> None:
    ids = random_ids(3, 70, 512)
    assert torch.equal(cuda_model.forward(ids), cuda_model.forward(ids))
    assert torch.equal(decode(cuda_model, ids[:, :9]), decode(cuda_model, ids[:, :9]))


@pytest.mark.cuda
def test_decode_steps_allocate_nothing(cuda_model: Model) -> None:
    cache = Cache(cuda_model, 512)
    params: dict[str, Any] = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    ids = random_ids(2, 1, 512)

    def run(past: int) -> None:
        cuda_model.forward(ids, {**params, "past_len": past})

    for past in range(3):
        run(past)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for past in range(3, 40):
        run(past)
    after = torch.cuda.memory_stats()
    for figure in ("num_device_alloc", "reserved_bytes.all.current", "active_bytes.all.current"):
        assert after[figure] == before[figure], figure


@pytest.mark.cuda
def test_batched_equals_single(cuda_model: Model) -> None:
    ids = random_ids(3, 10, 512)
    together = decode(cuda_model, ids)
    for row in range(3):
        assert (
            relative_error(decode(cuda_model, ids[row : row + 1]), together[row : row + 1]) < HALF
        )


@pytest.mark.cuda
def test_reload_on_the_cpu(cuda_model: Model) -> None:
    ids = random_ids(1, 9, 512)
    there = cuda_model.forward(ids).cpu()
    cuda_model.unload()
    cuda_model.load(device="cpu")
    assert relative_error(cuda_model.forward(ids), there) < ROUNDED


def test_devices_without_kernels_are_refused() -> None:
    for device in ("meta", "cuda:99"):
        with pytest.raises(UnsupportedError, match="no such device"):
            LoadArguments(device=device).check()
