"""Reading tensors ahead of their use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl3.errors import ConfigError, FormatError
from exl3.loader import SafetensorsCollection, save_tensors, staging
from exl3.loader.staging import Staged

CPU = torch.device("cpu")


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"m.{i}.w": torch.randn(60 + i, 40, generator=generator) for i in range(30)}
    found |= {"empty": torch.zeros(0, 3), "one": torch.tensor(5, dtype=torch.int32)}
    save_tensors(tmp_path / "model.safetensors", found)
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and no more than a few tensors ahead."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "AHEAD_BYTES", 30_000)


def check(tensors: dict[str, Tensor], folder: Path, device: torch.device) -> None:
    source = SafetensorsCollection(folder)
    keys = [key for key in tensors if key != "m.7.w"]
    with Staged(source, dict.fromkeys(keys, device)) as staged:
        order = [*keys[5:], *keys[:5], "m.7.w"]  # not quite as planned
        for key in order:
            got = staged.get(key)
            assert got.device.type == (device.type if key != "m.7.w" else "cpu")
            assert torch.equal(got.cpu(), tensors[key]), key
        again = staged.get("m.0.w", dtype=torch.float64)
        assert again.device.type == "cpu" and again.dtype == torch.float64
        assert staged.has("one") and staged.info("one").shape == ()
        with pytest.raises(ConfigError, match="no tensor"):
            staged.get("nothing")
    assert source.metrics.n_bytes > sum(t.numel() * t.element_size() for t in tensors.values())


def test_same_tensors(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    check(tensors, tmp_path, CPU)


@pytest.mark.cuda
def test_same_tensors_on_a_device(
    device: torch.device, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    for _ in range(3):
        check(tensors, tmp_path, device)


def test_not_everything_is_read_ahead(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    source = SafetensorsCollection(tmp_path)
    with Staged(source, dict.fromkeys(tensors, CPU)) as staged:
        staged.get("m.0.w")
        held = sum(item.tensor.numel() * 4 for item in staged._items.values())
        assert 20_000 < held < 50_000
    assert not staged._items


def test_damage_is_reported_where_the_tensor_is_asked_for(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    source = SafetensorsCollection(tmp_path)
    file.write_bytes(file.read_bytes()[:-50_000])
    with (
        Staged(source, dict.fromkeys(tensors, CPU)) as staged,
        pytest.raises(FormatError, match="changed since it was indexed"),
    ):
        staged.get("m.3.w")
