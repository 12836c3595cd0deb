"""XTC, which makes the likeliest tokens less likely; Adaptive-P and Mirostat, which steer by what
they drew before."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ConfigError
from .base import SS_Base
from .random import gumbel
from .state import SS, Row
from .steps import SS_NoOp, SS_Sample, _Cut, _Final, _fraction, _number, _token_ids

_protected: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def xtc_default_protected_token_ids(tokenizer: Any) -> list[int]:
    """Ids whose piece contains a newline, and all added tokens."""
    if tokenizer not in _protected:
        pieces = tokenizer.get_id_to_piece_list(True)
        lines = {token for token, piece in enumerate(pieces) if "\n" in piece}
        _protected[tokenizer] = sorted(lines | set(tokenizer.extended_id_to_piece))
    return _protected[tokenizer]


class SS_XTC(_Cut):
    """Exclude top choices: the average over a coin toss that removes all tokens above the
    threshold but the least likely of them."""

    def __init__(
        self,
        probability: float,
        threshold: float,
        protected_token_ids: Iterable[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.probability = _fraction(self, "probability", probability)
        self.threshold = _fraction(self, "threshold", threshold)
        if protected_token_ids is None and tokenizer is not None:
            protected_token_ids = xtc_default_protected_token_ids(tokenizer)
        ids = () if protected_token_ids is None else protected_token_ids
        self._protected = np.array(_token_ids(self, "protected_token_ids", ids), np.int64)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.probability == 0.0 or self.threshold > 0.5 else None

    def apply(self, row: Row) -> None:
        probs = row.probs()
        high = np.flatnonzero((probs >= self.threshold) & (probs > 0.0))  # masked ones are out
        ids = high if row.ids is None else row.ids[high]
        high = high[~np.isin(ids, self._protected)]
        if high.size < 2:
            return
        order = high[np.argsort(-probs[high], kind="stable")]
        out = order[:-1]
        mass = float(probs[out].sum(dtype=np.float64))
        rest = max(1.0 - mass, 1e-12)
        factor = (1.0 - self.probability) / (1.0 + self.probability * mass / rest)
        with np.errstate(divide="ignore"):
            row.own()[out] += np.log(np.float32(factor))


class SS_AdaptiveP(_Final):
    """Final step that favours tokens near a probability, so that the mean chosen probability
    approaches `target`. Keeps a memory, so every job works on its own copy."""

    def __init__(self, target: float = 1.0, decay: float = 0.0) -> None:
        self.target = _number(self, "target", target)
        self.decay = min(max(_number(self, "decay", decay), 0.0), 0.99)
        self.weighted = self.target / (1.0 - self.decay)
        self.total = 1.0 / (1.0 - self.decay)

    def alt(self) -> SS_Base | None:
        return SS_Sample() if self.target == 1.0 else None

    def memory(self) -> Any:
        return self.weighted, self.total

    def restore(self, memory: Any) -> None:
        self.weighted, self.total = memory

    def apply(self, row: Row) -> None:
        probs = row.probs().astype(np.float64)
        target = min(max(self.target, 0.0), 1.0)
        aim = min(max(2.0 * target - self.weighted / self.total, 0.0), 1.0)
        x = np.abs(probs - aim) / 0.3
        score = np.where(probs >= 1e-8, 5.0 - 10.0 * x * x / (1.0 + x), -np.inf)
        score += gumbel(row.key, row.token_ids())
        index = int(score.argmax())
        row.draw(index)
        self.weighted = float(probs[index]) + self.decay * self.weighted
        self.total = 1.0 + self.decay * self.total

    def out_state(self, in_state: SS) -> SS:
        return SS.DONE


class SS_Mirostat(_Final):
    """Final step that keeps the surprise -log2 p of what it draws near `tau`.

    Tokens with a surprise above mu are cut, never the best; then mu <- mu - eta * (S - tau), S the
    surprise of the token drawn, before the cut. mu is 2 tau at first. Every job works on its own
    copy.

    Args:
        tau: bits, 0 and up; inf is off (plain sampling), 0 is greedy at first.
        eta: 0..1; 0 leaves mu where it is.
    Source: Basu et al., Mirostat (arXiv 2007.14966), version 2 of the authors' code.
    """

    def __init__(self, tau: float = 5.0, eta: float = 0.1) -> None:
        self.tau = _number(self, "tau", tau)
        self.eta = _fraction(self, "eta", eta)
        if self.tau < 0.0:
            raise ConfigError(f"SS_Mirostat: tau is {tau}, expected 0 or more")
        self.mu = 2.0 * self.tau

    def alt(self) -> SS_Base | None:
        return SS_Sample() if math.isinf(self.tau) else None

    def memory(self) -> Any:
        return self.mu

    def restore(self, memory: Any) -> None:
        self.mu = memory

    def apply(self, row: Row) -> None:
        probs = row.probs().astype(np.float64)
        with np.errstate(divide="ignore"):
            surprise = -np.log2(probs)
        kept = surprise <= max(self.mu, float(surprise.min()))
        score = np.where(kept, -surprise * math.log(2.0), -np.inf)
        index = int((score + gumbel(row.key, row.token_ids())).argmax())
        row.draw(index)
        self.mu -= self.eta * (float(surprise[index]) - self.tau)
