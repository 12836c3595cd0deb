"""A directory of safetensors files as one source of tensors."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError, FormatError
from ..util.file import read_json, storage_errors
from .base import Place, TensorInfo, TensorSource
from .header import Entry, read_header
from .reader import LoadMetrics, RangeReader

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
LOAD_METHODS = ("mt_fread", "python")
# A fingerprint hashes this much at the start, middle and end of every tensor.
SAMPLE_BYTES = 4096


class SafetensorsCollection(TensorSource):
    """All `*.safetensors` of a directory, their headers read and checked at once.

    Args:
        directory: the model directory; a single file is also accepted.
        load_method: "mt_fread" (or None): large tensors are read by several threads;
            "python": one read after another.
        tensor_name_fixes: parts of tensor names to replace, old to new, in the given order.
    Raises:
        ConfigError: no such directory, no safetensors in it, or an unknown load method.
        FormatError: a damaged file, an index that names absent shards or tensors, or one name
            in two files with no index to choose between them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        load_method: str | None = None,
        tensor_name_fixes: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = str(directory)
        self.load_method = load_method or LOAD_METHODS[0]
        if self.load_method not in LOAD_METHODS:
            raise ConfigError(
                f"load_method {load_method!r}: expected one of {', '.join(LOAD_METHODS)}"
            )
        self._reader = RangeReader(threaded=self.load_method == "mt_fread")
        paths = _shards(Path(directory))
        self._headers = {path.name: read_header(path) for path in paths}
        self._entries = self._merge(dict(tensor_name_fixes or {}))
        self._keys = sorted(self._entries)

    @property
    def metrics(self) -> LoadMetrics:
        return self._reader.metrics

    def metadata(self, filename: str) -> Mapping[str, str]:
        """The `__metadata__` of one file of the directory."""
        return self._headers[filename].metadata

    def keys(self) -> Sequence[str]:
        return self._keys

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def info(self, key: str) -> TensorInfo:
        return self._entry(key).info

    def place(self, key: str) -> Place:
        entry = self._entry(key)
        path = Path(entry.info.filename)
        header = self._headers[path.name]
        return Place(path, entry.offset, (header.size, header.mtime_ns))

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        info, place = self._entry(key).info, self.place(key)
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self._reader.read(place.path, offset=place.offset, target=tensor, identity=place.identity)
        return tensor if dtype is None else tensor.to(dtype)

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, header in sorted(self._headers.items()):
            digest.update(f"{name}\0{header.size}\0".encode())
            digest.update(header.raw)
            with storage_errors(header.path, "read"), header.path.open("rb") as file:
                for entry in sorted(header.entries, key=lambda e: e.offset):
                    for position in sample_positions(entry.info.n_bytes):
                        file.seek(entry.offset + position)
                        digest.update(file.read(min(SAMPLE_BYTES, entry.info.n_bytes)))
        return digest.hexdigest()

    def close(self) -> None:
        self._reader.close()

    def _entry(self, key: str) -> Entry:
        if key not in self._entries:
            raise self._missing(key, self.directory)
        return self._entries[key]

    def _merge(self, fixes: dict[str, str]) -> dict[str, Entry]:
        """One table of all files; where two hold a name, the index decides."""
        chosen = self._read_index()
        merged: dict[str, Entry] = {}
        for header in self._headers.values():
            for entry in header.entries:
                key = entry.info.key
                home = chosen.get(key)
                if home is not None and home != header.path.name:
                    logger.warning(
                        "%s: ignoring %r, the index puts it in %s", header.path, key, home
                    )
                    continue
                renamed = _rename(entry, fixes)
                if renamed.info.key in merged:
                    other = Path(merged[renamed.info.key].info.filename).name
                    raise FormatError(
                        f"{self.directory}: tensor {renamed.info.key!r} is in both {other} and "
                        f"{header.path.name}; remove the file that does not belong to the model"
                    )
                merged[renamed.info.key] = renamed
        return merged

    def _read_index(self) -> dict[str, str]:
        """Tensor -> shard, checked: every shard is there and holds what the index says.

        Tensors that shards hold and the index omits are found all the same.
        """
        path = Path(self.directory) / INDEX_NAME
        if not path.is_file():
            return {}
        table = read_json(path).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise FormatError(f"{path}: weight_map must map tensor names to file names")
        absent = sorted(set(table.values()) - set(self._headers))
        if absent:
            raise FormatError(
                f"{path}: names {len(absent)} files that are not there ({', '.join(absent[:3])}); "
                "fetch the model again"
            )
        held = {name: {e.info.key for e in h.entries} for name, h in self._headers.items()}
        for key, name in table.items():
            if key not in held[name]:
                raise FormatError(f"{path}: tensor {key!r} should be in {name} but is not")
        return table


