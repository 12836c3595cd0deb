"""Probabilities that are told about a token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .options import JobOptions
from .stream import Token


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
        known = row.numpy()[:width]
        weights = np.exp(known - known.max())
        total = float(weights.sum(dtype=np.float64))
        if options.return_probs:
            out.prob = float(weights[token]) / total if token < width else 0.0
        if options.return_top_tokens:
            count = min(options.return_top_tokens, width)
            top = np.argpartition(weights, width - count)[width - count :]
            top = top[np.lexsort((top, -weights[top]))]
            out.top = (
                torch.from_numpy(top.astype(np.int64)).view(1, 1, -1),
                torch.from_numpy(weights[top] / np.float32(total)).view(1, 1, -1),
            )
    return out
