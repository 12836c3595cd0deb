"""The logits of a step, and the probabilities that are told about a token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .ids import IdBuffer
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
    if not options.wants_logits:
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


class PromptReport:
    """Log-probabilities of a prompt's tokens, each given those before it.

    Args:
        ids: the job's ids; those after the first `length` are not of the prompt.
        top: how many likeliest tokens to report beside each.
        columns: columns of the logits that are tokens.
    """

    def __init__(self, ids: IdBuffer, length: int, top: int, columns: int) -> None:
        self._ids, self._length = ids, length
        self._top, self._columns = top, columns
        self._told = 1  # tokens that need no report any more; the first has none
        self._parts: list[dict[str, Tensor]] = []

    @property
    def is_complete(self) -> bool:
        return self._told >= self._length

    def add(self, logits: Tensor, start: int) -> None:
        """Take the logits (n, V_pad) of the tokens from `start` on. What was reported before a
        requeue is not reported again."""
        first = max(self._told, start + 1)
        end = min(start + 1 + logits.shape[0], self._length)
        if end <= first:
            return
        rows = logits[first - start - 1 : end - start - 1, : self._columns]
        log_probs = rows.to("cpu", torch.float32).log_softmax(-1)
        ids = torch.from_numpy(self._ids.numpy()[first:end].copy())
        known = ids.clamp(max=self._columns - 1).unsqueeze(1)
        own = log_probs.gather(1, known).squeeze(1)
        part = {
            "prompt_token_ids": ids,
            "prompt_logprobs": own.masked_fill(ids >= self._columns, -torch.inf),
        }
        if self._top:
            top = log_probs.topk(min(self._top, self._columns), dim=-1)
            part["prompt_top_k_tokens"], part["prompt_top_k_logprobs"] = top.indices, top.values
        self._parts.append(part)
        self._told = end

    def take(self) -> dict[str, Tensor]:
        """Keys of an event: what was added since the last call, (1, n) and (1, n, k)."""
        parts, self._parts = self._parts, []
        if not parts:
            return {}
        return {key: torch.cat([part[key] for part in parts]).unsqueeze(0) for key in parts[0]}
