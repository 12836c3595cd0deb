"""Conversion on a CUDA device: the same bytes twice, and the CPU's quality."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_conversion import convert, digests

from exl3.conversion.device import conversion_device, placed
from exl3.conversion.self_text import BATCH, sample_text
from exl3.errors import ConfigError
from exl3.evaluation import kl_divergence
from exl3.model import Config, Model
from exl3.tokenizer import Tokenizer


def run(arguments: list[str], folder: Path, device: str, *more: str) -> Path:
    places = ["-o", str(folder / "out"), "-w", str(folder / "work"), "-d", device]
    source_and_rest = [*arguments[:2], *arguments[6:]]
    assert convert([*source_and_rest, *places, *more]) == 0
    return folder / "out"


def load(folder: Path, device: str = "cpu") -> Model:
    model = Model.from_config(Config.from_directory(str(folder)))
    model.load(device=device)
    return model


def proxy_errors(folder: Path) -> list[float]:
    report = json.loads((folder / "conversion_report.json").read_text())
    return [layer["proxy_error"] for entry in report["modules"] for layer in entry["layers"]]


@pytest.mark.cuda
def test_same_bytes_and_equal_quality(
    device: torch.device, source: Path, arguments: list[str], tmp_path: Path
) -> None:
    here = run(arguments, tmp_path / "cpu", "cpu")
    there = run(arguments, tmp_path / "cuda", "0")
    again = run(arguments, tmp_path / "again", "0")
    assert digests(there) == digests(again)
    ids = torch.randint(512, (1, 96), generator=torch.Generator().manual_seed(0))
    plain = load(source)
    expected = kl_divergence(load(here), plain, ids).mean
    for place in ("cpu", "cuda:0"):
        assert kl_divergence(load(there, place), plain, ids).mean < 1.2 * expected + 1e-3
    assert kl_divergence(load(here, "cuda:0"), plain, ids).mean < 1.2 * expected + 1e-3
    # Gradients of so few tokens hang on their labels, and those on last bits: no layer is the same.
    ratios = [math.log(b / a) for a, b in zip(proxy_errors(here), proxy_errors(there), strict=True)]
    assert abs(sum(ratios) / len(ratios)) < 0.3


@pytest.mark.cuda
def test_layers_come_out_alike_without_the_pass(
    device: torch.device, arguments: list[str], tmp_path: Path
) -> None:
    here = run(arguments, tmp_path / "cpu", "cpu", "--no-sensitivity")
    there = run(arguments, tmp_path / "cuda", "0", "--no-sensitivity")
    for a, b in zip(proxy_errors(here), proxy_errors(there), strict=True):
        assert abs(a - b) < 0.2 * a


@pytest.mark.cuda
def test_own_text_on_the_device(device: torch.device, source: Path) -> None:
    config = Config.from_directory(str(source))
    tokenizer = Tokenizer(config)
    texts = [sample_text(config, tokenizer, seed=3, tokens=20, device=device) for _ in range(2)]
    assert texts[0].shape == (BATCH, 20) and texts[0].device.type == "cpu"
    assert torch.equal(texts[0], texts[1])


@pytest.mark.cuda
def test_resumed_gives_the_same_bytes(
    device: torch.device, arguments: list[str], tmp_path: Path
) -> None:
    whole = run(arguments, tmp_path / "whole", "0", "-cpi", "0")
    folder = tmp_path / "parts"
    places = ["-o", str(folder / "out"), "-w", str(folder / "work"), "-d", "0", "-cpi", "0"]
    first = [*arguments[:2], *arguments[6:], *places, "--max_module", "1"]
    assert convert(first) == 0
    assert convert(["-w", str(folder / "work"), "-r"]) == 0
    assert digests(folder / "out") == digests(whole)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl3_ext.has_cuda", lambda: False)
    for chosen in (None, [0], ["cpu"]):
        assert conversion_device(chosen) == torch.device("cpu")
    monkeypatch.setattr("exl3_ext.has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert conversion_device(None) == torch.device("cuda", 0)
    assert conversion_device([1]) == torch.device("cuda", 1)
    assert conversion_device(["cpu"]) == torch.device("cpu")
    for chosen in ([2], [-1]):
        with pytest.raises(ConfigError, match="there are: 0, 1, cpu"):
            conversion_device(chosen)
    with pytest.raises(ConfigError, match="one device"):
        conversion_device([0, 1])


def test_a_full_device_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate much")

    monkeypatch.setattr("exl3.conversion.stages.quantize_groups", full)
    assert convert(arguments) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "memory is full (tried to allocate much)" in shown and "-r -d cpu" in shown


@pytest.mark.cuda
def test_rows_on_the_device_only_if_they_fit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.zeros(100, 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100_000, 0))
    assert placed(state, device).is_cuda
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10_000, 0))
    assert not placed(state, device).is_cuda
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100_000, 0))
    assert not placed(state, device, copies=3).is_cuda
    assert placed(state, torch.device("cpu")) is state
