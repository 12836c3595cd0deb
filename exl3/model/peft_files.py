"""Reading a PEFT directory: `adapter_config.json` beside `adapter_model.safetensors` or `.bin`.

Source: the files that PEFT 0.17 writes.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, FormatError, UnsupportedError
from ..loader import load_tensors
from ..util.file import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")

# Options that change what a layer computes and have no code here: what to say of each.
_UNSUPPORTED = {
    "use_dora": "DoRA scales whole columns of the weight",
    "use_qalora": "QALoRA pools the input",
    "lora_bias": "the low-rank part has a bias",
    "modules_to_save": "whole modules were trained",
    "layer_replication": "layers are repeated; use the layer map of the model",
    "alora_invocation_tokens": "the adapter starts at a token (aLoRA)",
    "target_parameters": "parameters outside linear layers were trained",
    "trainable_token_indices": "embeddings were trained",
}
# Ways to start a training that change the base weights too.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
# Tensors that are part of the function, but not of plain LoRA.
_REFUSED_PARTS = ("lora_magnitude_vector", "lora_embedding_", ".bias", "lora_bias")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What the configuration says about sizes and scale."""

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    use_rslora: bool
    target_modules: list[str] | str | None

    def rank_of(self, module: str) -> int:
        """The rank of one module, named as the adapter names it."""
        return int(_lookup(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        alpha = float(_lookup(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _lookup(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of the name matches."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_config(directory: Path) -> PeftConfig:
    """Read and check the configuration.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: not LoRA, `fan_in_fan_out`, or a value of the wrong kind.
        UnsupportedError: a variant of LoRA that has no code here.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a directory written by PEFT")
    raw = read_json(path)
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {kind!r}, expected 'LORA'")
    if raw.get("fan_in_fan_out"):
        raise ConfigError(f"{path}: fan_in_fan_out is set, but linear layers here are (out, in)")
    for key, reason in _UNSUPPORTED.items():
        if raw.get(key):
            raise UnsupportedError(f"{path}: {key} is set: {reason}, which is not supported")
    if raw.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias is {raw['bias']!r}, only 'none' is supported")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UnsupportedError(
            f"{path}: init_lora_weights is {start!r}: the adapter belongs to a changed base model; "
            "convert it to plain LoRA with PEFT first"
        )
    targets = raw.get("target_modules")
    return PeftConfig(
        path=path,
        rank=_number(path, raw, "r", 8, whole=True),
        alpha=_number(path, raw, "lora_alpha", 8, whole=False),
        rank_pattern=_pattern(path, raw, "rank_pattern", whole=True),
        alpha_pattern=_pattern(path, raw, "alpha_pattern", whole=False),
        use_rslora=bool(raw.get("use_rslora")),
        target_modules=targets if isinstance(targets, str) or targets is None else list(targets),
    )


def _number(path: Path, raw: Mapping[str, Any], key: str, default: int, *, whole: bool) -> Any:
    value = raw.get(key, default)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (whole and (value != int(value) or value < 1)):
        raise ConfigError(
            f"{path}: {key} is {value!r}, expected a {'positive whole ' if whole else ''}number"
        )
    return int(value) if whole else float(value)


def _pattern(path: Path, raw: Mapping[str, Any], key: str, *, whole: bool) -> dict[str, Any]:
    table = raw.get(key) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {key} is {table!r}, expected names with numbers")
    for name in table:
        try:
            re.compile(name)
        except re.error as error:
            raise ConfigError(f"{path}: {key} has {name!r}, not a pattern: {error}") from error
    return {name: _number(path, table, name, 1, whole=whole) for name in table}


def read_weights(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of the adapter and the file they are from.

    Raises:
        FileNotFoundError: neither file is there.
        FormatError: the file is damaged, or holds more than tensors.
    """
    for name in WEIGHT_NAMES:
        path = directory / name
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            return path, load_tensors(path)
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise FormatError(f"{path}: cannot be read as weights: {error}") from error
        if not isinstance(tensors, dict) or not all(
            isinstance(t, Tensor) for t in tensors.values()
        ):
            raise FormatError(f"{path}: expected a table of tensors")
        return path, tensors
    raise FileNotFoundError(f"{directory}: holds neither {' nor '.join(WEIGHT_NAMES)}")


_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight$")


def split_pairs(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    """Modules with their A (r, in) and B (out, r), and the keys that are not LoRA.

    Raises:
        FormatError: one half of a pair is missing, or is not a finite matrix.
        UnsupportedError: tensors of a variant that has no code here.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    others = []
    for key, tensor in tensors.items():
        if any(part in key for part in _REFUSED_PARTS):
            raise UnsupportedError(f"{path}: tensor {key} is of no plain LoRA of linear layers")
        found = _PART.match(key)
        if found is None:
            others.append(key)
            continue
        if tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise FormatError(
                f"{path}: tensor {key} is {tensor.dtype} {tuple(tensor.shape)}, expected a matrix "
                "of finite floats"
            )
        halves.setdefault(found["module"], {})[found["half"]] = tensor
    for module, half in halves.items():
        if len(half) != 2:
            lone = "AB"["B" in half]
            raise FormatError(f"{path}: {module} has lora_{lone} but not lora_{'BA'[lone == 'B']}")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}, others
