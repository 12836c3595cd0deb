"""Probabilities that are told about a token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .options import JobOptions
from .stream import Token


def _softmax(row: NDArray[np.float32]) -> NDArray[np.float32]:
    p = row - row.max()
    np.exp(p, out=p)
    p /= p.sum(dtype=np.float64)
    return p


def report(token: int, logits: Tensor, options: JobOptions, width: int) -> Token:
    """A token with what the job wants to know about it.

    Args:
        logits: (1, V_pad), raw: before masks, penalties and sampler.
        width: columns that are tokens.
    """
    out = Token(token)
    if not (options.return_probs or options.return_top_tokens or options.return_logits):
        return out
    row = logits[0].to("cpu", torch.float32)
    if options.return_logits:
        out.logits = row.clone().view(1, 1, -1)
        out.logits[..., width:] = -torch.inf
    if options.return_probs or options.return_top_tokens:
        probs = _softmax(row.numpy()[:width])
        if options.return_probs:
            out.prob = float(probs[token]) if token < width else 0.0
        if options.return_top_tokens:
            count = min(options.return_top_tokens, width)
            top = np.argpartition(-probs, count - 1)[:count]
            top = top[np.lexsort((top, -probs[top]))]
            out.top = (
                torch.from_numpy(top.astype(np.int64)).view(1, 1, -1),
                torch.from_numpy(probs[top]).view(1, 1, -1),
            )
    return out