def _shards(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; expected one with *.safetensors files")
    with storage_errors(directory, "list"):
        # A temporary file of an interrupted write starts with a dot.
        names = [p for p in directory.glob("*.safetensors") if not p.name.startswith(".")]
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    if not names:
        hint = "; convert its .bin or .pth files to safetensors first" if pickled else ""
        raise ConfigError(f"{directory}: no *.safetensors files in this directory{hint}")
    return sorted(names)


def _rename(entry: Entry, fixes: dict[str, str]) -> Entry:
    key = entry.info.key
    for old, new in fixes.items():
        key = key.replace(old, new)
    if key == entry.info.key:
        return entry
    info = entry.info
    return Entry(TensorInfo(key, info.shape, info.dtype, info.n_bytes, info.filename), entry.offset)


def sample_positions(n_bytes: int) -> list[int]:
    """Where a fingerprint looks into a tensor: start, middle and end, without repeats."""
    last = max(n_bytes - SAMPLE_BYTES, 0)
    return sorted({0, last // 2, last})


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of one safetensors file, with every check of the header."""
    with SafetensorsCollection(path) as file:
        return {key: file.get(key) for key in file.keys()}  # noqa: SIM118


class VariantSafetensorsCollection(TensorSource):
    """A main collection of which some tensors are taken from others; the latest added wins."""

    def __init__(self, main: TensorSource) -> None:
        self.main = main
        self._variants: list[tuple[tuple[str, ...], TensorSource]] = []
        self._table: dict[str, TensorSource] = dict.fromkeys(main.keys(), main)

    def add_stc(self, globs: str | Sequence[str], collection: TensorSource) -> None:
        """Take every tensor of `collection` that matches one of `globs` (with `*`) from there.

        Where a module's tensors are taken over, those that match and that only the older source
        has are hidden: a layer is never mixed from two encodings.
        """
        patterns = (globs,) if isinstance(globs, str) else tuple(globs)
        taken = [k for k in collection.keys() if _matches(k, patterns)]  # noqa: SIM118
        if not taken:
            logger.warning("overrides %s match no tensor of their source", ", ".join(patterns))
        modules = {key.rpartition(".")[0] for key in taken}
        kept = {
            key: source
            for key, source in self._table.items()
            if not (key.rpartition(".")[0] in modules and _matches(key, patterns))
        }
        self._table = dict(sorted({**kept, **dict.fromkeys(taken, collection)}.items()))
        self._variants.append((patterns, collection))

    @property
    def metrics(self) -> LoadMetrics:
        """Figures of all collections together."""
        total = LoadMetrics()
        for source in self._sources():
            total.n_bytes += source.metrics.n_bytes
            total.tensors += source.metrics.tensors
            total.seconds += source.metrics.seconds
        return total

    def keys(self) -> Sequence[str]:
        return list(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def info(self, key: str) -> TensorInfo:
        return self._source(key).info(key)

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        return self._source(key).get(key, dtype=dtype)

    def place(self, key: str) -> Place | None:
        return self._source(key).place(key)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.main.fingerprint().encode())
        for patterns, source in self._variants:
            digest.update(repr((patterns, source.fingerprint())).encode())
        return digest.hexdigest()

    def close(self) -> None:
        for source in self._sources():
            source.close()

    def _source(self, key: str) -> TensorSource:
        if key not in self._table:
            raise self._missing(key, "the model with its overrides")
        return self._table[key]

    def _sources(self) -> Sequence[TensorSource]:
        """Each source once, however often it was added."""
        sources = (self.main, *(variant[1] for variant in self._variants))
        return list({id(source): source for source in sources}.values())


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
