"""The built library and the wheel's promises."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import exl3_ext

LIBRARY = Path(exl3_ext.__file__).parent / "_cpu.so"


def test_missing_library_says_how_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exl3_ext, "_HERE", tmp_path)
    with pytest.raises(ImportError, match="make build"):
        exl3_ext.load.__wrapped__()


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_library_uses_no_python_or_unstable_torch_symbols() -> None:
    """One build serves every Python and every torch from 2.10: only C shims may be imported."""
    out = subprocess.run(
        ["nm", "-D", "--undefined-only", "-C", str(LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [line.split()[-1] for line in out.splitlines()]
    assert not [n for n in names if n.startswith(("Py", "_Py"))]
    assert not [n for n in names if n.startswith(("c10::", "at::", "torch::"))]
    assert [n for n in names if n.startswith(("aoti_torch_", "torch_"))]
