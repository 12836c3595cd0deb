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

    def touch(self, keys: Sequence[str]) -> bool:
        """Whether one of these layers has an addition."""
        return any(key in layers for layers in self.layers for key in keys)

    def select(self, rows: Tensor) -> Adapters:
        """The same for a batch made of these rows."""
        return Adapters(self.layers, self.mask[rows])


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
        parts_here = [(layers[key], start) for key, start in keys if key in layers]
        rows = adapters.mask[:, owner].nonzero()[:, 0]
        if parts_here and rows.numel():
            _add_rows_(y, h, parts_here, None if rows.numel() == y.shape[0] else rows)
    return y


def _add_rows_(y: Tensor, h: Tensor, parts: list[tuple[LowRank, int]], rows: Tensor | None) -> None:
    """One adapter's parts on some rows, or on all."""
    x = (h if rows is None else h.index_select(0, rows)).to(parts[0][0].a.dtype)
    for part, start in parts:
        target = y[:, start : start + part.b.shape[1]]
        inner = F.linear(x, part.a)
        if rows is not None:
            target.index_add_(0, rows, (inner @ part.b).to(y.dtype))
        elif target.dtype == part.b.dtype:
            torch.addmm(target, inner, part.b, out=target)
        else:
            target.add_(inner @ part.b)
