"""Reading the EXL3 tensors of one linear layer, and their form for the `linear` op."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..constants import HADAMARD_DIM, TILE_DIM
from ..errors import FormatError
from ..ops.codebook import Codebook
from .base import read_tensor

if TYPE_CHECKING:
    from ..loader.base import TensorSource
    from ..ops.linear import LinearWeight
    from ..quant.types import QuantizedTensors

_MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


class StoredTensors(NamedTuple):
    """What `QuantizedTensors` holds, as read; loading does not need the quantiser's package."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    bias: Tensor | None


class QuantizedReader:
    """Tensors `<key>.trellis` and its companions, checked against the sizes of the layer."""

    def __init__(self, stc: TensorSource, key: str, in_features: int, out_features: int) -> None:
        self.stc, self.key = stc, key
        self.k = -(-in_features // HADAMARD_DIM) * HADAMARD_DIM
        self.n = -(-out_features // HADAMARD_DIM) * HADAMARD_DIM

    def read(self, bias: Tensor | None) -> StoredTensors:
        """All tensors of the layer.

        Raises:
            FormatError: a tensor is missing, or has the wrong shape, dtype or marker.
        """
        return StoredTensors(
            trellis=self._trellis(),
            suh=self._scale("suh", "su", self.k),
            svh=self._scale("svh", "sv", self.n),
            codebook=self._codebook(),
            bias=bias,
        )

    def _trellis(self) -> Tensor:
        name = f"{self.key}.trellis"
        info = self.stc.info(name)
        shape, tiles = tuple(info.shape), (self.k // TILE_DIM, self.n // TILE_DIM)
        words = shape[2] if len(shape) == 3 else 0
        if shape[:2] != tiles or words % TILE_DIM or not 1 <= words // TILE_DIM <= 8:
            raise FormatError(
                f"tensor {name} has shape {shape}, expected {tiles} and 16 words for each of 1 to "
                f"8 bits ({self.k} x {self.n} weights)"
            )
        if info.dtype != torch.int16:
            raise FormatError(f"tensor {name} is {info.dtype}, expected int16")
        return self.stc.get(name)

    def _scale(self, name: str, old_name: str, size: int) -> Tensor:
        """float16 (size,): scales with sign, or the packed signs of old files."""
        key, old_key = f"{self.key}.{name}", f"{self.key}.{old_name}"
        if not self.stc.has(key) and self.stc.has(old_key):
            words = read_tensor(self.stc, old_key, (size // 16,))
            if words.dtype != torch.int16:
                raise FormatError(f"tensor {old_key} is {words.dtype}, expected int16")
            bits = (words.to(torch.int32)[:, None] >> torch.arange(16, dtype=torch.int32)) & 1
            return (1 - 2 * bits).reshape(-1).to(torch.float16)
        scale = read_tensor(self.stc, key, (size,))
        if scale.dtype != torch.float16:
            raise FormatError(f"tensor {key} is {scale.dtype}, expected float16")
        return scale

    def _codebook(self) -> Codebook:
        """Codebook from the marker tensor."""
        found = [name for name in _MULTIPLIERS if self.stc.has(f"{self.key}.{name}")]
        if len(found) > 1:
            raise FormatError(f"{self.key} has the markers of both mcg and mul1")
        if not found:
            return Codebook.INST3
        key = f"{self.key}.{found[0]}"
        marker = self.stc.get(key)
        if marker.numel() != 1 or int(marker.reshape(())) & 0xFFFFFFFF != _MULTIPLIERS[found[0]]:
            raise FormatError(
                f"tensor {key} holds {marker.tolist()}, expected the bits of "
                f"{_MULTIPLIERS[found[0]]:#x}; other multipliers are not known"
            )
        return Codebook.from_label(found[0])


def on_device(
    tensors: QuantizedTensors | StoredTensors, device: torch.device
) -> QuantizedTensors | StoredTensors:
    """The tensors of a layer on a device."""
    bias = tensors.bias
    return StoredTensors(
        tensors.trellis.to(device),
        tensors.suh.to(device),
        tensors.svh.to(device),
        tensors.codebook,
        None if bias is None else bias.to(device),
    )


def linear_weight(
    tensors: QuantizedTensors | StoredTensors,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
) -> LinearWeight:
    """The tensors in the layout that the `linear` op reads; `bias` float32 (out_features,)."""
    from ..ops.linear import LinearWeight
    from ..ops.trellis import prepare_trellis

    if bias is not None:
        bias = bias.to(torch.float32)[:out_features].contiguous()
    return LinearWeight(
        planes=prepare_trellis(tensors.trellis),
        suh=tensors.suh.contiguous(),
        svh=tensors.svh.contiguous(),
        bias=bias,
        codebook=tensors.codebook,
        in_features=in_features,
        out_features=out_features,
    )


def reconstruct_weight(weight: LinearWeight) -> Tensor:
    """float32 (in_features, out_features), decoded exactly."""
    from ..ops.trellis import reconstruct, restore_trellis

    trellis = restore_trellis(weight.planes)
    dense = reconstruct(trellis, weight.suh, weight.svh, weight.codebook)
    return dense[: weight.in_features, : weight.out_features]
