"""Rotary position embedding: frequencies of every variant.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753); linear,
dynamic NTK and Llama 3.1 scaling as their published configurations define them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """One model's rotary embedding, as read from its configuration.

    `original_max`: positions before extension. `max_positions`: after it. `seq_len`: length that
    chooses between short and long factors, and the base of `dynamic`; fixed for a model's life,
    because keys already in the cache cannot be turned again.
    """

    variant: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_max: int
    seq_len: int
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies float32 (rotary_dim/2,) and the scale of cos and sin."""
        return _VARIANTS[self.variant](self)


def _base_frequencies(theta: float, dim: int) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (theta**exponent)


def _default(s: RopeSettings) -> tuple[Tensor, float]:
    return _base_frequencies(s.theta, s.rotary_dim), 1.0


def _linear(s: RopeSettings) -> tuple[Tensor, float]:
    return _base_frequencies(s.theta, s.rotary_dim) / s.factor, 1.0


def _dynamic(s: RopeSettings) -> tuple[Tensor, float]:
    length = max(s.seq_len, s.max_positions)
    stretch = s.factor * length / s.max_positions - (s.factor - 1)
    theta = s.theta * stretch ** (s.rotary_dim / (s.rotary_dim - 2))
    return _base_frequencies(theta, s.rotary_dim), 1.0


def _llama3(s: RopeSettings) -> tuple[Tensor, float]:
    frequency = _base_frequencies(s.theta, s.rotary_dim)
    turns = s.original_max * frequency / (2 * math.pi)  # full turns over the original context
    share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 0: stretched by `factor`, 1: left alone
    return frequency * (share + (1 - share) / s.factor), 1.0


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(s: RopeSettings) -> tuple[Tensor, float]:
    scale = s.attention_factor
    if scale is None and s.mscale and s.mscale_all_dim:
        scale = _yarn_scale(s.factor, s.mscale) / _yarn_scale(s.factor, s.mscale_all_dim)
    elif scale is None:
        scale = _yarn_scale(s.factor)

    def dim_of(turns: float) -> float:
        """Index of the dim that makes this many turns over the original context."""
        return (
            s.rotary_dim
            * math.log(s.original_max / (turns * 2 * math.pi))
            / (2 * math.log(s.theta))
        )

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.rotary_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(s.rotary_dim // 2, dtype=torch.float32)
    stretched = ((index - low) / (high - low)).clamp(0.0, 1.0)
    frequency = _base_frequencies(s.theta, s.rotary_dim)
    return frequency * (1 - stretched) + frequency / s.factor * stretched, scale


def _longrope(s: RopeSettings) -> tuple[Tensor, float]:
    scale = s.attention_factor
    if scale is None:
        grown = s.factor > 1.0
        scale = math.sqrt(1 + math.log(s.factor) / math.log(s.original_max)) if grown else 1.0
    factors = s.long_factor if s.seq_len > s.original_max else s.short_factor
    if len(factors) != s.rotary_dim // 2:
        raise ConfigError(
            f"longrope: {len(factors)} factors, expected {s.rotary_dim // 2} (half the rotary dim)"
        )
    frequency = _base_frequencies(s.theta, s.rotary_dim)
    return frequency / torch.tensor(factors, dtype=torch.float32), scale


_VARIANTS: dict[str, Callable[[RopeSettings], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_VARIANTS = tuple(_VARIANTS)


class Rope:
    """Frequencies shared by all layers with the same settings."""

    def __init__(self, settings: RopeSettings) -> None:
        self.settings = settings
        self.inv_freq, self.scale = settings.frequencies()
        self._copies: dict[torch.device, Tensor] = {}

    def frequencies_on(self, device: torch.device) -> Tensor:
        """`inv_freq` on a device, copied there once."""
        if device == self.inv_freq.device:
            return self.inv_freq
        if device not in self._copies:
            self._copies[device] = self.inv_freq.to(device)
        return self._copies[device]
