"""Choosing a device by arithmetic, with made-up devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import GOLDEN

from exl3 import Cache, Config, Model
from exl3.errors import ConfigError, OutOfMemory
from exl3.model import placement
from exl3.model.load_options import LoadArguments
from exl3.model.placement import GIB, automatic_device, check_room, first_fit, needed_bytes, rooms
from exl3.settings import settings

GPU = 8 * GIB


@pytest.fixture
def model() -> Model:
    return Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))


def test_rooms() -> None:
    free = [GPU, 2 * GPU, GPU]
    assert rooms(free, None, None) == [f - GIB // 2 for f in free]
    assert rooms(free, 2, None) == [GPU - 2 * GIB, 2 * GPU - 2 * GIB, GPU - 2 * GIB]
    assert rooms(free, [1.0, -1], None) == [GPU - GIB, 0, GPU - GIB // 2]
    assert rooms(free, [100], None)[0] == 0
    assert rooms(free, None, 1.5) == [3 * GIB // 2] * 3
    assert rooms(free, None, [1, 0]) == [GIB, 0, 0]
    assert rooms(free, None, [100])[0] == GPU
    for bad in ("much", ["much"], {}):
        with pytest.raises(ConfigError, match="reserve_per_device"):
            rooms(free, bad, None)  # type: ignore[arg-type]


def test_first_device_with_room() -> None:
    assert first_fit(5, [4, 6, 9], [4, 6, 9]) == 1
    assert first_fit(4, [4, 6], [4, 6]) == 0
    with pytest.raises(OutOfMemory) as found:
        first_fit(7 * GIB, [GIB, 0], [2 * GIB, 5 * GIB])
    text = str(found.value)
    assert "needs 7.00 GiB" in text
    assert "cuda:0 1.00 GiB of 2.00 GiB free" in text and "cuda:1 0.00 GiB of 5.00 GiB" in text


def test_needs_grow_with_weights_cache_and_passes(model: Model) -> None:
    plain = needed_bytes(model, LoadArguments())
    files = sum(info.n_bytes for info in map(model.config.stc.info, model.config.stc.keys()))
    assert plain > files
    longer = needed_bytes(model, LoadArguments(max_chunk_size=1 << 20))
    assert longer > plain
    cache = Cache(model, 1 << 16)
    assert needed_bytes(model, LoadArguments()) == plain + cache.storage_size()


def fake_devices(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    monkeypatch.setattr("exl3_ext.has_cuda", lambda: bool(free))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    index: Any = lambda d: d if isinstance(d, int) else d.index  # noqa: E731
    monkeypatch.setattr(placement, "free_bytes", lambda device: free[index(device)])
    monkeypatch.setattr(
        placement, "settings", lambda: type(settings())(default_device="auto"), raising=True
    )


def test_automatic_choice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = LoadArguments()
    fake_devices(monkeypatch, [])
    assert automatic_device(model, arguments) == torch.device("cpu")
    fake_devices(monkeypatch, [GIB // 2, GPU])
    assert automatic_device(model, arguments) == torch.device("cuda", 1)
    assert automatic_device(model, LoadArguments(use_per_device=[0.9, 1])).index == 1
    with pytest.raises(OutOfMemory, match=r"cuda:1 0\.00 GiB of 8\.00 GiB free"):
        automatic_device(model, LoadArguments(reserve_per_device=[0, -1]))
    monkeypatch.setattr(
        placement, "settings", lambda: type(settings())(default_device="cpu"), raising=True
    )
    assert automatic_device(model, arguments) == torch.device("cpu")


def test_a_device_that_runs_full_meanwhile(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.modules[2], "load", full)
    monkeypatch.setattr(placement, "free_bytes", lambda _device: 3 * GIB)
    with pytest.raises(OutOfMemory, match=r"needs \d\.\d\d GiB .* 3\.00 GiB are free now"):
        model.load(device="cpu")
    assert not any(module.loaded for module in model.modules)


def test_named_devices_are_checked_before_reading(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_devices(monkeypatch, [GIB // 2])
    with pytest.raises(OutOfMemory, match=r"cuda:0 has 0\.50 GiB free"):
        model.load(device="cuda:0")
    assert not any(module.loaded for module in model.modules)
    check_room(model, LoadArguments(), torch.device("cpu"))
