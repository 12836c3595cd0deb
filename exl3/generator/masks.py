"""Combining what filters, limits and banned strings forbid at one position."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def combine(
    masks: list[Tensor], banned: Iterable[int], only: list[int] | None, width: int
) -> Tensor | None:
    """One logit mask from several.

    Args:
        masks: of filters, in either form; columns beyond one's width are masked.
        banned: ids that may not be drawn.
        only: if given, the only ids that may be drawn.
        width: number of columns.
    Returns:
        None if everything is allowed; a filter's own mask if it is alone; else float16 (1, width).
    """
    banned = [token for token in banned if 0 <= token < width]
    if not banned and only is None:
        if not masks:
            return None
        if len(masks) == 1:
            return masks[0]
    allowed = np.ones(width, bool)
    if only is not None:
        allowed[:] = False
        allowed[[token for token in only if token < width]] = True
    total = np.zeros(width, np.float32)
    for mask in masks:
        flat = mask.reshape(-1)
        if mask.dtype == torch.int32:
            bits = np.unpackbits(flat.numpy().view(np.uint8), bitorder="little")[:width]
            allowed[: bits.size] &= bits.view(bool)
            allowed[bits.size :] = False
        else:
            part = flat[:width].to(torch.float32).numpy()
            total[: part.size] += part
            allowed[part.size :] = False
    allowed[banned] = False
    total[~allowed] = -np.inf
    return torch.from_numpy(total).to(torch.float16).unsqueeze(0)
