"""Gated activations of feed-forward layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ConfigError
from .registry import fake, ops

# Position: the kernels' number of the function. `gelu` is the exact one (erf).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def activation_index(kind: str) -> int:
    """The kernels' number of activation `kind`.

    Raises:
        ConfigError: not one of `ACTIVATIONS`.
    """
    if kind not in ACTIVATIONS:
        raise ConfigError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {kind!r}")
    return ACTIVATIONS.index(kind)


@fake("gated_activation")
def _(gate_up: Tensor, kind: int) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: float32, on CUDA also float16, (m, 2n): gate in the first n columns, up in the
            rest; rows may be strided.
        kind: one of `ACTIVATIONS`.
    Returns:
        Like gate_up, (m, n). The vector levels' exp has a relative error under 2e-7, their erf an
        absolute one under 3e-7.
    Raises:
        ConfigError: unknown kind.
        RuntimeError: wrong dtype, shape or layout.
    """
    return ops().gated_activation(gate_up, activation_index(kind))


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """The activation alone, in the dtype of x."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    activation_index(kind)
    return torch.relu(x)


def gated_activation_reference(gate_up: Tensor, kind: str) -> Tensor:
    """`gated_activation` in float64, rounded once."""
    gate, up = gate_up.to(torch.float64).chunk(2, dim=-1)
    return (activation_reference(gate, kind) * up).to(gate_up.dtype)
