"""The quantiser that Transformers asks to prepare a model for EXL3 tensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import ConfigError, FormatError, UnsupportedError
from ..loader import SafetensorsCollection, TensorSource
from .hf_linear import STORED, Exl3Linear

logger = logging.getLogger(__name__)

METHOD = "exl3"


class Exl3HfConfig(QuantizationConfigMixin):
    """`quantization_config` of an EXL3 directory: any fields, for information only."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.quant_method = METHOD  # type: ignore[assignment]


class Exl3HfQuantizer(HfQuantizer):
    """Puts an `Exl3Linear` in the place of each linear layer that has a trellis in the files."""

    requires_calibration = True

    def update_attn_implementation(self, config: Any) -> Any:
        """See `HfQuantizer`: called before anything is fetched."""
        _check_local(config)
        return config

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """See `HfQuantizer`."""
        devices = kwargs.get("device_map")
        if isinstance(devices, dict) and "disk" in devices.values():
            raise UnsupportedError("device_map: EXL3 layers cannot be kept on disk")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        directory = _check_local(model.config)
        with SafetensorsCollection(directory) as stc:
            _Replacer(model, stc, directory).run()
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.requires_grad_(False)  # so that a plain call needs no gradient through EXL3 layers
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """See `HfQuantizer`: the directory that was loaded is the form to keep."""
        return False

    @property
    def is_trainable(self) -> bool:
        """See `HfQuantizer`: the kernels have no gradient."""
        return False


def _check_local(config: Any) -> Path:
    name = str(getattr(config, "name_or_path", "") or "")
    path = Path(name)
    if not name or not path.is_dir():
        raise ConfigError(
            f"EXL3 models are loaded from a local directory, and {name!r} is none; fetch it first"
        )
    return path


class _Replacer:
    """Matches the layers of one model with the tensors of a directory."""

    def __init__(self, model: Any, stc: TensorSource, directory: Path) -> None:
        self.model, self.stc, self.directory = model, stc, directory
        self.linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}

    def run(self) -> None:
        """Replace all layers.

        Raises:
            UnsupportedError: a trellis has no layer of its own in the model.
            FormatError: a linear layer has no tensors, or a trellis not the layer's size.
        """
        keys = [key[: -len(".trellis")] for key in self.stc.keys() if key.endswith(".trellis")]  # noqa: SIM118
        if not keys:
            raise FormatError(f"{self.directory}: no tensor ends in .trellis: not an EXL3 model")
        if self.model.get_output_embeddings() is None:  # without a head its tensors are left out
            keys = [key for key in keys if key.startswith(f"{self.model.base_model_prefix}.")]
        names = {key: self._name_of(key) for key in keys}
        lost = [key for key, name in names.items() if name is None]
        if lost:
            raise UnsupportedError(self._lost_text(lost))
        chosen = {name: key for key, name in names.items() if name is not None}
        self._check_rest(chosen)
        self._untie(chosen)
        for name, key in chosen.items():
            self.model.set_submodule(name, self._layer(key, self.linears[name]))

    def _name_of(self, key: str) -> str | None:
        """The module that the tensors `key` belong to. A base model lacks its prefix."""
        prefix = f"{self.model.base_model_prefix}."
        for name in (key, key.removeprefix(prefix), prefix + key):
            if name in self.linears:
                return name
        return None

    def _lost_text(self, lost: list[str]) -> str:
        block = lost[0].rpartition(".")[0].rpartition(".")[0]
        parts = list(dict.fromkeys(key.rpartition(".")[2] for key in lost))
        there = [name for name in self.linears if name.startswith(f"{block}.")]
        return (
            f"{type(self.model).__name__} has no linear layer {lost[0]}, nor others that the files "
            f"hold ({', '.join(parts)}); in their place it has {', '.join(there) or 'none'}. "
            "Layers that Transformers fuses cannot be loaded there: run the model with exl3"
        )

    def _check_rest(self, chosen: dict[str, str]) -> None:
        """Layers without a trellis must have a plain weight: else they would stay random."""
        tied = self.model.all_tied_weights_keys
        for name in self.linears:
            known = (f"{name}.weight", f"{self.model.base_model_prefix}.{name}.weight")
            if name in chosen or f"{name}.weight" in tied or any(k in self.stc for k in known):
                continue
            raise FormatError(
                f"{self.directory}: the layer {name} of {type(self.model).__name__} has "
                "neither a trellis nor a weight"
            )

    def _untie(self, chosen: dict[str, str]) -> None:
        """A quantised layer shares no weight with another."""
        tied = self.model.all_tied_weights_keys
        for target, source in list(tied.items()):
            if target.removesuffix(".weight") in chosen or source.removesuffix(".weight") in chosen:
                del tied[target]
        head = self.model.get_output_embeddings()
        if any(self.linears[name] is head for name in chosen):
            self.model.config.tie_word_embeddings = False
            self.model.config.get_text_config(decoder=True).tie_word_embeddings = False

    def _layer(self, key: str, old: nn.Linear) -> Exl3Linear:
        infos = {n: self.stc.info(f"{key}.{n}") for n in STORED if f"{key}.{n}" in self.stc}
        if (old.bias is not None) != ("bias" in infos):
            here, there = ("a", "none") if "bias" in infos else ("no", "one")
            raise FormatError(
                f"{self.directory}: {key} has {here} bias, the layer of "
                f"{type(self.model).__name__} has {there}"
            )
        shape = infos["trellis"].shape
        expected = tuple(-(-size // 128) * 8 for size in (old.in_features, old.out_features))
        if tuple(shape[:2]) != expected:
            raise FormatError(
                f"{self.directory}: {key}.trellis has shape {tuple(shape)}, expected "
                f"{expected} and the words of a tile"
            )
        return Exl3Linear.from_infos(old.in_features, old.out_features, infos)
