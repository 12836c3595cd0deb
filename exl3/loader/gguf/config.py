"""config.json and generation_config.json from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import FormatError, UnsupportedError
from .header import GgufHeader, scalar
from .names import ARCHITECTURES, MISTRAL, Architecture

# The factors of llama3 RoPE scaling in use; the file only has their effect on each frequency.
_LLAMA3_CANDIDATES = (8.0, 32.0, 16.0, 4.0)
_LLAMA3_ORIGINAL_LENGTH = 8192
_DEFAULT_ROPE_THETA = 10_000.0
# No size of a model comes near; more layers than this would be built before anything is missed.
_MAX_COUNT = 1 << 30
_MAX_LAYERS = 1 << 14


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises UnsupportedError for a model that exl3 has no map for."""
    name = scalar(header.path, header.metadata, "general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"{header.path}: GGUF architecture {name!r}, supported are {known}")
    if header.metadata.get(f"{name}.expert_count"):
        raise UnsupportedError(f"{header.path}: a mixture-of-experts model of {name!r}")
    title = header.metadata.get("general.name")
    window = header.metadata.get(f"{name}.attention.sliding_window")
    if name == "llama" and (window or (isinstance(title, str) and "mistral" in title.lower())):
        return MISTRAL
    return ARCHITECTURES[name]


def build_config(header: GgufHeader, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The Hugging Face configuration.

    Args:
        rope_factors: the tensor `rope_freqs.weight`, if the file has one.
    """
    arch = architecture_of(header)
    get = _Keys(header)
    heads = get.count("attention.head_count")
    hidden = get.count("embedding_length")
    tensors = {tensor.name for tensor in header.tensors}
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "hidden_size": hidden,
        "intermediate_size": get.count("feed_forward_length"),
        "num_hidden_layers": get.count("block_count", limit=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": get.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(get, arch, heads, hidden),
        "hidden_act": "silu",
        "max_position_embeddings": get.count("context_length"),
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": get.number("rope.freq_base", _DEFAULT_ROPE_THETA),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": get.count("vocab_size", len(token_list(header))),
        **_biases(arch, tensors),
    }
    scaling = _rope_scaling(get, config, rope_factors)
    if scaling:
        config["rope_scaling"] = scaling
    if arch.model_type == "qwen2" and config["head_dim"] * heads == hidden:
        del config["head_dim"]  # implied in that family
    if arch is MISTRAL:
        config["sliding_window"] = get.optional("attention.sliding_window")
    config |= special_ids(header)
    config["dtype"] = "float16"
    return config


class _Keys:
    """Typed access to the keys `<architecture>.<key>`."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._prefix = scalar(header.path, header.metadata, "general.architecture", str)

    def optional(self, key: str) -> Any:
        return self.header.metadata.get(f"{self._prefix}.{key}")

    def count(self, key: str, default: int | None = None, *, limit: int = _MAX_COUNT) -> int:
        name = f"{self._prefix}.{key}"
        if default is not None and name not in self.header.metadata:
            return default
        value = scalar(self.header.path, self.header.metadata, name, int)
        if not 1 <= value <= limit:
            raise FormatError(f"{self.header.path}: key {name!r} is {value}, expected 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self._prefix}.{key}"
        if default is not None and name not in self.header.metadata:
            return default
        value = scalar(self.header.path, self.header.metadata, name, float)
        if not math.isfinite(value) or value <= 0:
            raise FormatError(f"{self.header.path}: key {name!r} is {value}, expected above 0")
        return value


def _head_dim(get: _Keys, arch: Architecture, heads: int, hidden: int) -> int:
    rotary = get.optional("rope.dimension_count")
    size = get.count("attention.key_length", rotary or hidden // heads)
    value_size = get.count("attention.value_length", size)
    if value_size != size or (rotary is not None and rotary != size):
        raise UnsupportedError(
            f"{get.header.path}: heads of {size} for keys, {value_size} for values and {rotary} "
            f"for RoPE; {arch.class_name} needs one size"
        )
    return size


def _biases(arch: Architecture, tensors: set[str]) -> dict[str, bool]:
    """Flags of the architectures where biases are optional; Qwen2 always has them."""
    attention = any(name.startswith("blk.0.attn_") and name.endswith(".bias") for name in tensors)
    mlp = any(name.startswith("blk.0.ffn_") and name.endswith(".bias") for name in tensors)
    if arch.model_type == "llama":
        return {"attention_bias": attention, "mlp_bias": mlp}
    return {"attention_bias": attention} if arch.model_type == "qwen3" else {}


def _rope_scaling(
    get: _Keys, config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3_scaling(get.header, config, factors)
    kind = get.optional("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = get.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = get.count("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
        }
    raise UnsupportedError(f"{get.header.path}: RoPE scaling of type {kind!r}")


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """By how much llama3 scaling slows each frequency (low and high frequency factors 1 and 4)."""
    low_wavelength = _LLAMA3_ORIGINAL_LENGTH / 1.0
    high_wavelength = _LLAMA3_ORIGINAL_LENGTH / 4.0
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high_wavelength:
            result.append(1.0)
        elif wavelength > low_wavelength:
            result.append(factor)
        else:
            smooth = (_LLAMA3_ORIGINAL_LENGTH / wavelength - 1.0) / (4.0 - 1.0)
            result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


def _llama3_scaling(
    header: GgufHeader, config: Mapping[str, Any], factors: Sequence[float]
) -> dict[str, Any]:
    for factor in _LLAMA3_CANDIDATES:
        expected = llama3_factors(config["rope_theta"], config["head_dim"], factor)
        if len(expected) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL_LENGTH,
            }
    raise UnsupportedError(
        f"{header.path}: rope_freqs.weight has factors other than llama3 scaling; take the "
        "original Hugging Face model"
    )


def token_list(header: GgufHeader) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens) or not tokens:
        raise FormatError(f"{header.path}: no list of tokens in tokenizer.ggml.tokens")
    return tokens


def special_ids(header: GgufHeader) -> dict[str, int]:
    """`bos_token_id` and the like, as far as the file names them."""
    found: dict[str, int] = {}
    count = len(token_list(header))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        full = f"tokenizer.ggml.{key}_token_id"
        if full in header.metadata:
            number = scalar(header.path, header.metadata, full, int)
            if not 0 <= number < count:
                raise FormatError(f"{header.path}: {full} is {number}, expected 0 to {count - 1}")
            found[f"{name}_token_id"] = number
    return found


def build_generation_config(header: GgufHeader) -> dict[str, Any]:
    """EOS with the end-of-turn token, where the file has one of its own."""
    ids: dict[str, Any] = {k: v for k, v in special_ids(header).items() if k != "unk_token_id"}
    ends = [ids[key] for key in ("eos_token_id",) if key in ids]
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        number = header.metadata.get(key)
        if isinstance(number, int) and 0 <= number < len(token_list(header)):
            ends += [number] if number not in ends else []
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return ids
