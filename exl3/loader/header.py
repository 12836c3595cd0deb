"""Reading and checking the header of a safetensors file.

The file is taken as hostile: every size, offset and count is checked against the file before
anything is sized by it. Layout: 8 bytes little-endian header length, JSON header, data. The data
must be covered by the tensors without gaps or overlaps, as the format demands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError
from ..util.file import storage_errors
from .base import TensorInfo
from .dtypes import DTYPES

# The limit of the format's own library.
MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of one file; `offset` is its absolute position there."""

    info: TensorInfo
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `size` and `mtime_ns` tell later whether the file was replaced."""

    path: Path
    size: int
    mtime_ns: int
    raw: bytes
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check one header.

    Raises:
        FormatError: anything that does not add up; names file, tensor, expected and actual.
        StorageError: the file cannot be read.
    """
    with storage_errors(path, "read"), path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        prefix = file.read(_LENGTH_BYTES)
        length = _checked_length(path, prefix, status.st_size)
        raw = file.read(length)
    if len(raw) != length:
        raise FormatError(f"{path}: header ends after {len(raw)} of {length} bytes")
    data_start = _LENGTH_BYTES + length
    table, metadata = _parse(path, raw)
    entries = [_entry(path, key, value, data_start) for key, value in table.items()]
    _check_cover(path, entries, data_start, status.st_size)
    entries.sort(key=lambda entry: entry.info.key)
    return Header(path, status.st_size, status.st_mtime_ns, raw, tuple(entries), metadata)


def _checked_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) != _LENGTH_BYTES:
        raise FormatError(f"{path}: {size} bytes, too short for a safetensors file; fetch it again")
    length = int.from_bytes(prefix, "little")
    limit = min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if not 2 <= length <= limit:
        raise FormatError(
            f"{path}: header length {length}, expected 2 to {limit} (file of {size} bytes); "
            "not a safetensors file, or truncated: fetch it again"
        )
    return length


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} appears twice")
        table[key] = value
    return table


def _parse(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise FormatError(f"{path}: header is a JSON {type(table).__name__}, expected an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must map text to text")
    return table, metadata


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, key: str, value: object, data_start: int) -> Entry:
    where = f"{path}: tensor {key!r}"
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, got {type(value).__name__}")
    name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(name, str) or name not in DTYPES:
        raise FormatError(f"{where}: dtype {name!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise FormatError(f"{where}: shape {_short(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(f"{where}: data_offsets {_short(offsets)}, expected [begin, end]")
    dtype = DTYPES[name]
    n_bytes = dtype.itemsize
    for size in shape:
        n_bytes *= size
    if offsets[1] - offsets[0] != n_bytes:
        raise FormatError(
            f"{where}: data_offsets {_short(offsets)} span {offsets[1] - offsets[0]} bytes, "
            f"shape {_short(shape)} of {name} needs {n_bytes}"
        )
    info = TensorInfo(key, tuple(shape), dtype, n_bytes, str(path))
    return Entry(info, data_start + offsets[0])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _check_cover(path: Path, entries: list[Entry], data_start: int, size: int) -> None:
    """The tensors must cover the data exactly: no overlap, no gap, no byte left over."""
    position = data_start
    for entry in sorted(entries, key=lambda e: (e.offset, e.info.n_bytes)):
        if entry.offset != position:
            what = "overlaps the tensor before it" if entry.offset < position else "leaves a gap"
            raise FormatError(
                f"{path}: tensor {entry.info.key!r} {what}: begins at byte {entry.offset}, "
                f"expected {position}"
            )
        position += entry.info.n_bytes
    if position != size:
        what = "is truncated" if position > size else "has bytes that belong to no tensor"
        raise FormatError(
            f"{path}: the file {what}: {size} bytes, its tensors end at {position}; fetch it again"
        )
