"""A loaded model as stretches of blocks that run on one device each.

At a border the hidden state moves to the next device. Everything else that a pass reads (positions,
lengths, page tables, slots, adapter rows) is made on the host and copied to each device once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modules import Batch, Block, Module
from .split import Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks that run one after another. The embedding belongs to the first segment, final norm and
    head to the last, which may have no blocks."""

    part: int  # of the plan
    device: torch.device
    blocks: tuple[Block, ...]


def segments_of(modules: Sequence[Module], plan: Plan) -> tuple[Segment, ...]:
    """The segments in running order: one for each part, more if a layer map goes back to one."""
    part_of = plan.part_of()
    found: list[tuple[int, list[Block]]] = []
    for module, part in zip(modules, part_of, strict=True):
        if not found or found[-1][0] != part:
            found.append((part, []))
        if isinstance(module, Block):
            found[-1][1].append(module)
    return tuple(Segment(part, plan.parts[part].device, tuple(blocks)) for part, blocks in found)


class Pass:
    """A forward pass over segments."""

    def __init__(self, batch: Batch) -> None:
        """Of a batch on the host."""
        self._host = batch
        self._batches: dict[int, Batch] = {}

    def on(self, segment: Segment) -> Batch:
        """The batch on a segment's device."""
        if segment.part not in self._batches:
            self._batches[segment.part] = self._host.to(segment.device)
        return self._batches[segment.part]

    def enter(self, x: Tensor, segment: Segment) -> tuple[Tensor, Batch]:
        """A hidden state that may lie elsewhere, and the batch, on a segment's device."""
        return x.to(segment.device), self.on(segment)

    def run(self, x: Tensor, segment: Segment) -> Tensor:
        """The blocks of a segment."""
        x, batch = self.enter(x, segment)
        for block in segment.blocks:
            x = block.forward(x, batch)
        return x
