"""Quality of a model on a text: perplexity, and divergence from another model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ShapeError
from .util.measures import compute_kl_div, compute_target_log_probs

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure per predicted token, in text order, and their mean."""

    per_position: Tensor  # float32 (positions,)

    @property
    def mean(self) -> float:
        return float(self.per_position.double().mean())


@dataclass(frozen=True, slots=True)
class Perplexity(Measured):
    """Negative log-likelihood in nats per token."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


@dataclass(frozen=True, slots=True)
class Divergence(Measured):
    """KL divergence in nats per token, and how often both models prefer the same token."""

    same_top: float


def text_ids(tokenizer: Any, text: str, *, max_tokens: int | None = None) -> Tensor:
    """Ids (1, n) of a text, cut to `max_tokens`."""
    return tokenizer.encode(text)[:, :max_tokens]


def chunks(ids: Tensor, chunk: int = CHUNK) -> Iterator[Tensor]:
    """Pieces (1, up to `chunk`) of ids (1, n), each read by itself. A last one of a single token
    predicts nothing and is left out.

    Raises:
        ShapeError: ids are not (1, n) with n >= 2.
    """
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ShapeError(f"ids must be (1, n) with n >= 2, got {tuple(ids.shape)}")
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        if piece.shape[1] > 1:
            yield piece


def perplexity(model: Any, ids: Tensor, *, chunk: int = CHUNK) -> Perplexity:
    """How well a loaded model predicts ids (1, n), read in pieces of `chunk` tokens."""
    out = []
    with torch.inference_mode():
        for piece in chunks(ids, chunk):
            logits = model.forward(piece)[0, :-1].cpu()
            out.append(-compute_target_log_probs(logits, piece[0, 1:], model.config.vocab_size))
    return Perplexity(torch.cat(out))


def kl_divergence(model: Any, reference: Any, ids: Tensor, *, chunk: int = CHUNK) -> Divergence:
    """KL(reference, model) of two loaded models on ids (1, n), read in pieces of `chunk` tokens.

    Args:
        reference: the unquantised model; a model, or the list of its logits (tokens, V_pad) for
            the same pieces, from `all_logits`.
    """
    out, same = [], []
    vocab = model.config.vocab_size
    with torch.inference_mode():
        for index, piece in enumerate(chunks(ids, chunk)):
            known = isinstance(reference, list)
            target = reference[index] if known else reference.forward(piece)[0]
            logits = model.forward(piece)[0].to(target.device)
            out.append(compute_kl_div(logits, target, vocab))
            same.append(logits[:, :vocab].argmax(-1) == target[:, :vocab].argmax(-1))
    return Divergence(torch.cat(out), float(torch.cat(same).float().mean()))


def all_logits(model: Any, ids: Tensor, *, chunk: int = CHUNK) -> list[Tensor]:
    """Logits float16 (tokens, V_pad) of every piece, to compare several models with one."""
    with torch.inference_mode():
        return [model.forward(piece)[0].half() for piece in chunks(ids, chunk)]
