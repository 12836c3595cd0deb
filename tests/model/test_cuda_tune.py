"""Measured kernel choices of a model on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import GOLDEN, random_ids

import exl3.model.model as model_module
from exl3 import Config, Model, tuning
from exl3.model import tune as tune_module
from exl3.ops.linear_route import clear_routes
from exl3.settings import settings
from exl3.tuning import read_sections

pytestmark = pytest.mark.cuda


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    chosen = replace(settings(), cache_dir=tmp_path, cuda_tuning=True)
    monkeypatch.setattr(tuning, "settings", lambda: chosen)
    monkeypatch.setattr(model_module, "settings", lambda: chosen)
    yield tmp_path / "tuning"
    clear_routes()


def load(device: torch.device) -> Model:
    model = Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))
    model.load(device=str(device))
    return model


def test_choices_are_measured_once_and_kept(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    first = load(device)
    assert time.monotonic() - start < 20
    tune_module.tune_model(first, budget_s=60.0)
    (path,) = folder.glob("*.json")
    ((machine, choices),) = read_sections(path)
    assert machine.device == torch.cuda.get_device_name(device) and len(choices) > 20
    assert all(0 < found.seconds <= found.built_in_seconds for found in choices.values())
    ids = random_ids(2, 40, 512)
    want = [first.forward(ids), first.forward(ids[:1, :7])]
    first.unload()
    clear_routes()  # as in a new process

    def measured_again(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(tune_module.LinearTunable, "seconds", measured_again)
    second = load(device)
    got = [second.forward(ids), second.forward(ids[:1, :7])]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_measuring_leaves_no_memory(device: torch.device, folder: Path) -> None:
    model = load(device)  # kernels are loaded now
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    (path,) = folder.glob("*.json")
    path.unlink()
    tune_module.tune_model(model, budget_s=60.0)
    after = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    assert after[1] == before[1] and after[0] <= before[0] + (8 << 20)
