"""Fixtures of the conversion tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_conversion import fake_encode, tiny_tensors, write_source


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tied head."""
    return write_source(tmp_path_factory.mktemp("models") / "tiny", tiny_tensors())


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 3000 tokens of text."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = " ".join(f"word {i} of {i * i % 97} and more;" for i in range(300))
    file.write_text(words)
    return file


@pytest.fixture
def arguments(source: Path, text_file: Path, tmp_path: Path) -> list[str]:
    """A complete command line, of a conversion that takes a second or two."""
    places = ["-i", str(source), "-o", str(tmp_path / "out"), "-w", str(tmp_path / "work")]
    return [*places, "-b", "2.5", "-hb", "3", "-cr", "6", "-cc", "48", "-cd", str(text_file)]


@pytest.fixture
def fast_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions in a tenth of a second, whose weights mean nothing."""
    for module in ("ldlq", "scale"):
        monkeypatch.setattr(f"exl3.quant.{module}.trellis_encode", fake_encode)


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    """Handlers that a conversion sets up go away with the test."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
