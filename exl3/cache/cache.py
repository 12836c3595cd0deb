"""`Cache`: one layer of pages per attention layer of a model."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError, UnsupportedError
from .base import CacheLayer, Pages
from .dense import CacheLayer_fp16


@runtime_checkable
class HasCacheLayers(Protocol):
    """What a cache needs of a model."""

    config: Any

    def get_cache_layers(self) -> list[Any]: ...

    def attach_cache(self, cache: Any) -> None: ...


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    return int(value)


class Cache:
    """Keys and values of `max_num_tokens` tokens. Its tensors exist while the model is loaded.

    Args:
        max_num_tokens: capacity over all jobs, a multiple of 256.
        layer_type: class of the layers; None: `CacheLayer_fp16`.
        max_batch_size, max_history: for recurrent state; no effect on plain attention.
        layer_kwargs: arguments of the layer type; a wrong one is a `TypeError`.
    """

    def __init__(
        self,
        model: Any,
        max_num_tokens: int,
        layer_type: type[CacheLayer] | None = None,
        max_batch_size: int = 16,
        max_history: int = 0,
        **layer_kwargs: Any,
    ) -> None:
        if not isinstance(model, HasCacheLayers):
            raise ConfigError(
                f"model is {type(model).__name__}, expected a Model: Cache(model, max_num_tokens)"
            )
        max_num_tokens = _whole("max_num_tokens", max_num_tokens)
        max_batch_size = _whole("max_batch_size", max_batch_size)
        if max_num_tokens < PAGE_SIZE or max_num_tokens % PAGE_SIZE:
            raise ConfigError(
                f"max_num_tokens must be a multiple of {PAGE_SIZE}, got {max_num_tokens}"
            )
        self.config = model.config
        self.max_num_tokens = max_num_tokens
        self.layer_type = layer_type or CacheLayer_fp16
        if not (isinstance(self.layer_type, type) and issubclass(self.layer_type, CacheLayer)):
            raise ConfigError(
                f"layer_type is {layer_type!r}, expected a class such as CacheLayer_fp16"
            )
        self.max_batch_size, self.num_slots = max_batch_size, max_batch_size
        self.max_history = max_history
        self.free_list: list[int] = list(range(max_batch_size))
        self.recurrent_layers: dict[str, Any] = {}
        self.recurrent_state_cls: type | None = None
        self._model: weakref.ref[Any] | None = None
        self.layers: list[CacheLayer] = [
            self.layer_type(model.config, attention, id(self), max_num_tokens, **layer_kwargs)
            for attention in model.get_cache_layers()
        ]
        self.num_layers = len(self.layers)
        self.attach_to_model(model)

    @property
    def model(self) -> Any:
        """The model, or None after detaching."""
        return None if self._model is None else self._model()

    @property
    def num_pages(self) -> int:
        """Pages of 256 tokens."""
        return self.max_num_tokens // PAGE_SIZE

    def attach_to_model(self, model: Any = None) -> None:
        """Let the model allocate and free the layers with its own.

        Raises:
            ConfigError: attached already, or no model given.
        """
        if self.model is not None:
            raise ConfigError("the cache is attached to a model already")
        if model is None:
            raise ConfigError("attach_to_model needs the model")
        if len(model.get_cache_layers()) != self.num_layers:
            raise ConfigError("the cache was made for a model with another number of layers")
        self._model = weakref.ref(model)
        model.attach_cache(self)

    def detach_from_model(self, model: Any = None) -> None:
        """Free the tensors and forget the model; harmless where there is none."""
        attached = self.model
        if model is not None and attached is not None and model is not attached:
            raise ConfigError("the cache is attached to another model")
        self._model = None
        if attached is not None:
            attached.detach_cache(self)

    def alloc(self, devices: Sequence[torch.device]) -> None:
        """Make all tensors, each layer's on its device; called by the model."""
        for layer, device in zip(self.layers, devices, strict=True):
            layer.alloc(device)

    def free(self) -> None:
        """Drop all tensors; called by the model."""
        for layer in self.layers:
            layer.free()

    def kv(self, instance: int) -> tuple[Pages, Pages]:
        """Keys and values of one layer, for the attention ops."""
        return self.layers[instance].kv()

    def copy_page(self, target: Cache, from_page: int, to_page: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a page, in all layers, to a page of `target`.

        Raises:
            ConfigError: no such page, or more tokens than a page has.
        """
        if not (0 <= from_page < self.num_pages and 0 <= to_page < target.num_pages):
            raise ConfigError(
                f"copy_page: page {from_page} of {self.num_pages} to {to_page} of "
                f"{target.num_pages}"
            )
        if not 0 <= num_tokens <= PAGE_SIZE:
            raise ConfigError(f"copy_page: {num_tokens} tokens, a page has {PAGE_SIZE}")
        for source, layer in zip(self.layers, target.layers, strict=True):
            layer.copy_page(source, from_page, to_page, num_tokens)

    def get_all_tensors(self) -> list[Tensor]:
        """Tensors of all layers."""
        return [tensor for layer in self.layers for tensor in layer.get_tensors()]

    def page_tensors(self, page: int) -> list[Tensor]:
        """Views of everything stored for a page, see `CacheLayer.page_tensors`."""
        return [part for layer in self.layers for part in layer.page_tensors(page)]

    def page_format(self) -> str:
        """Names the encoding of `page_tensors`, see `CacheLayer.page_format`."""
        return " ".join(layer.page_format() for layer in self.layers)

    def storage_size(self) -> int:
        """Bytes of all layers once allocated."""
        return sum(layer.storage_size() for layer in self.layers)

    def get_layer(self, idx: int, seqlens: Tensor, block_table: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of layer `idx`, see `CacheLayer.get_kv`."""
        return self.layers[idx].get_kv(seqlens, block_table)

    def update_layer(
        self, idx: int, seqlens: Tensor, block_table: Tensor, kv: tuple[Tensor, Tensor], length: int
    ) -> None:
        """Take back keys and values, see `CacheLayer.update_kv`."""
        self.layers[idx].update_kv(seqlens, block_table, *kv, length)

    def update_layer_direct(
        self, idx: int, seqlens: Tensor, block_table: Tensor, kv: tuple[Tensor, Tensor], length: int
    ) -> None:
        """Append keys and values, see `CacheLayer.update_kv_direct`."""
        self.layers[idx].update_kv_direct(seqlens, block_table, *kv, length)

    def get_recurrent_layer(self, key: str) -> Any:
        """State of a recurrent layer."""
        if key not in self.recurrent_layers:
            raise ConfigError(f"the model has no recurrent layer {key!r}")
        return self.recurrent_layers[key]

    def get_all_recurrent_layers(self) -> list[Any]:
        """States of all recurrent layers."""
        return list(self.recurrent_layers.values())

    def get_new_state(self) -> Any:
        """A slot for recurrent state; these models have none."""
        raise UnsupportedError("the model has no recurrent state")

    def get_test_state(self, position: int) -> Any:
        """See `get_new_state`."""
        raise UnsupportedError("the model has no recurrent state")

    def new_from_stashed(self, stash: Any, position: int) -> Any:
        """See `get_new_state`."""
        raise UnsupportedError("the model has no recurrent state")

    def release_state(self, state: Any) -> None:
        """See `get_new_state`."""
        raise UnsupportedError("the model has no recurrent state")
