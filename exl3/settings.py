"""All settings, read once from `EXL3_*` environment variables. No other file reads them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from .errors import SettingsError

logger = logging.getLogger(__name__)

ISA_LEVELS = ("generic", "avx2", "avx512", "amx")

# Variables of ExLlamaV3 that an old shell profile may set: known, ignored, logged once.
_FOREIGN_PREFIX = "EXL3_"
_FOREIGN = frozenset(
    {
        "EXL3_MOE_CPU_OFFLOAD",
        "EXL3_MOE_CPU_THREADS",
        "EXL3_MOE_CPU_MAX_ISA",
        "EXL3_MOE_CPU_PIN",
        "EXL3_QC_STAGING",
        "EXL3_INT8_GEMV",
        "EXL3_FUSED_SAMPLER",
    }
)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    return Path(base) / "exl3" if base else Path.home() / ".cache" / "exl3"


def _doc(text: str, default: Any) -> Any:
    """A field with its documentation; a callable default is called once per object."""
    if callable(default):
        return field(default_factory=default, metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per variable: field `cpu_threads` is `EXL3_CPU_THREADS`."""

    cpu_threads: int = _doc("Threads of the CPU kernels; 0: one per core that we may use.", 0)
    cpu_max_isa: str = _doc(
        "Highest CPU instruction level to use: generic, avx2, avx512 or amx.", "amx"
    )
    cache_dir: Path = _doc(
        "Folder for files that can be made again (fetched models, measured kernel choices).",
        _default_cache_dir,
    )
    strict: bool = _doc("Turn warnings about ignored arguments into errors.", False)
    cpu_graph: bool = _doc(
        "Record the decode step once and replay it; 0 runs every op from Python (for checking).",
        True,
    )
    cuda_graph: bool = _doc(
        "Capture the decode step on CUDA as one graph; 0 launches every op (for checking).", True
    )
    cuda_tuning: bool = _doc(
        "Measure which kernels are fastest when a model is loaded on CUDA and keep the result in "
        "the cache folder; 0 follows the built-in rules.",
        True,
    )

    cuda_max_capability: str = _doc(
        "Highest CUDA compute capability to go by, with its shared memory, such as 7.5 (for "
        "checking); any: what the device has.",
        "any",
    )
    default_device: str = _doc(
        "Where models go that name no device: auto (a CUDA device if there is one) or cpu.",
        "auto",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read every field from its variable.

        Raises:
            SettingsError: an `EXL3_*` variable that is unknown or has a bad value.
        """
        env = os.environ if environment is None else environment  # noqa: TID251
        known = {"EXL3_" + f.name.upper(): f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in env.items():
            if not name.startswith(_FOREIGN_PREFIX) or name.startswith("EXL3_BUILD_"):
                continue
            if name in known:
                values[known[name].name] = _parse(name, known[name].name, text)
            elif name in _FOREIGN:
                logger.warning("%s is a setting of ExLlamaV3 and is ignored by exl3", name)
            else:
                raise SettingsError(
                    f"{name}: no such setting; known are {', '.join(sorted(known))}"
                )
        return cls(**values)


def _parse(name: str, key: str, text: str) -> object:
    if key == "cpu_threads":
        if not text.isdecimal() or int(text) > 1024:
            raise SettingsError(f"{name}: expected a whole number from 0 to 1024, got {text!r}")
        return int(text)
    if key == "cpu_max_isa":
        if text not in ISA_LEVELS:
            raise SettingsError(f"{name}: expected one of {', '.join(ISA_LEVELS)}, got {text!r}")
        return text
    if key == "default_device":
        if text not in ("auto", "cpu"):
            raise SettingsError(f"{name}: expected auto or cpu, got {text!r}")
        return text
    if key == "cuda_max_capability":
        if text != "any" and not re.fullmatch(r"[1-9]\d?\.\d", text):
            raise SettingsError(f"{name}: expected any or a number such as 7.5, got {text!r}")
        return text
    if key == "cache_dir":
        return Path(text).expanduser()
    if text.lower() in ("0", "false", "no"):
        return False
    if text.lower() in ("1", "true", "yes"):
        return True
    raise SettingsError(f"{name}: expected 0 or 1, got {text!r}")


@cache
def settings() -> Settings:
    """The settings of this process, read at the first call."""
    return Settings.from_environment()


def describe() -> str:
    """All settings as a Markdown table: the content of `doc/settings.md`."""
    rows = []
    for f in fields(Settings):
        default = "user cache folder" if f.name == "cache_dir" else str(f.default)
        rows.append(f"| `EXL3_{f.name.upper()}` | `{f.type}` | {default} | {f.metadata['doc']} |")
    head = "# Settings\n\nGenerated from `exl3/settings.py`. A bad or unknown `EXL3_*` is an error."
    table = "| variable | type | default | meaning |\n|---|---|---|---|"
    return f"{head}\n\n{table}\n" + "\n".join(rows) + "\n"
