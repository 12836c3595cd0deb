"""What a source of tensors and a source of a model are."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .reader import LoadMetrics

# Never copied into a converted model: weights in any form, and the files that are rewritten.
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})
_LICENCES = ("LICEN[CS]E*", "NOTICE*", "COPYING*")
_REWRITTEN = frozenset({"config.json", "quantization_config.json"})


# `TensorSource.list` hides the built-in name inside that class.
Names = list[str]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a source, without its data; `filename` is the full path of its file."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    n_bytes: int
    filename: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie: row-major, little-endian, from `offset` on."""

    path: Path
    offset: int
    identity: tuple[int, int]
    """(size, mtime_ns) of the file when it was indexed."""


class TensorSource(ABC):
    """Tensors by name. Reading is thread-safe; nothing is kept open between calls."""

    @abstractmethod
    def keys(self) -> Sequence[str]:
        """All names, sorted."""

    @abstractmethod
    def info(self, key: str) -> TensorInfo:
        """Shape, dtype and size. Raises ConfigError if there is no such tensor."""

    @abstractmethod
    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor into host memory of its own, converted to `dtype` if given.

        Raises:
            ConfigError: no such tensor.
            FormatError: the file changed or is damaged; names file and key.
        """

    def place(self, key: str) -> Place | None:
        """Where a tensor lies, if a file holds its bytes as they are; else None.

        Raises:
            ConfigError: no such tensor.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest that changes when the tensors do, but not when the files are moved."""

    def has(self, key: str) -> bool:
        return key in self

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    @property
    def metrics(self) -> LoadMetrics:
        """Load figures; sources that read no files have none."""
        return LoadMetrics()

    def list(self, prefix: str) -> Names:
        """Names of the module `prefix`: the name itself and all below `prefix.`."""
        dotted = prefix if not prefix or prefix.endswith(".") else prefix + "."
        return [key for key in self.keys() if key == prefix or key.startswith(dotted)]

    def close(self) -> None:  # noqa: B027 (most sources hold nothing)
        """Release what the source holds."""

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _missing(self, key: str, where: str) -> ConfigError:
        near = [k for k in self.keys() if k.split(".")[-2:] == key.split(".")[-2:]][:3]
        hint = f"; similar names there: {', '.join(near)}" if near else ""
        return ConfigError(f"{where}: no tensor {key!r} among {len(self.keys())}{hint}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as found on disk.

    For a GGUF file `directory` is a folder into which config, tokenizer and chat template were
    rebuilt from its metadata; otherwise the model directory itself. `origin` is what was opened.
    """

    config_dict: dict[str, Any]
    stc: TensorSource
    directory: str
    config_filename: str
    origin: str

    def files(self) -> Sequence[Path]:
        """Files that a converted model takes along unchanged: tokenizer, template, licence..."""
        found = [
            file
            for file in sorted(Path(self.directory).iterdir())
            if file.is_file()
            and not file.name.startswith(".")
            and file.suffix.lower() not in _WEIGHT_SUFFIXES
            and not file.name.endswith(".index.json")
            and file.name not in _REWRITTEN
        ]
        return found + self._licences()

    def _licences(self) -> list[Path]:
        """Licence files beside a GGUF file that has its folder to itself."""
        origin = Path(self.origin)
        if origin.is_dir() or sum(1 for _ in origin.parent.glob("*.gguf")) != 1:
            return []
        return [file for name in _LICENCES for file in sorted(origin.parent.glob(name))]

    def fingerprint(self) -> str:
        """Digest of the tensors and the configuration together."""
        text = json.dumps(self.config_dict, sort_keys=True)
        return hashlib.sha256((self.stc.fingerprint() + text).encode("utf-8")).hexdigest()
