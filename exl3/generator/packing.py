"""Several tokens of several sequences as the rows of one decode step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence to be run: `ids` at the places from `start` on."""

    sequence: Sequence
    start: int
    ids: Items[int] | NDArray[np.int64]


def pack(parts: list[Part]) -> tuple[Tensor, dict[str, Any]]:
    """Ids long (m, 1) and parameters of a pass with one row per token, in order.

    Each row has its sequence's pages and, as length, its own place. That is a decode step like any
    other, because all rows store their keys and values before one of them reads: a row sees the
    tokens before it in the same pass, and gets the logits that a step of its own would give. Rows
    of a sequence stay next to each other: `exl3.ops.attention.decode_attention` needs that.
    """
    rows = sum(len(part.ids) for part in parts)
    width = max(part.sequence.block_table.numel() for part in parts)
    ids = np.empty((rows, 1), np.int64)
    lengths = np.empty(rows, np.int32)
    table = np.zeros((rows, width), np.int32)
    row = 0
    for part in parts:
        end, pages = row + len(part.ids), part.sequence.block_table.numpy()
        ids[row:end, 0] = part.ids
        lengths[row:end] = np.arange(part.start, part.start + end - row)
        table[row:end, : pages.size] = pages
        row = end
    params = {
        "attn_mode": "flash_attn",
        "block_table": torch.from_numpy(table),
        "cache_seqlens": torch.from_numpy(lengths),
    }
    return torch.from_numpy(ids), params
