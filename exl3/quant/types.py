"""What goes into and comes out of the quantiser of linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigError, ShapeError
from ..ops.codebook import Codebook
from .output_hessian import OutputHessian

OUT_SCALES = ("always", "never", "auto")


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The stored tensors of one quantised linear layer; k and n are the padded sizes."""

    trellis: Tensor
    """int16 (k/16, n/16, 16*bits)."""
    suh: Tensor
    """float16 (k,): input scales with sign; 0 on padding and on inputs without weight."""
    svh: Tensor
    """float16 (n,): output scales with sign; 0 on padding and on outputs without weight."""
    codebook: Codebook
    bias: Tensor | None = None
    """float16 (out_features,), unpadded, or None."""

    @property
    def bits(self) -> int:
        """Bits per weight K, read from the trellis shape."""
        return self.trellis.shape[-1] // 16

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(k, n), multiples of 128."""
        return self.trellis.shape[0] * 16, self.trellis.shape[1] * 16


@dataclass(frozen=True, slots=True)
class LinearJob:
    """One linear layer to quantise."""

    key: str
    weight: Tensor
    """float32 (in_features, out_features), unpadded; not modified."""
    bits: int
    bias: Tensor | None = None
    output: OutputHessian | None = None
    """How much the loss minds errors of each output; None: all alike, and one by one."""

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"{self.key}: bits must be a whole number from 1 to 8: {self.bits}")
        if self.weight.dim() != 2:
            raise ShapeError(
                f"{self.key}: expected a weight (in, out), got {tuple(self.weight.shape)}"
            )


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Choices that hold for a whole model."""

    codebook: Codebook = Codebook.MUL1
    out_scales: str = "always"
    seed: int = 0
    damping: float = 0.01
    """Share of the mean diagonal that is added to the Hessian's diagonal."""
    output_damping: float = 0.1
    """The same for Hessians of outputs, which fewer tokens know well."""
    refit: bool = True
    """Fit both scales again after encoding."""

    def __post_init__(self) -> None:
        if self.out_scales not in OUT_SCALES:
            raise ConfigError(
                f"out_scales: expected one of {', '.join(OUT_SCALES)}, got {self.out_scales!r}"
            )


@dataclass(frozen=True, slots=True)
class LinearReport:
    """How well one layer was encoded."""

    key: str
    bits: int
    in_features: int
    out_features: int
    proxy_error: float
    """tr(E^T H E) / tr(W^T H W); with H the identity where `feedback` is False."""
    weight_error: float
    """Squared Frobenius norm of E over that of W."""
    feedback: bool
    """False: plain rounding, because the Hessian could not be used."""
    out_scales: bool
    note: str = ""
    """Why plain rounding was used, or what else the reader should know."""
