"""Choosing a device by arithmetic, with made-up devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import GOLDEN

from exl3 import Cache, Config, Model
from exl3.errors import ConfigError, OutOfMemory
from exl3.model import placement
from exl3.model.load_options import LoadArguments
from exl3.model.placement import make_plan, units_of, usable_bytes
from exl3.model.split import GIB, whole
from exl3.settings import settings

GPU = 8 * GIB
MadeUp = Callable[[list[int]], None]


@pytest.fixture
def model() -> Model:
    return Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))


def test_usable_bytes() -> None:
    free, held = [GPU, 2 * GPU, GPU], [0, 0, 0]
    assert usable_bytes(free, held, None, None) == [f - GIB // 2 for f in free]
    assert usable_bytes(free, held, 2, None) == [GPU - 2 * GIB, 2 * GPU - 2 * GIB, GPU - 2 * GIB]
    assert usable_bytes(free, held, [1.0, -1], None) == [GPU - GIB, 0, GPU - GIB // 2]
    assert usable_bytes(free, held, [100], None)[0] == 0
    assert usable_bytes(free, held, None, 1.5) == [3 * GIB // 2] * 3
    assert usable_bytes(free, held, None, [1, 0]) == [GIB, 0, 0]
    assert usable_bytes(free, held, None, [100])[0] == GPU
    # What this process may use includes what it has: a draft model, say.
    assert usable_bytes(free, [GIB, 3 * GIB, 0], None, 2) == [GIB, 0, 2 * GIB]
    for bad in ("much", ["much"], {}):
        with pytest.raises(ConfigError, match="reserve_per_device"):
            usable_bytes(free, held, bad, None)  # type: ignore[arg-type]


def test_needs_grow_with_weights_cache_and_passes(model: Model) -> None:
    def needed(**arguments: int) -> int:
        units = units_of(model, LoadArguments(**arguments))
        return whole(units, torch.device("cpu")).parts[0].needed

    files = sum(info.n_bytes for info in map(model.config.stc.info, model.config.stc.keys()))
    plain = needed()
    assert plain > files
    assert needed(max_chunk_size=1 << 20) > plain
    assert needed(max_output_size=1 << 20) > plain
    cache = Cache(model, 1 << 16)
    assert needed() == plain + cache.storage_size()


def test_automatic_choice(
    model: Model, made_up_devices: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_devices([])
    assert make_plan(model, LoadArguments()).devices == [torch.device("cpu")]
    made_up_devices([GIB // 2, GPU])
    assert make_plan(model, LoadArguments()).devices == [torch.device("cuda", 1)]
    plan = make_plan(model, LoadArguments(use_per_device=[0.2, 1]))
    assert plan.devices == [torch.device("cuda", 1)]
    with pytest.raises(OutOfMemory, match=r"cuda:1 0\.00 GiB of 8\.00 GiB free"):
        make_plan(model, LoadArguments(reserve_per_device=[0, -1]))
    monkeypatch.setattr(
        placement, "settings", lambda: type(settings())(default_device="cpu"), raising=True
    )
    assert make_plan(model, LoadArguments()).devices == [torch.device("cpu")]


def test_a_device_that_runs_full_meanwhile(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.modules[2], "load", full)
    monkeypatch.setattr(placement, "free_bytes", lambda _device: 3 * GIB)
    with pytest.raises(OutOfMemory, match=r"cpu ran .* needs \d\.\d\d GiB .* 3\.00 GiB are free"):
        model.load(device="cpu")
    assert not any(module.loaded for module in model.modules)


def test_named_devices_are_checked_before_reading(model: Model, made_up_devices: MadeUp) -> None:
    made_up_devices([GIB // 2])
    with pytest.raises(OutOfMemory, match=r"cuda:0 0\.50 GiB of 0\.50 GiB free"):
        model.load(device="cuda:0")
    assert not any(module.loaded for module in model.modules)
