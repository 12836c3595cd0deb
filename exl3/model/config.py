"""`Config`: what a model directory says about its model."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, UnsupportedError
from ..modules.rope import RopeSettings
from .arch import ARCHITECTURES
from .arch_spec import Arch, Derived, evaluate
from .layer_map import parse_layer_map
from .reader import NO_DEFAULT, Types, read_value, unknown_keys
from .rope_config import read_rope

if TYPE_CHECKING:
    from ..loader.base import TensorSource

LOAD_METHODS = ("mt_fread", "python")


@dataclass(slots=True)
class InferParams:
    """Choices that a program may change until `Model.load`, which reads them.

    `plain_dtype`: dtype that unquantised linear layers compute in; None: bfloat16 stays,
    everything else is float32. The fields of experts on the CPU and of kernel tuning exist for
    programs that set them.
    """

    plain_dtype: torch.dtype | None = None
    moe_cpu_offload: int = 0
    draft_moe_cpu_offload: int = 0
    moe_cpu_threads: int | None = None
    draft_moe_cpu_threads: int | None = None
    moe_cpu_offload_assigned: dict[str, int] = field(default_factory=dict)
    no_reconstruct: bool = False
    mgemm_K_threshold: int = 5
    mgemm_n_threshold: int = 16384


class Config:
    """Sizes, ids and tensor index of one model. Made by `from_directory`; attributes are read only
    by convention, except `stc`, `eos_token_id_list` and `infer_params`."""

    vision: Any = None
    vision_pp: Any = None
    image_token_id: int | None = None
    load_isq: bool = False
    pos_encoding_mode: str = "rope"

    # Set from the spec's fields
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    initializer_range: float
    rope_settings: RopeSettings

    @staticmethod
    def from_directory(
        directory: str,
        *,
        layer_map: str | Iterable[int] | None = None,
        load_method: str | None = None,
        ignore_keys: Sequence[str] = (),
    ) -> Config:
        """Read a model directory, or a GGUF file.

        Args:
            layer_map: layers in the order to run them, see `parse_layer_map`.
            load_method: `mt_fread` or `python`; None: the first.
            ignore_keys: keys of `config.json` known to be harmless although exl3 does not
                understand them.
        Raises:
            ConfigError: no, several or an unknown architecture; a key that is missing, has a bad
                value, or could change the numbers in a way that exl3 does not know.
            FormatError: damaged tensor files.
        """
        from ..loader.source import open_source

        if load_method not in (None, *LOAD_METHODS):
            raise ConfigError(f"load_method: expected one of {LOAD_METHODS}, got {load_method!r}")
        source = open_source(str(directory), load_method=load_method)
        return Config(
            source, layer_map=layer_map, load_method=load_method, ignore_keys=tuple(ignore_keys)
        )

    def __init__(
        self,
        source: Any,
        *,
        layer_map: str | Iterable[int] | None = None,
        load_method: str | None = None,
        ignore_keys: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.directory: str = str(source.directory)
        self.config_filename: str = str(source.config_filename)
        self.config_dict: dict[str, Any] = source.config_dict
        self.stc: TensorSource = source.stc
        self.load_method = load_method or LOAD_METHODS[0]
        self.uuid = uuid.uuid4()
        self.infer_params = InferParams()
        self.arch = _find_arch(self.config_dict, self.config_filename)
        self.architecture = self.arch_string = self.arch.name
        try:
            self._check_keys(ignore_keys)
            self._read_sizes()
            self._read_tokens()
            self._read_positions()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.config_filename}: {error}") from error
        self.layer_map_str = layer_map if isinstance(layer_map, str) else None
        self.layer_map: list[int] | None = (
            None if layer_map is None else parse_layer_map(layer_map, self.num_hidden_layers)
        )

    @property
    def model_classes(self) -> dict[str, type]:
        """Component name -> model class."""
        from .model import Model

        return {"text": Model}

    def read_cfg(self, types: Types, keys: str | Sequence[str], default: Any = NO_DEFAULT) -> Any:
        """First of `keys` present in the file, see `read_value`."""
        return read_value(self.config_dict, types, keys, default)

    def assert_cfg(
        self, types: Types, keys: str | Sequence[str], expected: Any, optional: bool = False
    ) -> None:
        """Check a key's value; with `optional` it may be absent.

        Raises:
            ConfigError: another value, or no value.
        """
        value = self.read_cfg(types, keys, expected if optional else None)
        if value != expected:
            raise ConfigError(
                f"{self.config_filename}: {keys!r} is {value!r}, and {self.architecture} is "
                f"supported with {expected!r} only"
            )

    def override_dynamic_seq_len(self, new_max_position_embeddings: int) -> None:
        """Choose between two sets of RoPE factors by this length; no effect on other models."""
        if self.rope_settings.variant in ("longrope", "dynamic"):
            self.rope_settings = read_rope(
                self.config_dict,
                self.head_dim,
                self.max_position_embeddings,
                int(new_max_position_embeddings),
            )

    def _check_keys(self, ignore_keys: Sequence[str]) -> None:
        unknown = [
            key for key in unknown_keys(self.config_dict, self.arch) if key not in ignore_keys
        ]
        if unknown:
            shown = ", ".join(f"{key} = {self.config_dict[key]!r}"[:80] for key in unknown)
            raise ConfigError(
                f"keys that exl3 does not understand for {self.architecture} and that may "
                f"change its numbers: {shown}. If they are harmless, name them in ignore_keys"
            )
        for key, allowed in self.arch.fixed.items():
            value = self.config_dict.get(key)
            if value is not None and value not in allowed and key not in ignore_keys:
                raise ConfigError(f"{key} is {value!r}, supported is only {allowed}")
        quant = self.read_cfg(
            dict, ["quantization_config", "text_config->quantization_config"], None
        )
        method = None if quant is None else quant.get("quant_method")
        if quant is not None and method != "exl3":
            raise UnsupportedError(
                f"{self.config_filename}: weights quantised by {method!r} cannot be read; use the "
                "unquantised checkpoint or an EXL3 one"
            )
        self.quantization_config: dict[str, Any] | None = quant

    def _read_sizes(self) -> None:
        values: dict[str, Any] = {}
        for spec in self.arch.fields:
            default = NO_DEFAULT if spec.required else spec.default
            if isinstance(default, Derived):
                missing = object()
                value = self.read_cfg(spec.types, spec.keys, missing)
                if value is missing:
                    value = evaluate(default.expression, values)
            else:
                value = self.read_cfg(spec.types, spec.keys, default)
            values[spec.name] = value
            setattr(self, spec.name, value)
        for name, value in values.items():
            if isinstance(value, int) and not isinstance(value, bool) and not 0 < value < 2**31:
                raise ConfigError(f"{name} is {value}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_q_heads} query heads are not a multiple of {self.num_kv_heads} "
                "key/value heads"
            )
        self.flags = {key: self.read_cfg(bool, key, False) for key in self.arch.flags}
        self.tie_word_embeddings: bool = self.read_cfg(
            bool,
            ["tie_word_embeddings", "text_config->tie_word_embeddings"],
            self.arch.default_tied,
        )

    def _read_tokens(self) -> None:
        def ids(name: str) -> list[int]:
            value = self.read_cfg((int, list), [name, f"text_config->{name}"], [])
            listed = value if isinstance(value, list) else [value]
            return [int(v) for v in listed if v is not None]

        self.eos_token_id_list: list[int] = ids("eos_token_id")
        self.eos_token_id: int | None = next(iter(self.eos_token_id_list), None)
        self.bos_token_id: int | None = next(iter(ids("bos_token_id")), None)
        self.pad_token_id: int | None = next(iter(ids("pad_token_id")), None)

    def _read_positions(self) -> None:
        self.max_position_embeddings: int = self.read_cfg(
            int, "max_position_embeddings", self.arch.default_max_positions
        )
        self.rope_settings = read_rope(
            self.config_dict, self.head_dim, self.max_position_embeddings, None
        )
        self.g_rope = self.rope_settings
        self.layer_windows: list[int] = self._read_windows()

    def _read_windows(self) -> list[int]:
        """Sliding window of every layer, 0: the whole context."""
        layers, rule = self.num_hidden_layers, self.arch.window
        window = self.read_cfg(int, "sliding_window", None)
        types = self.read_cfg(list, "layer_types", None)
        if rule is None:
            sliding = types is not None and set(types) != {"full_attention"}
            if window is not None or sliding:
                raise ConfigError(f"{self.architecture} has no sliding window, the file has one")
            return [0] * layers
        if "sliding_window" not in self.config_dict:
            window = rule.default
        if rule.flag is not None and not self.read_cfg(bool, rule.flag, False):
            window = None
        if types is None:
            first = 0
            if rule.first_layer is not None:
                first = self.read_cfg(int, rule.first_layer, rule.first_default)
            return [window if window and i >= first else 0 for i in range(layers)]
        if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"layer_types: expected {layers} entries, each full_attention or "
                f"sliding_attention, got {len(types)}: {sorted(map(str, set(types)))}"
            )
        if window is None and "sliding_attention" in types:
            raise ConfigError("layer_types has sliding_attention, but there is no sliding_window")
        return [(window or 0) if t == "sliding_attention" else 0 for t in types]


def _find_arch(config: dict[str, Any], filename: str) -> Arch:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{filename}: architectures must name exactly one, got {names!r}")
    if names[0] not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"{filename}: unknown architecture {names[0]!r}; known are {known}")
    return ARCHITECTURES[names[0]]
