"""Fixtures of the model tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import GOLDEN, Tiny, make_tiny

from exl3 import Config, Model
from exl3.model import placement
from exl3.settings import settings


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Factory: `tiny("qwen2", key=value)` writes that family with some config keys replaced."""
    made: dict[str, Tiny] = {}

    def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Tiny:
        name = json.dumps([family, str(dtype), changes], sort_keys=True)
        if name not in made:
            made[name] = make_tiny(tmp_path_factory.mktemp(family), family, dtype, **changes)
        return made[name]

    return make


@pytest.fixture
def golden_model() -> Model:
    """A tiny EXL3 model that another engine wrote, loaded."""
    model = Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))
    model.load()
    return model


@pytest.fixture
def made_up_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """Makes plans see CUDA devices with these free bytes."""

    def make(free: list[int]) -> None:
        def free_bytes(device: torch.device) -> int:
            return free[device.index]

        monkeypatch.setattr("exl3_ext.has_cuda", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(placement, "free_bytes", free_bytes)
        monkeypatch.setattr(placement, "held_bytes", lambda _device: 0)
        automatic = type(settings())(default_device="auto")
        monkeypatch.setattr(placement, "settings", lambda: automatic)

    return make
