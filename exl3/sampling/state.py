"""What the steps of a sampler work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import Exl3Error

FloatRow = NDArray[np.float32]
IdRow = NDArray[np.int64]


class NothingToSampleError(Exl3Error, ValueError):
    """Every token is masked, or the logits are not numbers."""


@dataclass(slots=True)
class Row:
    """One distribution over the vocabulary.

    `logits` float32 (n,) is owned and may be changed in place, unless `shared`. `ids` (n,) are the
    token ids of the entries, None while nothing was cut: entry i is token i. Steps that truncate
    shorten both arrays, so later steps touch few tokens.
    """

    logits: FloatRow
    vocab_size: int
    key: int
    past_ids: IdRow | None = None
    ids: IdRow | None = None
    shared: bool = True
    sample: int = -1

    def own(self) -> FloatRow:
        """The logits, copied first if they belong to the caller."""
        if self.shared:
            self.logits = self.logits.copy()
            self.shared = False
        return self.logits

    def keep(self, index: NDArray[np.int64]) -> None:
        """Cut to the entries `index`."""
        self.logits = self.logits[index]
        self.ids = index if self.ids is None else self.ids[index]
        self.shared = False

    def keep_from(self, threshold: float) -> None:
        """Cut to the entries at or above `threshold`."""
        self.keep(np.flatnonzero(self.logits >= threshold))

    def maximum(self) -> float:
        """The largest logit.

        Raises:
            NothingToSampleError: all entries are -inf, or one is NaN.
        """
        top = float(self.logits.max()) if self.logits.size else -np.inf
        if top == np.inf:  # the infinite entries share everything
            self.keep_from(np.inf)
            self.logits[:] = 0.0
            return 0.0
        if not top > -np.inf:
            raise NothingToSampleError(
                "no token can be sampled: "
                + ("the logits contain NaN" if np.isnan(top) else "every token is masked")
            )
        return top

    def probs(self) -> FloatRow:
        """Softmax over the entries that are left."""
        top = self.maximum()
        with np.errstate(over="ignore"):
            p = self.logits - np.float32(top)
        np.exp(p, out=p)
        p /= p.sum(dtype=np.float64)
        return p

    def token_ids(self) -> IdRow:
        """Token id of every entry."""
        return np.arange(self.logits.size) if self.ids is None else self.ids

    def draw(self, index: int) -> None:
        """Choose entry `index`."""
        self.sample = int(index) if self.ids is None else int(self.ids[index])


class SS(Enum):
    """What a `SamplingState` holds: S sorted with `indices`, N normalised."""

    INIT = 0
    DONE = 1
    LOGITS = 2
    PROBS = 3
    LOGITS_S = 4
    PROBS_S = 5
    PROBS_N = 6
    PROBS_N_S = 7

    @property
    def has_logits(self) -> bool:
        return self in (SS.INIT, SS.LOGITS, SS.LOGITS_S)

    @property
    def is_sorted(self) -> bool:
        return self in (SS.LOGITS_S, SS.PROBS_S, SS.PROBS_N_S)


@dataclass
class SamplingState:
    """The form in which custom steps see a distribution; tensors are (bsz, n)."""

    rand_u32: int
    bsz: int
    dim: int
    in_logits: torch.Tensor
    logits: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    past_ids: torch.Tensor | None = None
    state: SS = field(default=SS.INIT)
