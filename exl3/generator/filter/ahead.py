"""Masks of filters, computed in threads while the model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from ...errors import ShapeError
from .base import Filter, filter_faults


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="exl3-mask")


class MasksAhead:
    """The masks of one job's filters at its next position.

    Between `start` and `take` or `drop` a filter belongs to its thread: whoever changes one calls
    `drop` first.
    """

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._filters = filters
        self._started: dict[Filter, Future[Tensor]] = {}

    def start(self) -> None:
        """Begin with the masks of active filters that may be computed in a thread."""
        for item in self._filters:
            if item.is_active and item not in self._started and item.use_background_worker():
                self._started[item] = _workers().submit(item.get_next_logit_mask)

    def take(self) -> list[Tensor]:
        """The masks of all active filters; waits for those that are begun.

        Raises:
            FilterError: a filter failed, or gave what is no mask.
        """
        started, self._started = self._started, {}
        masks = []
        with filter_faults():
            try:
                for item in self._filters:
                    if item.is_active:
                        begun = started.pop(item, None)
                        mask = item.get_next_logit_mask() if begun is None else begun.result()
                        masks.append(_checked(mask))
            finally:
                _settle(started)
        return masks

    def drop(self) -> None:
        """Wait for what is begun, and forget it."""
        _settle(self._started)
        self._started = {}


def _settle(started: dict[Filter, Future[Tensor]]) -> None:
    for begun in started.values():
        if not begun.cancel():
            begun.exception()  # waits; the fault comes up again if the mask is wanted


def _checked(mask: Tensor) -> Tensor:
    """No mask is not the same as everything allowed."""
    if not isinstance(mask, torch.Tensor):
        raise ShapeError(f"the mask is {type(mask).__name__}, expected a tensor")
    if mask.dtype != torch.int32 and not mask.is_floating_point():
        raise ShapeError(f"the mask is {mask.dtype}, expected float16, or packed bits in int32")
    return mask
