"""Weights as grey images, for looking at: `--image_dump`."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..quant import QuantizedLinear
from ..util.file import atomic_write

_MAX_SIDE = 2048


def dump_images(folder: Path, results: Mapping[str, QuantizedLinear]) -> None:
    """Write `<key>.png` per layer: inputs downwards, outputs across, 3 deviations full scale."""
    for key, result in results.items():
        atomic_write(folder / f"{key}.png", png(result.weight.cpu()))


def png(values: Tensor) -> bytes:
    """A matrix as a greyscale PNG, cut to at most 2048 x 2048."""
    part = values[:_MAX_SIDE, :_MAX_SIDE].to(torch.float32)
    spread = float(part.std(correction=0)) or 1.0
    grey = (part / (6 * spread) + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    rows = torch.cat([torch.zeros(len(grey), 1, dtype=torch.uint8), grey], 1)
    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    data = zlib.compress(rows.numpy().tobytes(), 6)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
