"""The steps of a sampler, penalties left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from .base import SS_Base
from .random import GUMBEL_SPAN, gumbel
from .state import SS, Row

FLOAT32_MAX = float(np.finfo(np.float32).max)


def _number(step: SS_Base, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"{type(step).__name__}: {name} is {value!r}, expected a number")
    return number


def _fraction(step: SS_Base, name: str, value: Any) -> float:
    number = _number(step, name, value)
    if not 0.0 <= number <= 1.0:
        raise ConfigError(f"{type(step).__name__}: {name} is {value}, expected 0 to 1")
    return number


def _token_ids(step: SS_Base, name: str, values: Any) -> list[int]:
    """Distinct ids in rising order."""
    try:
        return sorted({int(value) for value in values})
    except (TypeError, ValueError):
        raise ConfigError(
            f"{type(step).__name__}: {name} is {values!r:.60}, expected token ids"
        ) from None


class SS_NoOp(SS_Base):
    """Nothing."""

    def apply(self, row: Row) -> None:
        pass


class SS_Sort(SS_NoOp):
    """Plumbing: asks for descending order."""

    def out_state(self, in_state: SS) -> SS:
        sorted_form = {SS.PROBS: SS.PROBS_S, SS.PROBS_N: SS.PROBS_N_S}
        return in_state if in_state.is_sorted else sorted_form.get(in_state, SS.LOGITS_S)


class SS_Normalize(SS_NoOp):
    """Plumbing: asks for probabilities that sum to 1."""

    def out_state(self, in_state: SS) -> SS:
        return SS.PROBS_N_S if in_state.is_sorted else SS.PROBS_N


class _Final(SS_Base):
    def is_final(self) -> bool:
        return True

    def out_state(self, in_state: SS) -> SS:
        return SS.DONE


class SS_Argmax(_Final):
    """The most likely token; the lowest id among equals."""

    def apply(self, row: Row) -> None:
        index = row.logits.argmax() if row.logits.size else 0
        if not (row.logits.size and row.logits[index] > -np.inf):
            row.maximum()  # raises with the reason
        row.draw(int(index))


class SS_Sample(_Final):
    """Draw from softmax(l) as argmax(l + g), g Gumbel noise of the token's id."""

    def apply(self, row: Row) -> None:
        top = row.maximum()
        if row.ids is None or row.ids.size > 64:
            row.keep_from(max(top - GUMBEL_SPAN, -FLOAT32_MAX))
        noisy = gumbel(row.key, row.token_ids())
        noisy += row.logits
        row.draw(int(noisy.argmax()))


class SS_Sample_mn(_Final):
    """Draw with `torch.multinomial`, seeded by the key."""

    def apply(self, row: Row) -> None:
        probs = np.zeros(row.vocab_size, np.float32)
        probs[row.token_ids()] = row.probs()
        source = torch.Generator().manual_seed(row.key)
        row.sample = int(torch.multinomial(torch.from_numpy(probs), 1, generator=source))

    def reqs_torch_seed(self) -> bool:
        return True


class SS_Temperature(SS_Base):
    """l / T. T <= 0 is greedy."""

    def __init__(self, temperature: float) -> None:
        self.temperature = _number(self, "temperature", temperature)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.temperature == 1.0 else None

    def apply(self, row: Row) -> None:
        heat(row, self.temperature)


def heat(row: Row, temperature: float) -> None:
    """Divide by a temperature; 0 or less keeps only the best."""
    top = row.maximum()
    if temperature <= 0.0:
        row.keep(np.array([row.logits.argmax()]))
        return
    # Relative to the top: nothing overflows, however low the temperature.
    with np.errstate(over="ignore"):
        scaled = row.logits - np.float32(top)
        scaled /= np.float32(max(temperature, 1e-30))
    row.logits, row.shared = scaled, False


class _Cut(SS_Base):
    def out_state(self, in_state: SS) -> SS:
        return SS.PROBS_N_S


