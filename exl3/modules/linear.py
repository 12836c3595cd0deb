"""Linear layers, plain or EXL3, and groups of them that share an input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..constants import HADAMARD_DIM
from ..errors import FormatError
from .base import LoadOptions, Module, read_float
from .batch import Batch
from .low_rank import add_low_rank_
from .norm import RMSNorm
from .quantized import (
    QuantizedReader,
    StoredTensors,
    linear_weight,
    on_device,
    reconstruct_weight,
)

if TYPE_CHECKING:
    from ..loader.base import TensorSource
    from ..ops.linear import LinearWeight
    from ..quant.types import QuantizedTensors

logger = logging.getLogger(__name__)


def padded(size: int) -> int:
    """The next multiple of the Hadamard block."""
    return -(-size // HADAMARD_DIM) * HADAMARD_DIM


class Linear(Module):
    """y = x W + bias, W (k, n). `capture`, when set, is called with every input of the product.

    `share` names the group of layers that see the same input; `split` the dim that tensor
    parallel cuts; `alt_key` a tensor prefix to use when `key` has none (a tied head).
    """

    def __init__(
        self,
        key: str,
        *,
        in_features: int,
        out_features: int,
        share: str = "",
        split: str = "n",
        bias: bool = False,
        is_head: bool = False,
        alt_key: str | None = None,
    ) -> None:
        super().__init__(key)
        self.in_features, self.out_features = in_features, out_features
        self.share = share or key
        self.split = split
        self.has_bias = bias
        self.is_head = is_head
        self.alt_key = alt_key
        self.quantizable = True
        self.capture: Callable[[Tensor], None] | None = None
        self.plain: Tensor | None = None  # (n, k), unpadded, in the dtype of the product
        self.bias: Tensor | None = None  # float32 (n,), unpadded
        self.weight: LinearWeight | None = None
        self.device = torch.device("cpu")

    def load(self, stc: TensorSource, options: LoadOptions | None = None) -> None:
        """See `Module.load`: EXL3 tensors if the files have them, else a plain weight."""
        if self.loaded:
            return
        options = options or LoadOptions()
        self.device = options.device
        if stc.has(f"{self.key}.trellis"):
            reader = QuantizedReader(stc, self.key, self.in_features, self.out_features)
            self.set_quantized(reader.read(self._read_bias(stc, self.key)))
            return
        self._load_plain(stc, options)

    def _load_plain(self, stc: TensorSource, options: LoadOptions) -> None:
        key = self.key
        if self.alt_key is not None and not stc.has(f"{key}.weight"):
            key = self.alt_key
        if not stc.has(f"{key}.weight"):
            raise FormatError(f"neither {self.key}.trellis nor {key}.weight is in the files")
        weight = read_float(stc, f"{key}.weight", (self.out_features, self.in_features))
        keep = weight.dtype == torch.bfloat16
        narrow = torch.float16 if self.device.type == "cuda" else torch.float32
        dtype = options.plain_dtype or (torch.bfloat16 if keep else narrow)
        if weight.dtype == torch.float16 and dtype == torch.float32:
            _note_upcast()
        self.plain = weight.to(dtype).contiguous().to(self.device)
        bias = self._read_bias(stc, self.key)
        self.bias = None if bias is None else bias.to(self.device)

    def _read_bias(self, stc: TensorSource, key: str) -> Tensor | None:
        name = f"{key}.bias"
        if not self.has_bias:
            if stc.has(name):
                raise FormatError(f"tensor {name} is in the files, but the config has no bias here")
            return None
        size = self.out_features
        if stc.has(name) and tuple(stc.info(name).shape) == (padded(size),):
            size = padded(size)  # written with the padding of the trellis
        return read_float(stc, name, (size,)).to(torch.float32)[: self.out_features].contiguous()

    def set_quantized(self, tensors: QuantizedTensors | StoredTensors) -> None:
        """Use these EXL3 tensors from now on and drop the plain weight."""
        bias = tensors.bias if tensors.bias is not None else self.bias
        self.weight = linear_weight(
            on_device(tensors, self.device),
            None if bias is None else bias.to(self.device),
            self.in_features,
            self.out_features,
        )
        self.bias = self.weight.bias
        self.plain = None

    def unload(self) -> None:
        """See `Module.unload`."""
        self.plain = self.bias = self.weight = None

    @property
    def loaded(self) -> bool:
        """See `Module.loaded`."""
        return self.plain is not None or self.weight is not None

    @property
    def quantized(self) -> bool:
        """True if loaded as EXL3."""
        return self.weight is not None

    def weights_numel(self) -> int:
        """Weights of the layer as the model defines it, without padding."""
        return self.in_features * self.out_features

    def stored_bytes(self, stc: TensorSource) -> int:
        """See `Module.stored_bytes`; a tied head without its own tensor counts as its source."""
        names = [n for n in stc.list(f"{self.key}.") if "." not in n[len(self.key) + 1 :]]
        if not names and self.alt_key is not None:
            names = [f"{self.alt_key}.weight"]
        return sum(stc.info(name).n_bytes for name in names if stc.has(name))

    def label(self) -> str:
        """See `Module.label`."""
        return f"Linear {self.in_features} -> {self.out_features}"

    def weight_dense(self) -> Tensor:
        """float32 (k, n), unpadded; an EXL3 weight is decoded exactly."""
        if self.weight is not None:
            return reconstruct_weight(self.weight)
        assert self.plain is not None
        return self.plain.t().to(torch.float32)

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """See `Module.forward`."""
        if self.capture is not None:
            self.capture(x.float())
        if self.weight is not None and not (batch is not None and batch.reconstruct):
            from ..ops.linear import linear

            return linear(x, [self.weight])
        if self.weight is not None:
            return _add_bias(x.float() @ self.weight_dense(), self.bias).to(x.dtype)
        assert self.plain is not None
        if self.plain.dtype == torch.float32:
            return F.linear(x.float(), self.plain, self.bias).to(x.dtype)
        return _add_bias(F.linear(x.to(self.plain.dtype), self.plain).to(x.dtype), self.bias)


def _add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


_upcast_noted: list[bool] = []


def _note_upcast() -> None:
    if not _upcast_noted:
        _upcast_noted.append(True)
        logger.info("float16 weights are held and computed in float32: this CPU path has no half")


def can_fuse(layers: Sequence[Linear], batch: Batch) -> bool:
    """True if all layers are EXL3, none is observed and no check path is asked for."""
    return not batch.reconstruct and all(
        layer.weight is not None and layer.capture is None for layer in layers
    )


def run_group(
    x: Tensor,
    layers: Sequence[Linear],
    batch: Batch,
    *,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Layers that share the input norm(x), outputs side by side: (m, sum of n) like x.

    Args:
        activation: with two layers (gate, up): act(gate) * up instead, (m, n).
        residual: (m, n), added to the result; not modified.
    """
    if batch.adapters is not None and batch.adapters.touch([layer.key for layer in layers]):
        return _run_adapted(x, layers, batch, norm, activation, residual)
    if can_fuse(layers, batch):
        return _run_fused(x, layers, norm, activation, residual)
    h = x if norm is None else norm.forward(x)
    return _finish(_run_plain(h, layers, batch), activation, residual)


