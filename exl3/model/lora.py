"""`LoRA`: a low-rank adapter on a loaded model."""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, ShapeError
from ..modules.linear import Linear, padded
from ..modules.low_rank import LowRank
from ..settings import settings
from .adapters import Adapter
from .peft_files import PeftConfig, read_config, read_weights, split_pairs

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger(__name__)


class LoRA:
    """An adapter that is loaded on a model until `unload`.

    It applies to every forward pass and to every job that does not choose its own adapters (`loras`
    of `Job`, or of the parameters of `Model.forward`).
    """

    def __init__(
        self,
        model: Model,
        name: str,
        *,
        config: PeftConfig,
        adapter: Adapter,
        lora_scaling: float,
        skipped: tuple[str, ...],
    ) -> None:
        self.name = name
        self.lora_r, self.lora_alpha = config.rank, config.alpha
        self.lora_scaling = lora_scaling
        self.target_modules = config.target_modules
        self.skipped = skipped
        self._adapter: Adapter | None = adapter
        self._model = weakref.ref(model)
        model.adapters.loaded.append(self)

    @staticmethod
    def from_directory(
        model: Model, directory: str | os.PathLike[str], lora_scaling: float = 1.0
    ) -> LoRA:
        """Load a directory that PEFT wrote.

        Args:
            model: loaded; every adapter of it is dropped when it is unloaded.
            lora_scaling: factor on top of alpha / r.
        Raises:
            FileNotFoundError: no configuration or no weights in the directory.
            ConfigError: the model is not loaded, or no layer of it is in the adapter; in strict
                mode also if the adapter has anything that the model has no place for, which else
                is a warning.
            ShapeError: a tensor does not fit its layer or the rank.
            FormatError: a damaged file.
            UnsupportedError: DoRA, biases, trained embeddings or whole modules.
        """
        if not model.loaded:
            raise ConfigError("LoRA: the model is not loaded, call load() first")
        path = Path(directory)
        config = read_config(path)
        file, tensors = read_weights(path)
        pairs, skipped = split_pairs(file, tensors)
        reader = _Fitter(model, config, file)
        layers, unmatched = reader.fit(pairs, lora_scaling)
        skipped += unmatched
        _report_skipped(file, skipped, len(layers))
        adapter = Adapter(path.name, reader.placed(layers), _digest(layers))
        return LoRA(
            model,
            path.name,
            config=config,
            adapter=adapter,
            lora_scaling=lora_scaling,
            skipped=tuple(skipped),
        )

    @property
    def adapter(self) -> Adapter:
        """The weights.

        Raises:
            ConfigError: unloaded.
        """
        if self._adapter is None:
            raise ConfigError(f"LoRA {self.name} is unloaded")
        return self._adapter

    @property
    def loaded(self) -> bool:
        """True until `unload`, or until the model is unloaded."""
        return self._adapter is not None

    def unload(self) -> None:
        """Take the adapter off the model; harmless twice. Jobs enqueued before keep it to their
        end."""
        model = self._model()
        if model is not None:
            model.adapters.loaded = [lora for lora in model.adapters.loaded if lora is not self]
            model.forget_adapter(self._adapter)
        self._adapter = None

    def __repr__(self) -> str:
        return f"LoRA({self.name!r})"


def _report_skipped(file: Path, skipped: list[str], matched: int) -> None:
    if not matched:
        raise ConfigError(
            f"{file}: no tensor belongs to a linear layer of the model; it has, for example, "
            f"{', '.join(skipped[:3]) or 'nothing'}. Was the adapter made for another model?"
        )
    if not skipped:
        return
    text = f"{file}: {len(skipped)} tensors have no place in the model: {', '.join(skipped[:4])}"
    if settings().strict:
        raise ConfigError(text)
    logger.warning("%s; they are skipped", text)


class _Fitter:
    """Finds the layer of each pair, and checks and scales the pair for it."""

    def __init__(self, model: Model, config: PeftConfig, file: Path) -> None:
        self.layers = {layer.key: layer for layer in model if isinstance(layer, Linear)}
        self.config, self.file = config, file

    def fit(
        self, pairs: Mapping[str, tuple[Tensor, Tensor]], lora_scaling: float
    ) -> tuple[dict[str, LowRank], list[str]]:
        """Float32 pairs by the key of their layer, and modules that match none."""
        found: dict[str, LowRank] = {}
        unmatched = []
        for module, (a, b) in pairs.items():
            layer = self._layer(module)
            if layer is None:
                unmatched.append(module)
                continue
            if layer.key in found:
                raise ConfigError(f"{self.file}: two modules match the layer {layer.key}")
            self._check(module, layer, a, b)
            scale = lora_scaling * self.config.scale_of(module)
            found[layer.key] = LowRank(
                F.pad(a.float(), (0, layer.in_features - a.shape[1])).contiguous(),
                F.pad(b.float().t() * scale, (0, layer.out_features - b.shape[0])).contiguous(),
            )
        return found, unmatched

    def placed(self, layers: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """The pairs with their layers and as the activations are there: float32 on the CPU, float16
        on CUDA."""
        found = {}
        for key, pair in layers.items():
            device = self.layers[key].device
            dtype = torch.float16 if device.type == "cuda" else torch.float32
            found[key] = LowRank(pair.a.to(device, dtype), pair.b.to(device, dtype))
        return found

    def _layer(self, module: str) -> Linear | None:
        """The layer whose name is the longest end of the module's."""
        parts = module.split(".")
        for start in range(len(parts)):
            layer = self.layers.get(".".join(parts[start:]))
            if layer is not None:
                return layer
        return None

    def _check(self, module: str, layer: Linear, a: Tensor, b: Tensor) -> None:
        rank = self.config.rank_of(module)
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ShapeError(
                f"{self.file}: {module} has rank {a.shape[0]} in lora_A and {b.shape[1]} in "
                f"lora_B, {self.config.path.name} says {rank}"
            )
        for half, size, expected in (
            ("lora_A", a.shape[1], layer.in_features),
            ("lora_B", b.shape[0], layer.out_features),
        ):
            # A layer may be a little wider than trained: its sizes were rounded up to 128.
            if size > expected or padded(size) != padded(expected):
                raise ShapeError(
                    f"{self.file}: {module}.{half} has size {size}, the layer {layer.key} has "
                    f"{expected}; the adapter was made for another model"
                )


def _digest(layers: Mapping[str, LowRank]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for key, pair in sorted(layers.items()):
        digest.update(f"{key}\0{tuple(pair.a.shape)}{tuple(pair.b.shape)}".encode())
        for tensor in (pair.a, pair.b):
            digest.update(tensor.numpy().data)
    return digest.digest()
