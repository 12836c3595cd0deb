"""Decode steps recorded once and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .model import Model


class DecodeGraphs:
    """Recorded steps of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def step(self, input_ids: Tensor, params: dict[str, Any]) -> Tensor | None:
        """Logits of a step that a recording serves, else None."""
        return None

    def drop(self, cache: Any) -> None:
        """Forget the steps recorded with this cache."""

    def clear(self) -> None:
        """Forget all."""
