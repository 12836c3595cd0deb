"""The fused trellis linear layer: norm, transforms, product, bias, activation and residual in one
launch, straight from packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError
from .codebook import Codebook
from .hadamard import hadamard_128_reference
from .registry import fake, ops
from .trellis import decode, restore_trellis

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One quantised weight on a device; k and n are in_features and out_features padded to 128."""

    planes: Tensor
    """int16 (n/16, k/16, 16*bits), from `prepare_trellis`."""
    suh: Tensor
    """float16 (k,)."""
    svh: Tensor
    """float16 (n,)."""
    bias: Tensor | None
    """float32 (out_features,)."""
    codebook: Codebook
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm in front of a linear layer: x / rms(x) * (weight + weight_offset)."""

    weight: Tensor
    """float32 (in_features,)."""
    eps: float
    weight_offset: float = 0.0


@fake("linear")
def _(
    x: Tensor,
    planes: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    bias: list[Tensor | None],
    codebooks: list[int],
    out_features: list[int],
    norm_weight: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features[0] if activation >= 0 else sum(out_features))


@fake("linear_add_")
def _(residual: Tensor, x: Tensor, *_rest: Any) -> None:
    return None


def _arguments(
    weights: Sequence[LinearWeight], norm: Norm | None, activation: str | None
) -> tuple[Any, ...]:
    """What both ops take after x."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(
            f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return (
        [w.planes for w in weights],
        [w.suh for w in weights],
        [w.svh for w in weights],
        [w.bias for w in weights],
        [int(w.codebook) for w in weights],
        [w.out_features for w in weights],
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.weight_offset,
        -1 if activation is None else ACTIVATIONS.index(activation),
    )


def linear(
    x: Tensor,
    weights: Sequence[LinearWeight],
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x @ W + bias for one to four weights that share x; see the format page, section 2.

    Activations are rounded after the input transform, per row and block of 128: to 8 bits for
    `mul1` up to 4 bits (adds under 1 % to the weights' own error), finer otherwise. A row's result
    does not depend on the other rows nor on their number, to the bit. CUDA rounds to 16 bits, or
    to float16, and there many rows are multiplied with decoded weights instead.

    Args:
        x: float32 (m, in_features); rows may be strided. On CUDA also float16 or bfloat16.
        weights: 1..4 weights with one in_features.
        norm: applied to x first.
        activation: None, or one of `ACTIVATIONS`: exactly two weights, gate and up.
        residual: float32 (m, columns of the result), added; rows may be strided. On CUDA of any
            float dtype.
    Returns:
        Like x, (m, sum of out_features), or act(gate) * up: (m, out_features).
    Raises:
        ConfigError: unknown activation.
        RuntimeError: wrong dtype, shape or layout.
    """
    return ops().linear(x, *_arguments(weights, norm, activation), residual)


def linear_add_(
    residual: Tensor,
    x: Tensor,
    weights: Sequence[LinearWeight],
    *,
    norm: Norm | None = None,
    activation: str | None = None,
) -> Tensor:
    """`residual += linear(x, weights, ...)` in place; returns `residual`, which may also be x."""
    ops().linear_add_(residual, x, *_arguments(weights, norm, activation))
    return residual


def consolidate(weights: Sequence[LinearWeight]) -> list[LinearWeight]:
    """The same weights with their planes in one buffer on huge pages, in the order given.

    A model's weights are read from end to end for every token: 4 KB pages cost up to a quarter of
    the speed in address translation. Call it once all weights of a model, or of a good part of one,
    are loaded; peak memory is twice the planes.
    """
    sizes = [-(-w.planes.numel() // 32) * 32 for w in weights]  # whole cache lines
    buffer = torch.empty(sum(sizes), dtype=torch.int16)
    ops().advise_huge_pages(buffer)
    moved = []
    for weight, part in zip(weights, buffer.split(sizes), strict=True):
        planes = part[: weight.planes.numel()].view(weight.planes.shape)
        moved.append(replace(weight, planes=planes.copy_(weight.planes)))
    return moved


def weight_reference(weight: LinearWeight) -> Tensor:
    """float64 (in_features, out_features): the dense weight, exactly decoded."""
    inner = decode(restore_trellis(weight.planes), weight.codebook).double()
    w = hadamard_128_reference(inner, post_scale=weight.svh)
    w = hadamard_128_reference(w.T.contiguous()).T * weight.suh.double()[:, None]
    return w[: weight.in_features, : weight.out_features]


def linear_reference(
    x: Tensor,
    weights: Sequence[LinearWeight],
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear` in float64, activations not rounded."""
    h = x.double()
    if norm is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm.eps)
        h = h * (norm.weight.double() + norm.weight_offset)
    parts = []
    for weight in weights:
        y = h @ weight_reference(weight)
        parts.append(y if weight.bias is None else y + weight.bias.double())
    gated = activation is not None
    y = _activate(parts[0], activation) * parts[1] if gated else torch.cat(parts, -1)
    return y if residual is None else y + residual.double()


def _activate(x: Tensor, kind: str | None) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
