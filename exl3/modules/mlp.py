"""Gated MLP."""

from __future__ import annotations

from torch import Tensor

from .base import Module
from .batch import Batch
from .linear import Linear, run_group
from .norm import RMSNorm


class GatedMLP(Module):
    """x + down(act(gate(norm(x))) * up(norm(x)))."""

    def __init__(
        self, key: str, *, projections: tuple[Linear, Linear, Linear], activation: str
    ) -> None:
        super().__init__(key)
        self.gate_proj, self.up_proj, self.down_proj = projections
        self.activation = activation

    def children(self) -> list[Module]:
        """See `Module.children`."""
        return [self.gate_proj, self.up_proj, self.down_proj]

    def label(self) -> str:
        """See `Module.label`."""
        return f"GatedMLP {self.gate_proj.out_features}, {self.activation}"

    def forward(self, x: Tensor, batch: Batch, norm: RMSNorm | None = None) -> Tensor:
        """See `Module.forward`; returns x + mlp(norm(x))."""
        inner = run_group(
            x, (self.gate_proj, self.up_proj), batch, norm=norm, activation=self.activation
        )
        return run_group(inner, (self.down_proj,), batch, residual=x)
