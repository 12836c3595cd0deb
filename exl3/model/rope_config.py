"""Reading rotary settings from a configuration, in the old and the new form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..modules.rope import ROPE_VARIANTS, RopeSettings
from .reader import read_value

_ALIASES = {"su": "longrope", "none": "default", "": "default"}
_KEYS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
        "finetuned",
    ]
)
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def _factors(scaling: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = scaling.get(key) or ()
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(v, (int, float)) for v in values
    ):
        raise ConfigError(f"rope_parameters: {key} must be a list of numbers")
    return tuple(float(v) for v in values)


def _variant(scaling: Mapping[str, Any]) -> str:
    variant = read_value(scaling, str, ["rope_type", "type"], "default")
    variant = _ALIASES.get(variant, variant)
    if variant not in ROPE_VARIANTS:
        raise ConfigError(
            f"rope_type {variant!r} is unknown; this version knows {', '.join(ROPE_VARIANTS)}"
        )
    unknown = sorted(k for k, v in scaling.items() if k not in _KEYS and v is not None)
    if unknown:
        raise ConfigError(f"rope_parameters has keys that exl3 does not understand: {unknown}")
    missing = [k for k in _NEEDED.get(variant, ()) if scaling.get(k) is None]
    if missing:
        raise ConfigError(f"rope_type {variant!r} needs {missing[0]!r} in rope_parameters")
    return variant


def read_rope(
    config: Mapping[str, Any], head_dim: int, max_positions: int, seq_len: int | None
) -> RopeSettings:
    """Rotary settings from `rope_parameters`, or from `rope_theta` with `rope_scaling`.

    Args:
        seq_len: length to choose factors by; None: the model's own maximum.
    Raises:
        ConfigError: an unknown variant or key, or a missing one.
    """
    scaling = read_value(config, dict, ["rope_parameters", "rope_scaling"], {})
    variant = _variant(scaling)
    theta = read_value(scaling, float, "rope_theta", None)
    if theta is None:
        theta = read_value(config, float, "rope_theta", 10000.0)
    partial = read_value(scaling, float, "partial_rotary_factor", None)
    if partial is None:
        partial = read_value(config, float, "partial_rotary_factor", 1.0)
    original = read_value(scaling, int, "original_max_position_embeddings", None)
    if original is None:
        original = read_value(config, int, "original_max_position_embeddings", max_positions)
    if not theta > 1 or not 0 < partial <= 1 or original < 1:
        raise ConfigError(
            f"rope: rope_theta {theta}, partial_rotary_factor {partial}, original_max_position_"
            f"embeddings {original} make no sense"
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"rope: {rotary_dim} rotary dims, expected an even number above 0")
    number = lambda key, default: read_value(scaling, float, key, default)  # noqa: E731
    factor = number("factor", max_positions / original if variant == "longrope" else 1.0)
    return RopeSettings(
        variant=variant,
        theta=theta,
        rotary_dim=rotary_dim,
        max_positions=max_positions,
        original_max=original,
        seq_len=max_positions if seq_len is None else seq_len,
        factor=factor,
        attention_factor=number("attention_factor", None),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale", None),
        mscale_all_dim=number("mscale_all_dim", None),
        truncate=read_value(scaling, bool, "truncate", True),
        short_factor=_factors(scaling, "short_factor"),
        long_factor=_factors(scaling, "long_factor"),
    )
