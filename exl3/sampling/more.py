"""Steps that other engines have and ExLlamaV3 has not: cuts, temperatures, token lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ConfigError
from .base import SS_Base
from .state import Row
from .steps import (
    FLOAT32_MAX,
    SS_BanTokens,
    SS_NoOp,
    SS_Temperature,
    _Cut,
    _fraction,
    _number,
    _TokenSet,
    heat,
)


def _at_least(step: SS_Base, name: str, value: Any, least: float) -> float:
    number = _number(step, name, value)
    if not least <= number < math.inf:
        raise ConfigError(f"{type(step).__name__}: {name} is {value}, expected {least} or more")
    return number


class SS_TypicalP(_Cut):
    """Keep the tokens whose surprise is nearest to the expected one, H, until they have `typical_p`
    of the probability: in rising order of |-ln p_i - H|, the one that crosses included.

    `typical_p` 0..1; 1 is off, 0 keeps the most typical token.
    Source: Meister et al., Locally Typical Sampling (arXiv 2202.00666).
    """

    def __init__(self, typical_p: float) -> None:
        self.typical_p = _fraction(self, "typical_p", typical_p)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.typical_p == 1.0 else None

    def apply(self, row: Row) -> None:
        probs = row.probs().astype(np.float64)
        some = np.flatnonzero(probs > 0.0)
        surprise = -np.log(probs[some])
        entropy = float((probs[some] * surprise).sum())
        limit = self.typical_p - 1e-6  # rounding of the sums
        # Whatever is less likely than exp(-2 H) comes after everything that is not.
        near = surprise <= 2.0 * entropy + 1e-9
        if probs[some[near]].sum() >= limit and near.any():
            some, surprise = some[near], surprise[near]
        order = some[np.argsort(np.abs(surprise - entropy), kind="stable")]
        count = int(np.searchsorted(probs[order].cumsum(), limit, side="left")) + 1
        row.keep(order[:count])


class SS_TopA(_Cut):
    """Keep p_i >= top_a * (max p)^2.

    `top_a` 0..1; 0 is off.
    Source: Top-A sampling, KoboldAI, BlinkDL's RWKV-LM (2022).
    """

    def __init__(self, top_a: float) -> None:
        self.top_a = _fraction(self, "top_a", top_a)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.top_a == 0.0 else None

    def apply(self, row: Row) -> None:
        best = float(row.probs().max())
        row.keep_from(row.maximum() + math.log(max(self.top_a * best, 1e-300)))


class SS_TopNSigma(_Cut):
    """Keep l_i >= max l - n * sigma, sigma the standard deviation of the logits that are not
    masked. No temperature changes what is kept. To see the whole distribution it comes before
    every other cut.

    `n` of 0 or less is off.
    Source: Tang et al., Top-n-sigma: Not All Logits Are You Need (arXiv 2411.07641).
    """

    def __init__(self, n: float) -> None:
        self.n = _number(self, "n", n)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.n <= 0.0 or math.isinf(self.n) else None

    def apply(self, row: Row) -> None:
        top = row.maximum()
        finite = row.logits[np.isfinite(row.logits)].astype(np.float64)
        row.keep_from(max(top - self.n * float(finite.std()), -FLOAT32_MAX))


class SS_DynaTemp(SS_Base):
    """Temperature that follows the entropy H: T = min + (max - min) * (H / ln c)^exponent, c the
    number of tokens left. One token left: nothing changes.

    `min_temp`, `max_temp` of 0 and up, `exponent` of 0 and up; 1, 1 is off.
    Source: kalomaze, Dynamic Temperature (text-generation-webui pull request 5010).
    """

    def __init__(self, min_temp: float, max_temp: float, exponent: float = 1.0) -> None:
        self.min_temp = _at_least(self, "min_temp", min_temp, 0.0)
        self.max_temp = _at_least(self, "max_temp", max_temp, 0.0)
        self.exponent = _at_least(self, "exponent", exponent, 0.0)
        if self.max_temp < self.min_temp:
            raise ConfigError(f"SS_DynaTemp: max_temp {max_temp} is below min_temp {min_temp}")

    def alt(self) -> SS_Base | None:
        if self.min_temp == self.max_temp:
            return SS_NoOp() if self.min_temp == 1.0 else SS_Temperature(self.min_temp)
        return None

    def apply(self, row: Row) -> None:
        probs = row.probs().astype(np.float64)
        count = int((row.logits > -np.inf).sum())
        if count < 2:
            return
        some = probs[probs > 0.0]
        share = min(max(float(-(some * np.log(some)).sum()) / math.log(count), 0.0), 1.0)
        heat(row, self.min_temp + (self.max_temp - self.min_temp) * share**self.exponent)


class SS_Smoothing(SS_Base):
    """Quadratic sampling: with d = l - max l, k = (3 - curve)/2 and s = (curve - 1)/2,
    l <- max l - k * factor * d^2 + s * factor * d^3.

    `factor` of 0 and up, 0 is off; `curve` 1..3, 1 is a parabola.
    Source: kalomaze, Quadratic Sampling (text-generation-webui pull requests 5403 and 5551).
    """

    def __init__(self, factor: float, curve: float = 1.0) -> None:
        self.factor = _at_least(self, "factor", factor, 0.0)
        self.curve = _number(self, "curve", curve)
        if not 1.0 <= self.curve <= 3.0:  # beyond, some tokens would rise above the best
            raise ConfigError(f"SS_Smoothing: curve is {curve}, expected 1 to 3")

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.factor == 0.0 else None

    def apply(self, row: Row) -> None:
        top = row.maximum()
        d = row.logits.astype(np.float64)
        d -= top
        finite = d > -np.inf
        d = d[finite]
        k, s = (3.0 - self.curve) / 2.0, (self.curve - 1.0) / 2.0
        bent = self.factor * d * d * (s * d - k)
        with np.errstate(over="ignore"):  # relative to the top: no digit is lost
            row.own()[finite] = bent.astype(np.float32)


class SS_AllowTokens(_TokenSet):
    """Draw nothing but these ids; ids outside the vocabulary are ignored. No ids: off."""

    def apply(self, row: Row) -> None:
        ids = self.inside(row)
        logits = np.full(row.logits.size, -np.inf, np.float32)
        logits[ids] = row.logits[ids]
        row.logits, row.shared = logits, False


class SS_BanEOS(SS_BanTokens):
    """Never draw a token that ends the text: the tokenizer's EOS and all of its config's."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError("SS_BanEOS: the tokenizer is None; it knows which tokens end a text")
        ids = [*tokenizer.config.eos_token_id_list, tokenizer.eos_token_id]
        super().__init__(token for token in ids if token is not None)
