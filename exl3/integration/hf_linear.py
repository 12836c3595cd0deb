"""`Exl3Linear`: one EXL3 layer as a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..loader.base import TensorInfo, TensorSource
from ..modules.quantized import QuantizedReader, linear_weight
from ..ops.linear import LinearWeight, linear
from ..ops.trellis import restore_trellis

# Tensors of a layer in an EXL3 file, below its name.
STORED = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")


_KEY = "layer"  # name of the layer where it is read alone


class Exl3Linear(nn.Module):
    """y = x W + bias for inference. Its buffers are the tensors of the file, in their dtypes, until
    the first call; from then on the trellis is held as the kernels read it.

    Args:
        in_features, out_features: unpadded.
        tensors: buffers by name, a subset of `STORED`; on the meta device when a model is built.
    """

    def __init__(self, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._weight: LinearWeight | None = None

    @staticmethod
    def from_infos(
        in_features: int, out_features: int, infos: Mapping[str, TensorInfo]
    ) -> Exl3Linear:
        """An empty layer for tensors with these shapes and dtypes."""
        tensors = {
            name: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for name, info in infos.items()
        }
        return Exl3Linear(in_features, out_features, tensors)

    def packed(self) -> LinearWeight:
        """The layer as the op takes it, made once for each device.

        Raises:
            FormatError: a tensor has the wrong shape or dtype.
        """
        if self._weight is None:
            reader = QuantizedReader(_Buffers(self), _KEY, self.in_features, self.out_features)
            stored = reader.read(None)
            bias = self._buffers.get("bias")
            self._weight = linear_weight(stored, bias, self.in_features, self.out_features)
            self._buffers["trellis"] = None  # its place is taken by the planes
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of x.

        Raises:
            UnsupportedError: a gradient through the layer is asked for.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("EXL3 layers have no gradient: run under torch.no_grad()")
        rows = x.reshape(-1, x.shape[-1])
        rows = rows.to(torch.float16 if x.device.type == "cuda" else torch.float32)
        y = linear(rows, [self.packed()])
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _unpack(self) -> None:
        """Back to the tensors of the file."""
        if self._weight is not None:
            self._buffers["trellis"] = restore_trellis(self._weight.planes)
            self._weight = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exl3Linear:
        """Moves the layer; casts do not reach it, because its dtypes are the format's."""
        self._unpack()
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                keep = moved.dtype == tensor.dtype
                self._buffers[name] = moved if keep else tensor.to(moved.device)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._unpack()
        super()._save_to_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """See `torch.nn.Module`."""
        return f"{self.in_features}, {self.out_features}"


class _Buffers(TensorSource):
    """The buffers of a layer, as files hold them."""

    def __init__(self, module: Exl3Linear) -> None:
        self._tensors = {
            f"{_KEY}.{name}": tensor
            for name, tensor in module._buffers.items()
            if tensor is not None
        }

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    def info(self, key: str) -> TensorInfo:
        tensor = self._tensors[key]
        return TensorInfo(key, tuple(tensor.shape), tensor.dtype, tensor.nbytes, "memory")

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        return self._tensors[key]

    def fingerprint(self) -> str:
        return ""
