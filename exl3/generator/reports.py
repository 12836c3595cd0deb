"""The logits of a step, and the probabilities that are told about a token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .options import JobOptions
from .stream import Token


class Rows:
    """Logits of one step.

    `raw` (jobs, V_pad) as the model gave them; `columns` of them are tokens. Both are valid until
    the next step.
    """

    __slots__ = ("_known", "columns", "raw")

    def __init__(self, raw: Tensor, columns: int) -> None:
        self.raw = raw
        self.columns = columns
        self._known: np.ndarray | None = None

    @property
    def known(self) -> np.ndarray:
        """float32 (jobs, V) on the host, copied there when first asked for."""
        if self._known is None:
            self._known = self.raw[:, : self.columns].to("cpu", torch.float32).numpy()
        return self._known

    def best(self) -> list[int] | None:
        """The best column of each row; None if one has no best."""
        best = [int(row.argmax()) for row in self.known]
        values = [self.known[row, column] for row, column in enumerate(best)]
        return best if np.isfinite(values).all() else None


def report(token: int, logits: Rows, row: int, options: JobOptions) -> Token:
    """A token with what the job wants to know about it: raw, before masks and sampler."""
    out = Token(token)
    if not (options.return_probs or options.return_top_tokens or options.return_logits):
        return out
    known = logits.known[row]
    width = known.size
    if options.return_logits:
        out.logits = logits.raw[row].to("cpu", torch.float32).clone().view(1, 1, -1)
        out.logits[..., width:] = -torch.inf
    if options.return_probs or options.return_top_tokens:
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
