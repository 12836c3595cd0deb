"""Whole pages, moved between caches and flat buffers in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedError

_ALIGNMENT = 64  # bytes; start of each tensor's part of a buffer
_MIN_SLAB = 64 << 20  # bytes allocated at once, at least


class Fence:
    """Copies that were issued so far; `wait` returns when they are done."""

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events = []


class PageIO:
    """Copies pages of caches that share their page numbers: all layers of a page are one buffer.

    A buffer is a flat uint8 tensor of `size` bytes in host memory. On CUDA it is pinned, and copies
    are asynchronous on the current stream: later work of that stream sees them, the host must wait
    for a `fence` before it reads a buffer, or writes one that was copied from.

    Raises:
        ConfigError: the caches have no tensors, because the model is not loaded.
    """

    def __init__(self, caches: Iterable[Any]) -> None:
        self.caches = tuple(caches)
        parts = self._tensors(0)
        if not parts:
            raise ConfigError("the cache has no tensors: its model is not loaded")
        self._ranges: list[tuple[int, int]] = []
        offset = 0
        for part in parts:
            self._ranges.append((offset, offset + part.nbytes))
            offset += (part.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self.size = offset
        devices = {part.device for part in parts}
        other = [device for device in devices if device.type not in ("cpu", "cuda")]
        if other:
            raise UnsupportedError(f"pages of a cache on {other[0]} cannot be kept elsewhere")
        self._devices = sorted((d for d in devices if d.type == "cuda"), key=str)

    def _tensors(self, page: int) -> list[Tensor]:
        return [part for cache in self.caches for part in cache.page_tensors(page)]

    def available(self) -> bool:
        """Whether the caches have their tensors; not while the model is unloaded."""
        return len(self._tensors(0)) == len(self._ranges)

    def describe(self) -> str:
        """What must agree for a buffer to be readable: types, shapes and settings of all layers."""
        shapes = [(str(part.dtype), tuple(part.shape)) for part in self._tensors(0)]
        return repr((shapes, [cache.page_format() for cache in self.caches]))

    def _parts(self, page: int) -> list[Tensor]:
        parts = self._tensors(page)
        if len(parts) != len(self._ranges):
            raise ConfigError("the cache has lost its tensors: its model was unloaded")
        return parts

    def save(self, page: int, buffer: Tensor) -> None:
        """Copy a page into a buffer."""
        for (start, end), part in zip(self._ranges, self._parts(page), strict=True):
            buffer[start:end].copy_(part.view(-1).view(torch.uint8), non_blocking=True)

    def load(self, buffer: Tensor, page: int) -> None:
        """Copy a buffer into a page."""
        for (start, end), part in zip(self._ranges, self._parts(page), strict=True):
            part.view(-1).view(torch.uint8).copy_(buffer[start:end], non_blocking=True)

    def fence(self) -> Fence:
        """The copies issued so far."""
        return Fence(self._devices)

    def buffers(self, at_most: int) -> list[Tensor]:
        """Up to `at_most` new buffers from one allocation.

        Pinned allocations are rounded up to a power of two: so they come in slabs that are one.
        """
        slab = _MIN_SLAB
        while slab < 4 * self.size:
            slab *= 2
        count = min(at_most, slab // self.size)
        memory = torch.empty(count * self.size, dtype=torch.uint8, pin_memory=bool(self._devices))
        return list(memory.view(count, self.size))
