"""Command-line flags of the samplers that ExLlamaV3 has not."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .adaptive import SS_XTC, SS_Mirostat
from .base import SS_Base
from .dry import SS_DRY
from .more import (
    SS_AllowTokens,
    SS_BanEOS,
    SS_DynaTemp,
    SS_Smoothing,
    SS_TopA,
    SS_TopNSigma,
    SS_TypicalP,
)
from .presets import MoreSteps

# (short flag, long flag, type, default, help). Long names are those of the common servers.
_FLAGS: tuple[tuple[str, str, type, Any, str], ...] = (
    ("-typ", "typical_p", float, 1.0, "typical-p, 1 is off"),
    ("-topa", "top_a", float, 0.0, "top-a, 0 is off"),
    ("-nsigma", "top_n_sigma", float, 0.0, "top-n-sigma, 0 is off"),
    ("-xtcp", "xtc_probability", float, 0.0, "XTC: probability, 0 is off"),
    ("-xtct", "xtc_threshold", float, 0.1, "XTC: threshold, more than 0.5 is off"),
    ("-drym", "dry_multiplier", float, 0.0, "DRY: strength, 0 is off"),
    ("-dryb", "dry_base", float, 1.75, "DRY: growth per token"),
    ("-drya", "dry_allowed_length", int, 2, "DRY: shortest repetition that costs something"),
    ("-dryr", "dry_range", int, 0, "DRY: newest tokens looked at, 0: all"),
    ("-dynmin", "min_temp", float, 1.0, "dynamic temperature: lowest, instead of -temp"),
    ("-dynmax", "max_temp", float, 1.0, "dynamic temperature: highest; both 1: off"),
    ("-dynexp", "temp_exponent", float, 1.0, "dynamic temperature: exponent"),
    ("-smf", "smoothing_factor", float, 0.0, "quadratic smoothing, 0 is off"),
    ("-smc", "smoothing_curve", float, 1.0, "quadratic smoothing: curve, 1 to 3"),
    ("-miro", "mirostat_mode", int, 0, "mirostat: 0 off, 2 on, instead of adaptive-p"),
    ("-mtau", "mirostat_tau", float, 5.0, "mirostat: surprise aimed at, bits"),
    ("-meta", "mirostat_eta", float, 0.1, "mirostat: learning rate"),
)
MORE_DEFAULTS: Mapping[str, Any] = {
    **{name: default for _, name, _, default, _ in _FLAGS},
    "dry_sequence_breakers": None,
    "allowed_tokens": None,
    "ban_eos_token": False,
}


def add_more_sampling_args(parser: ArgumentParser, default: Mapping[str, Any]) -> None:
    """Add the flags.

    Args:
        default: by long name without dashes; all of `MORE_DEFAULTS`.
    """
    for short, name, kind, _, text in _FLAGS:
        shown = f"{text}, default {default[name]}"
        parser.add_argument(short, f"--{name}", type=kind, default=default[name], help=shown)
    parser.add_argument(
        "-drysb",
        "--dry_sequence_breakers",
        nargs="*",
        default=default["dry_sequence_breakers"],
        help='DRY: texts that end a repetition, default newline : " *',
    )
    parser.add_argument(
        "-allow",
        "--allowed_tokens",
        nargs="*",
        type=int,
        default=default["allowed_tokens"],
        help="token ids, no other is drawn",
    )
    parser.add_argument(
        "-ban_eos",
        "--ban_eos_token",
        action="store_true",
        default=default["ban_eos_token"],
        help="never draw a token that ends the text",
    )


def more_steps(options: Mapping[str, Any], tokenizer: Any = None) -> MoreSteps:
    """The steps that the flags ask for; flags that are not there are off.

    Raises:
        ConfigError: a value outside its range, or a flag that needs the tokenizer.
    """
    o = {**MORE_DEFAULTS, **{k: v for k, v in options.items() if k in MORE_DEFAULTS}}
    bans: list[SS_Base] = [SS_AllowTokens(o["allowed_tokens"] or ())]
    if o["ban_eos_token"]:
        if tokenizer is None:
            raise ConfigError("-ban_eos: get_arg_sampler(args, tokenizer) needs the tokenizer")
        bans.append(SS_BanEOS(tokenizer))
    dry = SS_DRY(
        o["dry_multiplier"],
        o["dry_base"],
        o["dry_allowed_length"],
        o["dry_range"],
        o["dry_sequence_breakers"],
        tokenizer,
    )
    xtc = SS_XTC(o["xtc_probability"], o["xtc_threshold"], tokenizer=tokenizer)
    dynamic = (o["min_temp"], o["max_temp"]) != (1.0, 1.0)
    if o["mirostat_mode"] not in (0, 2):
        raise ConfigError(
            f"-miro --mirostat_mode: expected 0 or 2 (only version 2 is there), "
            f"got {o['mirostat_mode']}"
        )
    return MoreSteps(
        bans=bans,
        penalties=[dry],
        first_cuts=[
            SS_TopNSigma(o["top_n_sigma"]),
            SS_Smoothing(o["smoothing_factor"], o["smoothing_curve"]),
        ],
        heat=(SS_DynaTemp(o["min_temp"], o["max_temp"], o["temp_exponent"]) if dynamic else None),
        cuts=[SS_TypicalP(o["typical_p"]), SS_TopA(o["top_a"]), xtc],
        final=SS_Mirostat(o["mirostat_tau"], o["mirostat_eta"]) if o["mirostat_mode"] else None,
    )
