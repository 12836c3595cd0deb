"""Low-rank additions to linear layers, each on some rows of a batch.

Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """y += (x @ a.T) @ b for one layer; the scale is in `b`. In the dtype of activations."""

    a: Tensor
    """(r, k)."""
    b: Tensor
    """(r, n)."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a batch, and the rows that each applies to."""

    layers: tuple[Mapping[str, LowRank], ...]
    """Of each adapter, by the key of the linear layer."""
    mask: Tensor
    """float32 (m, adapters), 1 where one applies. A recorded step reads it anew every time."""
    everywhere: tuple[bool, ...]
    """Whether each is known to apply to all rows."""

    def touch(self, keys: Sequence[str]) -> bool:
        """Whether one of these layers has an addition."""
        return any(key in layers for layers in self.layers for key in keys)

    def to(self, device: torch.device) -> Adapters:
        """The same with the mask on a device; the pairs lie with their layers."""
        return Adapters(self.layers, self.mask.to(device), self.everywhere)

    def select(self, rows: Tensor) -> Adapters:
        """The same for a batch made of these rows."""
        return Adapters(self.layers, self.mask[rows], self.everywhere)


def add_low_rank_(y: Tensor, h: Tensor, keys: list[tuple[str, int]], adapters: Adapters) -> Tensor:
    """Add to `y` what the adapters make of `h`, in place; returns `y`.

    Args:
        y: (m, columns), outputs of layers side by side.
        h: (m, k), their common input.
        keys: key of each layer and its first column in `y`, ascending.
    """
    if y.device.type == "cpu":  # torch's threads would take the cores from the op before
        from ..ops.low_rank import LowRankPart, low_rank_add_

        parts = [
            LowRankPart(layers[key].a, layers[key].b, start, owner)
            for key, start in keys
            for owner, layers in enumerate(adapters.layers)
            if key in layers
        ]
        return low_rank_add_(y, h, parts, adapters.mask)
    for owner, layers in enumerate(adapters.layers):
        mask = None if adapters.everywhere[owner] else adapters.mask[:, owner, None]
        for key, start in keys:
            if key in layers:
                part = layers[key]
                _add_(y[:, start : start + part.b.shape[1]], h, part, mask)
    return y


def _add_(y: Tensor, h: Tensor, part: LowRank, mask: Tensor | None) -> None:
    """One part by torch's products, on all rows: to pick rows would wait for the device."""
    inner = F.linear(h.to(part.a.dtype), part.a)
    if mask is not None:
        inner = torch.where(mask != 0, inner, 0)
    if y.dtype == part.b.dtype:
        y.addmm_(inner, part.b)
    else:
        y.add_(inner @ part.b)
