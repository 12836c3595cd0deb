"""Steps that look at the tokens so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .base import SS_Base
from .state import Row
from .steps import SS_NoOp, _LogitStep, _number


def _factors(count: int, sustain: int, decay: int) -> NDArray[np.float64] | None:
    """Factor of the last tokens, oldest first: 1 up to distance `sustain`, falling to 0 at
    `sustain + decay`. None: all of them are 1."""
    if count <= sustain:
        return None
    distance = np.arange(count, 0, -1)
    return np.clip(1.0 - (distance - sustain) / max(decay, 1), 0.0, 1.0)


class _Penalty(_LogitStep):
    """`sustain_range` and `decay_range` say how far back a token counts."""

    def __init__(self, sustain_range: int, decay_range: int) -> None:
        self.sustain_range = _length(self, "sustain_range", sustain_range)
        self.decay_range = _length(self, "decay_range", decay_range)

    def reqs_past_ids(self) -> bool:
        return True

    def window(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Past ids that count, oldest first, and their factors."""
        past = row.past_ids if row.past_ids is not None else np.zeros(0, np.int64)
        reach = self.sustain_range + max(self.decay_range - 1, 0)
        ids = past[max(0, past.size - reach) :]
        factors = _factors(ids.size, self.sustain_range, self.decay_range)
        inside = (ids >= 0) & (ids < row.logits.size)
        if not inside.all():  # ids of images
            ids = ids[inside]
            factors = None if factors is None else factors[inside]
        return ids, factors


def _length(step: SS_Base, name: str, value: int) -> int:
    number = _number(step, name, value)
    if number < 0:
        raise ConfigError(f"{type(step).__name__}: {name} is {value}, expected 0 or more")
    return int(min(number, 1e15))


def _largest(
    ids: NDArray[np.int64], factors: NDArray[np.float64] | None, size: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Each distinct id with its largest factor, which is that of its newest occurrence."""
    newest = np.full(size, -1.0)
    newest[ids] = 1.0 if factors is None else factors  # the last of equal indices wins
    seen = np.flatnonzero(newest > 0.0)
    return seen, newest[seen]


class SS_RepP(_Penalty):
    """Repetition penalty: positive logits divided by `rep_p`, negative ones multiplied."""

    def __init__(
        self, rep_p: float = 1.0, sustain_range: int = 10**8, decay_range: int = 0
    ) -> None:
        super().__init__(sustain_range, decay_range)
        self.rep_p = _number(self, "rep_p", rep_p)
        if self.rep_p <= 0.0:
            raise ConfigError(f"SS_RepP: rep_p is {rep_p}, expected more than 0")

    def alt(self) -> SS_Base | None:
        off = self.rep_p == 1.0 or self.sustain_range + self.decay_range == 0
        return SS_NoOp() if off else None

    def apply(self, row: Row) -> None:
        ids, factors = self.window(row)
        if not ids.size:
            return
        seen, factor = _largest(ids, factors, row.logits.size)
        values = row.own()[seen].astype(np.float64)
        finite = np.isfinite(values)
        seen, factor, values = seen[finite], factor[finite], values[finite]
        full = np.where(values > 0.0, values / self.rep_p, values * self.rep_p)
        row.logits[seen] = (1.0 - factor) * values + factor * full


class SS_PresFreqP(_Penalty):
    """l - freq_p * (sum of factors) - pres_p * (largest factor)."""

    def __init__(
        self,
        pres_p: float = 0.0,
        freq_p: float = 0.0,
        sustain_range: int = 10**8,
        decay_range: int = 0,
    ) -> None:
        super().__init__(sustain_range, decay_range)
        self.pres_p = _number(self, "pres_p", pres_p)
        self.freq_p = _number(self, "freq_p", freq_p)

    def alt(self) -> SS_Base | None:
        off = self.pres_p == self.freq_p == 0.0 or self.sustain_range + self.decay_range == 0
        return SS_NoOp() if off else None

    def apply(self, row: Row) -> None:
        ids, factors = self.window(row)
        if not ids.size:
            return
        logits = row.own()
        if self.freq_p:
            logits -= self.freq_p * np.bincount(ids, factors, minlength=logits.size)
        if self.pres_p:
            seen, factor = _largest(ids, factors, logits.size)
            logits[seen] -= self.pres_p * factor
