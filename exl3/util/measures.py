"""How far two results are apart."""

from __future__ import annotations

import torch
from torch import Tensor


def _log_probs(logits: Tensor, vocab_size: int) -> Tensor:
    return torch.log_softmax(logits[..., :vocab_size].float(), dim=-1)


def compute_kl_div(input_logits: Tensor, target_logits: Tensor, vocab_size: int) -> Tensor:
    """KL(target, input) in nats, per row.

    Args:
        input_logits, target_logits: (..., V_pad); columns from `vocab_size` on are ignored.
    Returns:
        float32 (...).
    """
    target = _log_probs(target_logits, vocab_size)
    difference = target - _log_probs(input_logits, vocab_size)
    terms = torch.where(torch.isneginf(target), 0.0, target.exp() * difference)
    return terms.sum(-1)


def compute_target_log_probs(logits: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Log-probability of each target id (...), from logits (..., V_pad)."""
    return _log_probs(logits, vocab_size).gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)


def cosine_error(a: Tensor, b: Tensor) -> float:
    """1 - cosine of the angle between two tensors of one shape."""
    x, y = a.double().flatten(), b.double().flatten()
    return float(1.0 - x @ y / (x.norm() * y.norm()).clamp_min(1e-300))


def sqnr(a: Tensor, b: Tensor) -> float:
    """Power of `b` over power of `a - b`, in dB."""
    signal, noise = b.double().square().sum(), (a.double() - b.double()).square().sum()
    return float(10.0 * torch.log10(signal / noise))
