"""Writing safetensors files: whole or not at all, streamed, the same bytes every time."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError, StorageError
from ..util.file import atomic_file, write_json
from .dtypes import DTYPE_NAMES
from .safetensors import INDEX_NAME

logger = logging.getLogger(__name__)

_SINGLE_NAME = "model.safetensors"
_OUR_SHARDS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
# Transformers refuses files that do not say for which framework they were written.
_FORMAT = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: all that the layout of the files depends on."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> TensorSpec:
        return cls(key, tuple(tensor.shape), tensor.dtype)


def plan_shards(specs: Sequence[TensorSpec], shard_mb: int) -> list[list[TensorSpec]]:
    """Split tensors, in their order, into files of at most `shard_mb` MB (10^6 bytes) of data.

    0 means one file. A tensor larger than the limit gets a file of its own.
    """
    if shard_mb < 0:
        raise ConfigError(f"shard size {shard_mb} MB: expected 0 (one file) or more")
    keys = [spec.key for spec in specs]
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ConfigError(f"tensors planned twice: {', '.join(twice[:3])}")
    shards: list[list[TensorSpec]] = [[]]
    room = shard_mb * 10**6
    used = 0
    for spec in specs:
        if shard_mb and shards[-1] and used + spec.n_bytes > room:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.n_bytes
    return shards


def write_sharded(
    directory: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    get: Callable[[str], Tensor],
    *,
    shard_mb: int = 8192,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a model's tensors as `model.safetensors`, or as shards with an index.

    Tensors are asked for with `get` one at a time and let go at once, so memory stays at one
    tensor. Within a file they come in the order of `file_order`. Files of an earlier
    write that are not part of this one are removed at the end.

    Raises:
        ShapeError: `get` returned another shape or dtype than planned.
        StorageError: the disk is full or not writable; names the file.
    """
    folder = Path(directory)
    shards = plan_shards(specs, shard_mb)
    count = len(shards)
    names = (
        [_SINGLE_NAME]
        if count == 1
        else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    for left in folder.glob(".model*.safetensors*.tmp"):
        left.unlink()  # of a write that was killed; may be as large as a shard
    # An older index would describe a mixture while shards are being replaced.
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, get, metadata=metadata)
    if count > 1:
        weight_map = {s.key: n for n, shard in zip(names, shards, strict=True) for s in shard}
        total = sum(spec.n_bytes for spec in specs)
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX_NAME, index)
    _remove_stale(folder, names)
    return [folder / name for name in names]


def _remove_stale(folder: Path, names: Sequence[str]) -> None:
    for file in sorted(folder.glob("model*.safetensors")):
        if _OUR_SHARDS.fullmatch(file.name) and file.name not in names:
            logger.warning("removing %s: left from an earlier write", file)
            file.unlink()


def file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The order inside a file: wide dtypes first, so that every tensor is aligned; then by name."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.key))


def write_file(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    get: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file atomically, asking for one tensor at a time.

    Raises: as `write_sharded`.
    """
    ordered = file_order(specs)
    header = _header(ordered, {**_FORMAT, **(metadata or {})})
    with atomic_file(path) as file:
        file.write(header)
        for spec in ordered:
            _write_tensor(file, spec, get(spec.key), Path(path))


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors that are in memory as one file, atomically; for checkpoints."""
    specs = [TensorSpec.of(key, tensor) for key, tensor in tensors.items()]
    write_file(path, specs, tensors.__getitem__, metadata=metadata)


def _header(ordered: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for spec in ordered:
        if spec.dtype not in DTYPE_NAMES:
            raise ShapeError(f"tensor {spec.key!r}: safetensors files cannot hold {spec.dtype}")
        table[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.n_bytes],
        }
        position += spec.n_bytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, spec: TensorSpec, tensor: Tensor, path: Path) -> None:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise ShapeError(
            f"{path}: tensor {spec.key!r} is {tuple(tensor.shape)} {tensor.dtype}, "
            f"planned as {spec.shape} {spec.dtype}"
        )
    if not spec.n_bytes:
        return
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    try:
        file.write(data.data)
    except OSError as error:
        raise StorageError(
            error.errno or 0,
            f"{path}: cannot write tensor {spec.key!r} ({spec.n_bytes} bytes): "
            f"{error.strerror or error}; nothing was left half-written",
        ) from error
