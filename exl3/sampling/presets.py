"""Ready-made samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .adaptive import SS_AdaptiveP
from .base import SS_Base
from .chain import CustomSampler
from .penalties import SS_PresFreqP, SS_RepP
from .steps import (
    SS_Argmax,
    SS_LogitBias,
    SS_MinP,
    SS_Sample,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
)


def _is_cold(temperature: float) -> bool:
    return SS_Temperature(temperature).temperature <= 0


class DefaultSampler(CustomSampler):
    """Min-p 0.08, temperature 0.8."""

    def __init__(self) -> None:
        super().__init__([SS_MinP(0.08), SS_Temperature(0.8), SS_Sample()])


class ArgmaxSampler(CustomSampler):
    """Greedy."""

    def __init__(self) -> None:
        super().__init__([SS_Argmax()])


GreedySampler = ArgmaxSampler


class CategoricalSampler(CustomSampler):
    """The whole distribution at a temperature."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__(
            [SS_Argmax()] if _is_cold(temperature) else [SS_Temperature(temperature), SS_Sample()]
        )


GumbelSampler = CategoricalSampler


class TopKSampler(CustomSampler):
    """The `top_k` most likely tokens."""

    def __init__(self, top_k: int, temperature: float = 1.0) -> None:
        if top_k < 1:
            raise ConfigError(f"TopKSampler: top_k is {top_k}, expected 1 or more")
        if top_k == 1 or _is_cold(temperature):
            super().__init__([SS_Argmax()])
        else:
            super().__init__([SS_Temperature(temperature), SS_TopK(top_k), SS_Sample()])


class TopPSampler(CustomSampler):
    """The most likely tokens that have `top_p` of the probability between them."""

    def __init__(
        self, top_p: float, temperature: float = 1.0, temperature_last: bool = False
    ) -> None:
        if top_p == 0 or _is_cold(temperature):
            super().__init__([SS_Argmax()])
            return
        steps: list[SS_Base] = [SS_Temperature(temperature), SS_TopP(top_p)]
        super().__init__([*(steps[::-1] if temperature_last else steps), SS_Sample()])


@dataclass(frozen=True, slots=True)
class MoreSteps:
    """What a `ComboSampler` can have beyond its own arguments."""

    bans: Sequence[SS_Base] = ()
    penalties: Sequence[SS_Base] = ()
    first_cuts: Sequence[SS_Base] = ()  # before the temperature, and before all other cuts
    heat: SS_Base | None = None  # in place of the temperature
    cuts: Sequence[SS_Base] = ()  # after min-p, top-k and top-p
    final: SS_Base | None = None  # in place of the draw


class ComboSampler(CustomSampler):
    """All the usual knobs in one."""

    def __init__(
        self,
        rep_p: float = 1.0,
        freq_p: float = 0.0,
        pres_p: float = 0.0,
        rep_sustain_range: int = 10**8,
        rep_decay_range: int = 0,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        temp_last: bool = False,
        adaptive_target: float = 1.0,
        adaptive_decay: float = 0.9,
        logit_bias: Mapping[int, float] | None = None,
        *,
        more: MoreSteps | None = None,
    ) -> None:
        """`more`: steps that ExLlamaV3 has not, each at its place among the others."""
        more = more or MoreSteps()
        steps: list[SS_Base] = [
            SS_LogitBias(logit_bias or {}),
            *more.bans,
            SS_RepP(rep_p, rep_sustain_range, rep_decay_range),
            SS_PresFreqP(pres_p, freq_p, rep_sustain_range, rep_decay_range),
            *more.penalties,
        ]
        if _is_cold(temperature) or top_k == 1:
            super().__init__([*steps, SS_Argmax()])
            return
        heat = [SS_Temperature(temperature) if more.heat is None else more.heat]
        cuts: list[SS_Base] = [SS_MinP(min_p), SS_TopK(top_k), SS_TopP(top_p), *more.cuts]
        steps += more.first_cuts
        steps += [*cuts, *heat] if temp_last else [*heat, *cuts]
        final: SS_Base = SS_Sample()
        if more.final is not None:
            final = more.final
        elif adaptive_target != 1.0:
            final = SS_AdaptiveP(adaptive_target, adaptive_decay)
        super().__init__([*steps, final])


class AdaptivePSampler(CustomSampler):
    """Min-p, then Adaptive-P."""

    def __init__(self, min_p: float = 0.08, target: float = 0.5, decay: float = 0.9) -> None:
        super().__init__([SS_MinP(min_p), SS_AdaptiveP(target, decay)])