class SS_TopK(_Cut):
    """Keep the k most likely tokens; ties at the cut stay."""

    def __init__(self, top_k: int) -> None:
        number = _number(self, "top_k", top_k)
        if not (math.isinf(number) or number == int(number)):
            raise ConfigError(f"SS_TopK: top_k is {top_k}, expected a whole number")
        self.top_k = 0 if math.isinf(number) else int(number)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.top_k < 1 else None

    def apply(self, row: Row) -> None:
        row.maximum()
        if self.top_k < row.logits.size:
            cut = np.partition(row.logits, -self.top_k)[-self.top_k]
            row.keep_from(max(float(cut), -FLOAT32_MAX))


class SS_TopP(_Cut):
    """Keep rank 1, and rank i while p_1 + .. + p_i <= top_p.

    The token that crosses the limit is dropped; `inclusive=True` keeps it, as most engines do.
    """

    def __init__(self, top_p: float, inclusive: bool = False) -> None:
        self.top_p = _fraction(self, "top_p", top_p)
        self.inclusive = inclusive

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.top_p == 1.0 else None

    def apply(self, row: Row) -> None:
        probs = row.probs()
        limit = self.top_p + 1e-6  # rounding of the sums
        # Tokens this unlikely have less than 1 - limit between them: each comes after the cut.
        few = np.flatnonzero(probs > max(0.0, (1.0 - limit) / probs.size))
        order = few[np.argsort(-probs[few], kind="stable")]
        sums = probs[order].cumsum(dtype=np.float64)
        count = int(np.searchsorted(sums, limit, side="right"))
        if self.inclusive:
            count = int(np.searchsorted(sums, self.top_p - 1e-6, side="left")) + 1
        row.keep(order[: max(1, count)])


class SS_MinP(_Cut):
    """Keep p_i >= min_p * max p."""

    def __init__(self, min_p: float) -> None:
        self.min_p = _fraction(self, "min_p", min_p)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.min_p == 0.0 else None

    def apply(self, row: Row) -> None:
        top = row.maximum()
        row.keep_from(top + math.log(self.min_p) if self.min_p < 1.0 else top)


class _LogitStep(SS_Base):
    def needs_logits(self) -> bool:
        return True


class SS_LogitBias(_LogitStep):
    """l + bias; -inf bans. Zero, NaN, +inf and ids outside the vocabulary are ignored."""

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        if not isinstance(logit_bias, Mapping):
            raise ConfigError(f"SS_LogitBias: logit_bias is {logit_bias!r:.60}, expected a dict")
        _token_ids(self, "logit_bias", logit_bias)
        kept = {}
        for token, bias in logit_bias.items():
            number = _number_or_nan(bias)
            if number == 0.0 or math.isnan(number) or number > FLOAT32_MAX:
                continue
            kept[int(token)] = max(number, -math.inf)
        self.logit_bias = kept
        self._ids = np.array(list(kept), np.int64)
        with np.errstate(over="ignore"):
            self._bias = np.array(list(kept.values()), np.float64).astype(np.float32)

    def alt(self) -> SS_Base | None:
        return None if self.logit_bias else SS_NoOp()

    def apply(self, row: Row) -> None:
        logits = row.own()
        inside = (self._ids >= 0) & (self._ids < logits.size)
        logits[self._ids[inside]] += self._bias[inside]


def _number_or_nan(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class _TokenSet(_LogitStep):
    """A set of ids; those outside the vocabulary are ignored. No ids: off."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = _token_ids(self, "token_ids", token_ids)
        self._ids = np.array(self.token_ids, np.int64)

    def alt(self) -> SS_Base | None:
        return None if self.token_ids else SS_NoOp()

    def inside(self, row: Row) -> np.ndarray:
        """The ids that the row has."""
        return self._ids[(self._ids >= 0) & (self._ids < row.logits.size)]


class SS_BanTokens(_TokenSet):
    """Never draw these ids; ids outside the vocabulary are ignored."""

    def apply(self, row: Row) -> None:
        row.own()[self.inside(row)] = -np.inf
