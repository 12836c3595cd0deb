"""A decoder block in plain torch that gradients flow through; the ops of `exl3.ops` have none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UnsupportedError
from ..modules import Attention, Batch, Block, GatedMLP, Linear, RMSNorm
from ..modules.attention import window_mask
from ..ops.registry import ops
from ..ops.rope import rotate_reference
from ..settings import ISA_LEVELS

Observer = Callable[[str, Tensor], None]
"""Receives a layer's key and the gradient at its output, float32 (m, n)."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_PARTS = (Block, Attention, GatedMLP, RMSNorm, Linear)


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where matrix units multiply it, else float32."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = ops().cpu_isa(False) >= ISA_LEVELS.index("amx")
    return torch.bfloat16 if fast else torch.float32


def check_block(block: Block) -> None:
    """Raises UnsupportedError if `run_block` does not compute what this block does."""
    for part in block:
        if type(part) not in _PARTS:
            raise UnsupportedError(
                f"{part.key}: {type(part).__name__} has no differentiable form, expected one of "
                + ", ".join(p.__name__ for p in _PARTS)
            )
    if block.mlp.activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{block.mlp.key}: activation {block.mlp.activation!r} has no differentiable form,"
            f" expected one of {', '.join(_ACTIVATIONS)}"
        )


def run_block(block: Block, x: Tensor, batch: Batch, observe: Observer) -> Tensor:
    """`Block.forward` of whole sequences, with a gradient for x but for no weight.

    Args:
        block: loaded plain; products and attention run in the dtype of its weights.
        x: float32 (m, hidden).
        observe: called during the backward pass, once for each linear layer.
    Returns:
        float32 (m, hidden).
    """
    x = x + _attention(block.attention, rms_norm(x, block.attention_norm), batch, observe)
    mlp, h = block.mlp, rms_norm(x, block.mlp_norm)
    gate = _ACTIVATIONS[mlp.activation](_linear(mlp.gate_proj, h, observe))
    return x + _linear(mlp.down_proj, gate * _linear(mlp.up_proj, h, observe), observe)


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """`RMSNorm.forward` with a gradient for x."""
    return F.rms_norm(x, (norm.dim,), norm.weight, norm.eps)


def _attention(attention: Attention, h: Tensor, batch: Batch, observe: Observer) -> Tensor:
    table = batch.rope_table(attention.rope)
    shape = (batch.bsz, batch.q_len, -1, attention.head_dim)

    def heads(layer: Linear, norm: RMSNorm | None, *, turn: bool) -> Tensor:
        y = _linear(layer, h, observe).unflatten(-1, (-1, attention.head_dim))
        y = y if norm is None else rms_norm(y, norm)
        y = rotate_reference(y, table) if turn else y
        assert layer.plain is not None
        return y.reshape(shape).transpose(1, 2).to(layer.plain.dtype)

    q = heads(attention.q_proj, attention.q_norm, turn=True)
    k = heads(attention.k_proj, attention.k_norm, turn=True)
    v = heads(attention.v_proj, None, turn=False)
    mask = window_mask(batch.q_len, attention.window, batch.causal)
    with _repeatable(h.device):
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.to(h.device),
            is_causal=batch.causal and mask is None,
            scale=attention.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    context = context.transpose(1, 2).reshape(batch.rows, -1).float()
    return _linear(attention.o_proj, context, observe)


def _repeatable(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA the one backward pass of attention that adds in the same order every time; without
    a backward pass all do."""
    needed = device.type == "cuda" and torch.is_grad_enabled()
    return sdpa_kernel(SDPBackend.MATH) if needed else nullcontext()


def _linear(layer: Linear, x: Tensor, observe: Observer) -> Tensor:
    assert layer.plain is not None
    y = _Product.apply(x, layer.plain, layer.key, observe)
    return y if layer.bias is None else y + layer.bias


class _Product(torch.autograd.Function):
    """x W^T in the dtype of W (n, k), float32 outside; shows its output's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, key: str, observe: Observer) -> Tensor:
        """See the class."""
        ctx.save_for_backward(weight)
        ctx.key, ctx.observe = key, observe
        return F.linear(x.to(weight.dtype), weight).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of x alone."""
        (weight,) = ctx.saved_tensors
        ctx.observe(ctx.key, grads[0])
        return (grads[0].to(weight.dtype) @ weight).float(), None, None, None
