"""Which architectures a build of the CUDA library is for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py; it sees no GPU and a compiler from before 12.0."""
    monkeypatch.setenv("EXL3_BUILD_CUDA", "0")
    monkeypatch.setattr(sys, "argv", ["setup.py", "--name"])
    names = runpy.run_path(str(SETUP))
    known = "compute_75\ncompute_80\ncompute_90\n"
    monkeypatch.setattr(
        names["subprocess"], "run", lambda *a, **k: type("Done", (), {"stdout": known})
    )
    monkeypatch.setattr(names["shutil"], "which", lambda name: None)
    return names


def test_all_that_the_compiler_knows(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert setup["cuda_architectures"]() == ["7.5", "8.0", "9.0a"]


@pytest.mark.parametrize(
    ("named", "want"),
    [("8.6;9.0", ["8.6", "9.0a"]), ("7.5+PTX 9.0a", ["7.5+PTX", "9.0a"]), ("12.0", ["12.0"])],
)
def test_named(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, named: str, want: list[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    assert setup["cuda_architectures"]() == want


@pytest.mark.parametrize("named", ["7.0", "Ampere", "sm_80", "8.0;6.1+PTX"])
def test_others_are_refused(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    with pytest.raises(SystemExit, match=r"from 7\.5 on"):
        setup["cuda_architectures"]()


def test_flags(setup: dict[str, Any]) -> None:
    """Code that later cards may compile for themselves leaves out what only 9.0 has."""
    assert setup["code_flags"]("8.6") == "-gencode=arch=compute_86,code=sm_86"
    assert setup["code_flags"]("9.0a+PTX").split() == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]
