"""Settings are typed, and a bad or unknown variable is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3.errors import SettingsError
from exl3.settings import Settings, describe


def test_defaults_and_values() -> None:
    assert Settings.from_environment({}).cpu_threads == 0
    got = Settings.from_environment(
        {
            "EXL3_CPU_THREADS": "3",
            "EXL3_CPU_MAX_ISA": "avx2",
            "EXL3_CACHE_DIR": "some/where",
            "EXL3_STRICT": "1",
            "PATH": "ignored",
        }
    )
    assert got.cpu_threads == 3
    assert got.cpu_max_isa == "avx2"
    assert got.cache_dir == Path("some/where")
    assert got.strict is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EXL3_CPU_THREADS", "-1"),
        ("EXL3_CPU_THREADS", "two"),
        ("EXL3_CPU_MAX_ISA", "sse"),
        ("EXL3_STRICT", "maybe"),
        ("EXL3_CUDA_MAX_CAPABILITY", "75"),
        ("EXL3_NO_SUCH", "1"),
    ],
)
def test_bad_values_are_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_environment({name: value})


def test_foreign_variable_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Settings.from_environment({"EXL3_INT8_GEMV": "0"})
    assert "EXL3_INT8_GEMV" in caplog.text


def test_document_is_current() -> None:
    page = Path(__file__).parents[2] / "doc" / "settings.md"
    assert page.read_text() == describe()
