"""Low-rank additions to linear layers, each on some rows of a batch.

Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """y += (x @ a) @ b for one layer; the scale is in `b`."""

    a: Tensor
    """(k, r), in the dtype of activations."""
    b: Tensor
    """(r, n)."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """One adapter and the rows it applies to."""

    layers: Mapping[str, LowRank]
    """By the key of the linear layer."""
    rows: Tensor | None
    """int64, ascending; None: every row."""

    def select(self, chosen: Tensor) -> AdapterRows | None:
        """The same for a batch made of the rows `chosen` of this one; None if it has none left."""
        if self.rows is None:
            return self
        own = (chosen[:, None] == self.rows).any(1).nonzero()[:, 0]
        return AdapterRows(self.layers, own) if own.numel() else None


def add_low_rank_(
    y: Tensor, h: Tensor, keys: list[tuple[str, int]], adapters: tuple[AdapterRows, ...]
) -> Tensor:
    """Add to `y` what the adapters make of `h`, in place; returns `y`.

    Args:
        y: (m, columns), outputs of layers side by side.
        h: (m, k), their common input.
        keys: key of each layer and its first column in `y`.
    """
    for adapter in adapters:
        parts = [(adapter.layers[key], start) for key, start in keys if key in adapter.layers]
        if not parts:
            continue
        rows = adapter.rows
        x = h if rows is None else h.index_select(0, rows)
        for part, start in parts:
            x = x.to(part.a.dtype)
            target = y[:, start : start + part.b.shape[1]]
            if rows is None and target.dtype == part.b.dtype:
                target.addmm_(x @ part.a, part.b)
            elif rows is None:
                target.add_((x @ part.a) @ part.b)
            else:
                target.index_add_(0, rows, ((x @ part.a) @ part.b).to(y.dtype))
    return y
