"""Choosing a device by arithmetic, with made-up devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import GOLDEN

from exl3 import Cache, Config, Model
from exl3.errors import ConfigError, OutOfMemory
from exl3.model import placement
from exl3.model.load_options import LoadArguments
from exl3.model.placement import Limits, make_plan, units_of
from exl3.model.split import GIB, whole
from exl3.settings import settings

GPU = 8 * GIB
MadeUp = Callable[[list[int]], None]


@pytest.fixture
def model() -> Model:
    return Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))


def usable(limits: Limits, held: Sequence[int] = (0, 0, 0)) -> list[int | None]:
    """Of three devices, the second twice as large; None: left alone."""
    return [
        None if limits.excludes(i) else limits.usable(i, free=free, held=held[i])
        for i, free in enumerate([GPU, 2 * GPU, GPU])
    ]


def test_usable_bytes() -> None:
    half = GIB // 2
    assert usable(Limits()) == [GPU - half, 2 * GPU - half, GPU - half]
    assert usable(Limits(2)) == [GPU - 2 * GIB, 2 * GPU - 2 * GIB, GPU - 2 * GIB]
    assert usable(Limits([1.0, -1])) == [GPU - GIB, None, GPU - half]
    assert usable(Limits([100, 0], None))[:2] == [0, 2 * GPU]
    assert usable(Limits(use=1.5)) == [3 * half] * 3
    assert usable(Limits(use=[1, 0])) == [GIB, None, None]
    assert usable(Limits(use=[100])) == [GPU, None, None]
    # What this process may use includes what it has: a draft model, say.
    assert usable(Limits(use=2), [GIB, 3 * GIB, 0]) == [GIB, 0, 2 * GIB]
    bad_values: tuple[Any, ...] = ("much", ["much"], {})
    for bad in bad_values:
        with pytest.raises(ConfigError, match="reserve_per_device"):
            usable(Limits(bad))
        with pytest.raises(ConfigError, match="use_per_device"):
            usable(Limits(use=bad))


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
    model: Model,
    made_up_devices: MadeUp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made_up_devices([])
    assert make_plan(model, LoadArguments()).devices == [torch.device("cpu")]
    assert make_plan(model, LoadArguments(reserve_per_device=[0.5])).devices[0].type == "cpu"
    assert not caplog.records
    assert make_plan(model, LoadArguments(use_per_device=[8])).devices[0].type == "cpu"
    assert "use_per_device=[8] speaks of CUDA devices" in caplog.text
    made_up_devices([GIB // 2, GPU])
    assert make_plan(model, LoadArguments()).devices == [torch.device("cuda", 1)]
    plan = make_plan(model, LoadArguments(use_per_device=[0.2, 1]))
    assert plan.devices == [torch.device("cuda", 1)]
    with pytest.raises(OutOfMemory, match=r"usable are: cuda:0 0\.50 GiB of 0\.50 GiB free"):
        make_plan(model, LoadArguments(reserve_per_device=[0, -1]))
    with pytest.raises(OutOfMemory, match="usable are: no device"):
        make_plan(model, LoadArguments(use_per_device=[]))
    monkeypatch.setattr(
        placement, "settings", lambda: type(settings())(default_device="cpu"), raising=True
    )
    assert make_plan(model, LoadArguments()).devices == [torch.device("cpu")]


def test_devices_that_are_not_needed_are_not_asked(
    model: Model, made_up_devices: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question alone takes memory there, for a context."""
    asked: list[int] = []

    def free_bytes(device: torch.device) -> int:
        asked.append(device.index)
        return GPU

    def asks(**arguments: Any) -> list[int]:
        asked.clear()
        make_plan(model, LoadArguments(**arguments))
        return asked

    made_up_devices([GPU] * 4)
    monkeypatch.setattr(placement, "free_bytes", free_bytes)
    assert asks() == [0]
    assert asks(reserve_per_device=[-1, 9, 0]) == [1, 2]
    assert asks(use_per_device=[0, 5, 5, 5]) == [1]
    assert asks(device="cuda:2") == [2]


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
