"""Layer splits on CUDA: over one device in parts, and over several where there are any."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from peft_adapters import PeftAdapter
from split_models import load_split
from tiny_models import GOLDEN, random_ids

from exl3 import Cache, CacheLayer_quant, Config, Model
from exl3.cache.page_io import PageIO
from exl3.model.decode import DecodeGraphs
from exl3.model.lora import LoRA


def new_model() -> Model:
    return Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))


def use(model: Model, extra: dict[str, Any] | None = None, **layer: Any) -> list[torch.Tensor]:
    """Logits of every kind of pass, on the host."""
    ids, extra = random_ids(2, 90, 512), extra or {}
    cache = Cache(model, 512, **layer)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256), **extra}
    found = [model.forward(ids, extra)]
    model.prefill(ids[:, :80], params)
    found.append(model.forward(ids[:, 80:85], {**params, "past_len": 80, "last_tokens_only": 2}))
    found += [model.forward(ids[:, i : i + 1], {**params, "past_len": i}) for i in range(85, 90)]
    cache.detach_from_model()
    return [logits.cpu() for logits in found]


def use_many(model: Model) -> None:
    """Captured steps whose memory is worth giving back: weights are decoded for so many rows."""
    cache = Cache(model, 256 * 200)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (200, 256)}
    for past in range(2):
        model.forward(random_ids(200, 1, 512), {**params, "past_len": past})
    assert model._graphs._steps[cache]
    cache.detach_from_model()


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(params=["one device", pytest.param("all devices", marks=pytest.mark.multi_gpu)])
def devices(request: pytest.FixtureRequest, device: torch.device) -> list[torch.device]:
    """Three parts on one device, or a part on each of several."""
    if request.param == "one device":
        return [device] * 3
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())][:5]


@pytest.fixture
def expected(device: torch.device) -> Model:
    model = new_model()
    model.load(device=str(device))
    return model


@pytest.mark.cuda
def test_equal_to_one_device(
    devices: list[torch.device], expected: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps and single ops give the bits of the model on one device."""
    split = load_split(new_model(), devices)
    assert len(split.segments) == len(devices) and split.output_device == devices[-1]
    assert same(use(split), use(expected))
    assert not split._graphs._refused and not split._graphs._warned
    quantised = {"layer_type": CacheLayer_quant, "k_bits": 5, "v_bits": 4}
    assert same(use(split, **quantised), use(expected, **quantised))
    want = use(expected)
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    assert same(use(split), want)


@pytest.mark.cuda
def test_a_plain_head_on_a_device_of_its_own(devices: list[torch.device], expected: Model) -> None:
    found = []
    for model in (expected, load_split(new_model(), [devices[0]] * 4 + [devices[-1]])):
        head = model.head
        head.plain, head.weight = head.weight_dense().t().contiguous().half(), None
        found.append(use(model))
        assert not model._graphs._refused and not model._graphs._warned
    assert model.segments[-1].blocks == ()
    assert same(*found)


@pytest.mark.cuda
def test_adapters_and_pages(devices: list[torch.device], expected: Model, tmp_path: Any) -> None:
    split = load_split(new_model(), devices)
    found = []
    for model in (split, expected):
        lora = LoRA.from_directory(model, PeftAdapter(model).save(tmp_path, f"{id(model)}"))
        found += [use(model), use(model, {"loras": [[lora], []]})]
    assert same(found[0], found[2]) and same(found[1], found[3])
    cache = Cache(split, 768)
    for tensor in cache.get_all_tensors():
        tensor.copy_(torch.randn(tensor.shape))
    io = PageIO([cache])
    (buffer,) = io.buffers(1)
    io.save(2, buffer)
    io.fence().wait()
    io.load(buffer, 1)
    cache.copy_page(cache, 2, 0, 256)
    for tensor in cache.get_all_tensors():
        assert torch.equal(tensor[0], tensor[2]) and torch.equal(tensor[1], tensor[2])


@pytest.mark.cuda
def test_unload_returns_the_memory_of_every_device(devices: list[torch.device]) -> None:
    counts = []
    for _ in range(3):
        model = load_split(new_model(), devices)
        use(model)
        use_many(model)
        assert all(torch.cuda.memory_allocated(device) for device in devices)
        model.unload()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        counts.append(
            [
                (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
                for device in devices
            ]
        )
    assert counts[1] == counts[2]
    # The memory of captured steps is gone, too.
    pools = [tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()]
    assert set(pools) <= {(0, 0)}


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_given_sizes_make_a_split() -> None:
    """The plan of the public arguments, on whatever devices there are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    from exl3.model.load_options import LoadArguments
    from exl3.model.placement import OVERHEAD_BYTES, units_of
    from exl3.model.split import GIB

    model = new_model()
    units = units_of(model, LoadArguments())
    first = OVERHEAD_BYTES + units[0].working + sum(unit.resident for unit in units[:3])
    held = torch.cuda.memory_allocated(0)
    model.load(use_per_device=[(first + held) / GIB, 100])
    assert [str(device) for device in model.active_devices] == ["cuda:0", "cuda:1"]
    assert [len(segment.blocks) for segment in model.segments] == [2, 1]
    alone = new_model()
    alone.load(device="cuda:1")
    assert same(use(model), use(alone))
