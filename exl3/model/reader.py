"""Typed reads from a `config.json` dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arch_spec import Arch

Types = type | Sequence[type]

_MISSING = object()
NO_DEFAULT = object()

# Keys that say nothing about the numbers a text model computes.
HARMLESS_KEYS = frozenset(
    [
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "original_quantization_config",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
        "use_mrope",
    ]
)
HARMLESS_PREFIXES = ("_", "unsloth")

# Keys of the decoder that `Config` reads outside the spec's fields.
COMMON_KEYS = frozenset(
    [
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "tie_word_embeddings",
        "sliding_window",
        "layer_types",
    ]
)


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for part in path.split("->"):
        if not isinstance(node, Mapping) or part not in node:
            return _MISSING
        node = node[part]
    return node


def _convert(value: Any, wanted: tuple[type, ...]) -> Any:
    """The value as one of the types, or `_MISSING`; bool is never taken for a number."""
    if isinstance(value, bool):
        return value if bool in wanted else _MISSING
    if isinstance(value, wanted):
        return value
    if isinstance(value, int) and float in wanted:
        return float(value)
    if isinstance(value, float) and int in wanted and value.is_integer():
        return int(value)
    return _MISSING


def read_value(
    config: Mapping[str, Any], types: Types, keys: str | Sequence[str], default: Any = NO_DEFAULT
) -> Any:
    """First of the keys that is present and not null; `a->b` looks inside a nested dictionary.

    Raises:
        TypeError: the value has another type.
        ValueError: no key is present and there is no default.
    """
    wanted = (types,) if isinstance(types, type) else tuple(types)
    names = [keys] if isinstance(keys, str) else list(keys)
    for name in names:
        value = _lookup(config, name)
        if value is _MISSING or (value is None and type(None) not in wanted):
            continue
        converted = _convert(value, wanted)
        if converted is _MISSING:
            expected = " or ".join(t.__name__ for t in wanted)
            raise TypeError(f"config key {name!r}: expected {expected}, got {value!r}")
        return converted
    if default is NO_DEFAULT:
        raise ValueError(f"config key {' or '.join(map(repr, names))} is missing")
    return default


def unknown_keys(config: Mapping[str, Any], arch: Arch) -> list[str]:
    """Keys with a value that neither the spec nor the list of harmless ones knows."""
    known = set(COMMON_KEYS | HARMLESS_KEYS)
    known.update(key for f in arch.fields for key in f.keys)
    known.update(arch.flags, arch.fixed)
    if arch.window is not None:
        known.update(k for k in (arch.window.flag, arch.window.first_layer) if k)
    return sorted(
        key
        for key, value in config.items()
        if value is not None and key not in known and not key.startswith(HARMLESS_PREFIXES)
    )
