"""Where weights go while a model is loaded: on the CPU next to each other, in the order in which a
step reads them; on devices read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ..loader.base import TensorSource
from ..loader.staging import Staged
from ..modules.base import Module
from ..modules.linear import Linear

GROUP_BYTES = 64 << 20
"""Planes moved at a time: what loading needs on top of the model. A group is many huge pages."""


# The tensors of a module that are large, or used as they are.
_STAGED = (".trellis", ".suh", ".svh", ".weight")


def read_ahead(
    stc: TensorSource, modules: Sequence[Module], devices: Sequence[torch.device]
) -> AbstractContextManager[TensorSource]:
    """`stc` with the weights of `modules` read ahead onto the CUDA device of each; on the CPU,
    where reading is all there is to do, `stc` itself."""
    if devices[0].type != "cuda":
        return nullcontext(stc)
    keys: dict[str, torch.device] = {}
    for top, device in zip(modules, devices, strict=True):
        for module in top:
            if not module.children():
                names = (key for key in stc.list(module.key) if key.endswith(_STAGED))
                keys.update(dict.fromkeys(names, device))
    return Staged(stc, keys)


class WeightPacker:
    """Collects EXL3 layers as they are loaded and moves their planes into shared buffers.

    Buffers on huge pages save up to a quarter of a decode step's time (doc/kernels/linear.md).
    """

    def __init__(self) -> None:
        self._layers: list[Linear] = []
        self._bytes = 0

    def add(self, module: Module) -> None:
        """Note the EXL3 layers of a top-level module that was just loaded."""
        for layer in module:
            if isinstance(layer, Linear) and layer.weight is not None:
                planes = layer.weight.planes
                if planes.device.type == "cpu":
                    self._layers.append(layer)
                    self._bytes += planes.numel() * planes.element_size()
        if self._bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Move what has been noted."""
        from ..ops.linear import consolidate

        layers = [layer for layer in self._layers if layer.weight is not None]
        if layers:
            moved = consolidate([layer.weight for layer in layers if layer.weight is not None])
            for layer, weight in zip(layers, moved, strict=True):
                layer.weight = weight
        self._layers, self._bytes = [], 0
