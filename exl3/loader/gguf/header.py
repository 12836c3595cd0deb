"""Reading and checking the header of a GGUF file (versions 2 and 3, little-endian).

Layout: "GGUF", version u32, tensor count u64, key count u64; the keys with typed values; name,
dims, type and offset of every tensor; data, aligned. The file is taken as hostile: every length
and count is checked against what is left of the file before anything is sized by it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import FormatError, UnsupportedError
from ...util.file import storage_errors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_NAME_BYTES = 65_535

_STRING, _ARRAY = 8, 9
# Value types with a fixed size: struct code, numpy dtype.
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored; `shape` is in the order of torch: rows first."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    size: int
    mtime_ns: int
    raw: bytes
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads forward through the file and never asks for more than there is."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._size = size

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: at byte {self.position}: {what}; fetch the file again")

    def take(self, count: int, what: str) -> bytes:
        left = self._size - self.position
        if count > left:
            raise self.error(f"{what} needs {count} bytes, {left} are left")
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"{what} cut short")
        self.position += count
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", what)
        if limit is not None and length > limit:
            raise self.error(f"{what} of {length} bytes, expected at most {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text") from error

    def count(self, what: str, least_bytes: int) -> int:
        """A count of items that take at least `least_bytes` each."""
        count = self.number("<Q", what)
        left = self._size - self.position
        if count * least_bytes > left:
            raise self.error(f"{what} {count} cannot fit into the {left} bytes that are left")
        return count

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(f"value of {key!r}")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0], f"value of {key!r}")
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self.error(f"value type {kind} of {key!r} is unknown or nested too deep")
        item = self.number("<I", f"item type of {key!r}")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item][1])
            count = self.count(f"length of {key!r}", dtype.itemsize)
            data = self.take(count * dtype.itemsize, f"items of {key!r}")
            return np.frombuffer(data, dtype)
        count = self.count(f"length of {key!r}", 8)
        return [self.value(item, key, depth + 1) for _ in range(count)]


def read_header(path: Path, quant_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Read and check a header.

    Args:
        quant_sizes: tensor type -> (weights per block, bytes per block).
    Raises:
        FormatError: anything that does not add up.
        UnsupportedError: a version, byte order or tensor type that cannot be read; split files.
    """
    with storage_errors(path, "read"), path.open("rb") as file:
        status = os.fstat(file.fileno())
        cursor = _Cursor(path, file, status.st_size)
        tensor_count, key_count = _preamble(cursor)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text("key", _MAX_NAME_BYTES)
            if key in metadata:
                raise cursor.error(f"key {key!r} appears twice")
            metadata[key] = cursor.value(cursor.number("<I", f"type of {key!r}"), key)
        infos = [_tensor_info(cursor, quant_sizes) for _ in range(tensor_count)]
        file.seek(0)
        raw = file.read(cursor.position)
    _check_single_file(path, metadata)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise FormatError(f"{path}: general.alignment is {alignment!r}, expected a multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        GgufTensor(t.name, t.shape, t.ggml_type, start + t.offset, t.n_bytes) for t in infos
    )
    _check_layout(path, tensors, status.st_size, alignment)
    return GgufHeader(path, status.st_size, status.st_mtime_ns, raw, metadata, tensors)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "magic")
    if magic != _MAGIC:
        raise FormatError(f"{cursor.path}: begins with {magic!r}, expected {_MAGIC!r}: not GGUF")
    version = cursor.number("<I", "version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "big-endian file" if swapped else f"GGUF version {version}"
        raise UnsupportedError(f"{cursor.path}: {what}, expected little-endian version 2 or 3")
    # The smallest tensor entry: empty name, one dim, type, offset. The smallest key: one byte.
    tensor_count = cursor.count("tensor count", 8 + 4 + 8 + 4 + 8)
    return tensor_count, cursor.count("key count", 8 + 4 + 1)


def _tensor_info(cursor: _Cursor, quant_sizes: Mapping[int, tuple[int, int]]) -> GgufTensor:
    """One entry; its offset is still relative to the data."""
    name = cursor.text("tensor name", _MAX_NAME_BYTES)
    n_dims = cursor.number("<I", f"dims of {name!r}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dims, expected 1 to {_MAX_DIMS}")
    dims = [cursor.number("<Q", f"dims of {name!r}") for _ in range(n_dims)]
    ggml_type = cursor.number("<I", f"type of {name!r}")
    offset = cursor.number("<Q", f"offset of {name!r}")
    if ggml_type not in quant_sizes:
        raise UnsupportedError(
            f"{cursor.path}: tensor {name!r} has type {ggml_type}, which the installed gguf "
            "package does not know; upgrade it, or take another file of the model"
        )
    per_block, block_bytes = quant_sizes[ggml_type]
    weights = 1
    for dim in dims:
        weights *= dim
    if weights == 0 or dims[0] % per_block:
        raise cursor.error(
            f"tensor {name!r} has dims {dims}, expected none of 0 and rows of whole blocks of "
            f"{per_block}"
        )
    return GgufTensor(
        name, tuple(reversed(dims)), ggml_type, offset, weights // per_block * block_bytes
    )


def _check_single_file(path: Path, metadata: Mapping[str, Any]) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedError(
            f"{path}: one of {parts} parts of a split model; join them with `gguf-split --merge`"
        )


def _check_layout(path: Path, tensors: tuple[GgufTensor, ...], size: int, alignment: int) -> None:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{path}: tensor {twice!r} appears twice")
    end = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        where = f"{path}: tensor {tensor.name!r} at byte {tensor.offset}"
        if tensor.offset % alignment:
            raise FormatError(f"{where}: not aligned to {alignment}")
        if tensor.offset < end:
            raise FormatError(f"{where}: overlaps the tensor before it, which ends at {end}")
        end = tensor.offset + tensor.n_bytes
        if end > size:
            raise FormatError(
                f"{where}: ends at {end}, the file has {size} bytes; truncated: fetch it again"
            )


def scalar(path: Path, metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    """A required value of a kind (an int is taken for a float)."""
    value = metadata.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{path}: key {key!r} is {value!r}, expected {kind.__name__}")
    return value
