"""One layer of a decoder: attention, then MLP, each with a norm before and a residual around."""

from __future__ import annotations

import copy

from torch import Tensor

from .attention import Attention
from .base import Module
from .batch import Batch
from .mlp import GatedMLP
from .norm import RMSNorm


class Block(Module):
    """`layer` is its number in the checkpoint."""

    def __init__(
        self,
        key: str,
        *,
        layer: int,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
    ) -> None:
        super().__init__(key)
        self.layer = layer
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def repeat(self, instance: int) -> Block:
        """The same weights with another layer of the cache, for a layer map."""
        twin = copy.copy(self)
        twin.attention = self.attention.repeat(instance)
        return twin

    def children(self) -> list[Module]:
        """See `Module.children`."""
        return [self.attention_norm, self.attention, self.mlp_norm, self.mlp]

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """See `Module.forward`; x is not modified."""
        x = self.attention.forward(x, batch, self.attention_norm)
        return self.mlp.forward(x, batch, self.mlp_norm)

    def store(self, x: Tensor, batch: Batch) -> None:
        """Only append this layer's keys and values to the cache."""
        self.attention.store(x, batch, self.attention_norm)
