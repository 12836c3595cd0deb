"""`Batch`: what one forward pass runs on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .low_rank import Adapters
from .rope import Rope

if TYPE_CHECKING:
    from ..cache import Cache


_TENSORS = (
    "positions",
    "input_ids",
    "logit_rows",
    "query_starts",
    "seq_lens",
    "page_table",
    "slots",
)


@dataclass(slots=True)
class Batch:
    """Rows of one pass: `bsz` sequences of `q_len` tokens each, one after another (m = bsz*q_len).

    Dense form (no cache): only `positions` is needed. Cached form, see `exl3.ops.attention`:
    `seq_lens` int32 (bsz,) counts this pass's tokens; `slots` int64 (m,) is where keys and values
    go; `page_table` int32 (bsz, pages).
    """

    bsz: int
    q_len: int
    positions: Tensor  # int32 (m,)
    input_ids: Tensor | None = None  # int64 (m,)
    causal: bool = True
    reconstruct: bool = False  # multiply by decoded weights: slow, for checking
    logit_rows: Tensor | None = None  # int64: rows that get logits; None: all
    cache: Cache | None = None
    query_starts: Tensor | None = None  # int32 (bsz+1,)
    seq_lens: Tensor | None = None
    page_table: Tensor | None = None
    slots: Tensor | None = None
    adapters: Adapters | None = None
    fresh: bool = False  # no sequence had tokens in the cache before this pass
    _tables: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def dense(
        bsz: int,
        q_len: int,
        *,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        causal: bool = True,
    ) -> Batch:
        """Whole sequences without a cache; positions count from 0 unless given as (bsz, q_len)."""
        if positions is None:
            positions = torch.arange(q_len, dtype=torch.int32).repeat(bsz)
        ids = None if input_ids is None else input_ids.reshape(-1)
        return Batch(
            bsz,
            q_len,
            positions.reshape(-1).to(torch.int32),
            input_ids=ids,
            causal=causal,
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device."""
        if self.positions.device == device:
            return self
        moved = copy.copy(self)
        for name in _TENSORS:
            tensor = getattr(self, name)
            setattr(moved, name, None if tensor is None else tensor.to(device))
        if self.adapters is not None:
            moved.adapters = self.adapters.to(device)
        moved._tables = {}
        return moved

    def select_adapters(self, rows: Tensor) -> None:
        """Apply the adapters to the rows int64 (n,) from now on, as rows 0 to n-1."""
        if self.adapters is not None:
            self.adapters = self.adapters.select(rows)

    @property
    def rows(self) -> int:
        """m, the number of tokens."""
        return self.bsz * self.q_len

    def rope_table(self, rope: Rope) -> Tensor:
        """float32 (m, rot) = [cos | sin] at this batch's positions, made once per `Rope`."""
        table = self._tables.get(id(rope))
        if table is None:
            from ..ops.rope import rope_table

            frequencies = rope.frequencies_on(self.positions.device)
            table = rope_table(self.positions, frequencies, rope.scale)
            self._tables[id(rope)] = table
        return table
