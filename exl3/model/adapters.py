"""Which adapters apply to which rows of a forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ConfigError
from ..modules.low_rank import Adapters, LowRank

if TYPE_CHECKING:
    from .lora import LoRA


@dataclass(frozen=True, eq=False)
class Adapter:
    """The weights of one adapter; kept by whatever still runs with it."""

    name: str
    layers: Mapping[str, LowRank]
    digest: bytes
    """Of its contents: equal adapters have equal digests, in any process."""


Chosen = tuple[Adapter, ...]


def adapter_key(chosen: Chosen) -> bytes:
    """What tells caches apart: empty without adapters, the same in any order of them."""
    if not chosen:
        return b""
    digests = b"".join(sorted(adapter.digest for adapter in chosen))
    return hashlib.blake2b(digests, digest_size=16).digest()


class AdapterSet:
    """The adapters loaded on one model."""

    def __init__(self) -> None:
        self.loaded: list[LoRA] = []

    def __bool__(self) -> bool:
        return bool(self.loaded)

    def choose(self, wanted: LoRA | Adapter | Sequence[LoRA | Adapter] | None) -> Chosen:
        """What a request runs with.

        Args:
            wanted: None: every adapter that is loaded now; else exactly these.
        Raises:
            ConfigError: not an adapter of this model, unloaded, or named twice.
        """
        if wanted is None:
            return tuple(lora.adapter for lora in self.loaded)
        items = list(wanted) if isinstance(wanted, Sequence) else [wanted]
        chosen = tuple(self._one(item) for item in items)
        if len(set(map(id, chosen))) != len(chosen):
            raise ConfigError("loras: an adapter is given twice")
        return chosen

    def has(self, adapters: Chosen) -> bool:
        """Whether all of these are loaded still."""
        loaded = {id(lora.adapter) for lora in self.loaded}
        return all(id(adapter) in loaded for adapter in adapters)

    def _one(self, item: Any) -> Adapter:
        if isinstance(item, Adapter):
            return item
        if not any(item is lora for lora in self.loaded):
            names = ", ".join(lora.name for lora in self.loaded) or "none"
            raise ConfigError(
                f"loras: {item!r} is not loaded on this model; expected LoRA objects, of which "
                f"there are: {names}"
            )
        return item.adapter

    def per_sequence(self, params: Mapping[str, Any], bsz: int) -> tuple[Chosen, ...] | None:
        """The adapters of each sequence of a pass; None if there are none at all.

        Args:
            params: `loras` is None, a list for all sequences, or one list per sequence.
        Raises:
            ConfigError: see `choose`; or another number of lists than sequences.
        """
        wanted = params.get("loras")
        if wanted is None:
            return (self.choose(None),) * bsz if self.loaded else None
        if isinstance(wanted, list | tuple) and not any(wanted):
            return None
        if not any(isinstance(item, list | tuple) for item in wanted):
            same = self.choose(wanted)
            return (same,) * bsz if same else None
        if len(wanted) != bsz:
            raise ConfigError(
                f"params['loras'] has {len(wanted)} lists, expected one per sequence: {bsz}"
            )
        each = tuple(self.choose(item) for item in wanted)
        return each if any(each) else None


def adapters_of(each: tuple[Chosen, ...]) -> Chosen:
    """Every adapter of some sequences once, in an order that does not depend on theirs."""
    found = dict.fromkeys(adapter for chosen in each for adapter in chosen)
    return tuple(sorted(found, key=lambda adapter: adapter.digest))


def fill_mask(mask: np.ndarray, each: tuple[Chosen, ...], adapters: Chosen) -> None:
    """Write which of `adapters` apply to which sequences: float32 (sequences, adapters)."""
    column = {adapter: index for index, adapter in enumerate(adapters)}
    mask[:] = 0
    for row, chosen in enumerate(each):
        for adapter in chosen:
            mask[row, column[adapter]] = 1


def batch_adapters(each: tuple[Chosen, ...] | None, q_len: int) -> Adapters | None:
    """The adapters of a batch, on the host, of sequences of `q_len` rows each."""
    if each is None:
        return None
    adapters = adapters_of(each)
    mask = torch.zeros(len(each), len(adapters))
    fill_mask(mask.numpy(), each, adapters)
    everywhere = tuple(bool(column.all()) for column in mask.T)
    rows = mask.repeat_interleave(q_len, dim=0)
    return Adapters(tuple(adapter.layers for adapter in adapters), rows, everywhere)
