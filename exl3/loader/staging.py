"""Tensors read ahead of their use, straight to their devices.

Threads read pieces of the tensors that come next, into pinned memory of their own, and queue the
copy to the device on a stream of their own; the caller's stream waits for the copies of a tensor
when it asks for it. So reading, copying and whatever the device does with tensors overlap.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Place, TensorInfo, TensorSource
from .reader import LoadMetrics, read_range

PIECE_BYTES = 8 << 20
AHEAD_BYTES = 512 << 20
"""Tensors that may lie on the device before they are asked for: what loading needs on top."""
_MOST_THREADS = 16


@dataclass(slots=True)
class _Worker:
    """What a thread reads with on a CUDA device."""

    room: Tensor
    stream: torch.cuda.Stream
    copied: torch.cuda.Event  # the room is free again


@dataclass(slots=True)
class _Item:
    """A tensor on its way."""

    tensor: Tensor
    pieces: list[Future[torch.cuda.Event | None]] = field(default_factory=list)


class Staged(TensorSource):
    """`source` with the tensors that `devices` names on their devices, read ahead in that order;
    others as they are.

    Only tensors of files with plain storage (`TensorSource.place`) are read ahead. Use as a context
    manager.
    """

    def __init__(self, source: TensorSource, devices: Mapping[str, torch.device]) -> None:
        self._source = source
        self._devices = devices
        self._waiting = deque((key, place) for key in devices if (place := source.place(key)))
        self._places = dict(self._waiting)
        self._items: dict[str, _Item] = {}
        self._ahead = 0
        self._local = threading.local()
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="exl3-stage")

    def keys(self) -> Sequence[str]:
        return self._source.keys()

    def __contains__(self, key: object) -> bool:
        return key in self._source

    def info(self, key: str) -> TensorInfo:
        return self._source.info(key)

    def place(self, key: str) -> Place | None:
        return self._source.place(key)

    def fingerprint(self) -> str:
        return self._source.fingerprint()

    @property
    def metrics(self) -> LoadMetrics:
        return self._source.metrics

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `TensorSource.get`; a tensor of `keys` comes on the device, the first time."""
        place = self._places.pop(key, None)
        if place is None:
            return self._source.get(key, dtype=dtype)
        if key not in self._items:  # asked for out of turn
            self._submit(key, place)
        start = time.perf_counter()
        item = self._items.pop(key)
        events = [piece.result() for piece in item.pieces]
        for event in events:
            if event is not None:
                torch.cuda.current_stream(item.tensor.device).wait_event(event)
        self.metrics.add(_bytes(item.tensor), time.perf_counter() - start)
        self._ahead -= _bytes(item.tensor)
        self._fill()
        tensor = item.tensor
        return tensor if dtype is None else tensor.to(dtype)

    def _fill(self) -> None:
        while self._waiting and self._ahead < AHEAD_BYTES:
            key, place = self._waiting.popleft()
            if key in self._places and key not in self._items:
                self._submit(key, place)

    def _submit(self, key: str, place: Place) -> None:
        info, device = self._source.info(key), self._devices[key]
        tensor = torch.empty(info.shape, dtype=info.dtype, device=device)
        ready = None
        if device.type == "cuda":
            # The memory may still be read by work that was queued before it was freed.
            ready = torch.cuda.current_stream(device).record_event()
        item = _Item(tensor)
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.view(torch.uint8)
        for at in range(0, flat.numel(), PIECE_BYTES):
            part = flat[at : at + PIECE_BYTES]
            item.pieces.append(self._pool.submit(self._read, place, at, part, ready))
        self._items[key] = item
        self._ahead += _bytes(tensor)

    def _read(
        self, place: Place, at: int, part: Tensor, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Fill a piece; returns the event after which it is there."""
        offset = place.offset + at
        if ready is None:
            read_range(place.path, offset=offset, target=part, identity=place.identity)
            return None
        worker = self._worker(part.device)
        worker.copied.synchronize()
        room = worker.room[: part.numel()]
        read_range(place.path, offset=offset, target=room, identity=place.identity)
        with torch.cuda.stream(worker.stream):
            worker.stream.wait_event(ready)
            part.copy_(room, non_blocking=True)
            worker.copied.record(worker.stream)
            event = torch.cuda.Event()
            event.record(worker.stream)
        return event

    def _worker(self, device: torch.device) -> _Worker:
        known: dict[torch.device, _Worker] | None = getattr(self._local, "workers", None)
        if known is None:
            known = self._local.workers = {}
        torch.cuda.set_device(device)  # of this thread
        if device not in known:
            room = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            known[device] = _Worker(room, torch.cuda.Stream(device), torch.cuda.Event())
        return known[device]

    def close(self) -> None:
        """End the threads; what was read ahead is dropped. The source stays open."""
        self._pool.shutdown(cancel_futures=True)
        for device in {item.tensor.device for item in self._items.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._items.clear()
        self._waiting.clear()
        self._places.clear()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