def _run_fused(
    x: Tensor,
    layers: Sequence[Linear],
    norm: RMSNorm | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    from ..ops.linear import Norm, linear

    fused: dict[str, Any] = {"activation": activation, "residual": residual}
    if norm is not None:
        assert norm.weight is not None
        fused["norm"] = Norm(norm.weight, norm.eps)
    return linear(x, [layer.weight for layer in layers if layer.weight is not None], **fused)


def _run_plain(h: Tensor, layers: Sequence[Linear], batch: Batch) -> Tensor:
    outputs = [layer.forward(h, batch) for layer in layers]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _run_adapted(
    x: Tensor,
    layers: Sequence[Linear],
    batch: Batch,
    norm: RMSNorm | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """`run_group` with what the batch's adapters add before activation and residual."""
    h = x if norm is None else norm.forward(x)
    if can_fuse(layers, batch):
        early, residual = (residual, None) if activation is None else (None, residual)
        y = _run_fused(x, layers, norm, None, early)
    else:
        y = _run_plain(h, layers, batch)
    starts, start = [], 0
    for layer in layers:
        starts.append((layer.key, start))
        start += layer.out_features
    assert batch.adapters is not None
    return _finish(add_low_rank_(y, h, starts, batch.adapters), activation, residual)


def _finish(y: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation is not None:
        from ..ops.activation import gated_activation

        y = gated_activation(y, activation)
    return y if residual is None else y.add_(residual)
