"""Cases of decode_attention, for every device: the sequences of `attention_cases`, whose new rows
are not in the cache yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import PAGE, case
from rope_cases import inv_freq
from torch import Tensor

from exl3.ops.attention import (
    AttentionLayer,
    Sequences,
    decode_attention,
    decode_attention_reference,
)
from exl3.ops.rope import rope_table_reference

# q heads, kv heads, head dim, v head dim
HEADS = [(9, 3, 64, 64), (32, 8, 128, 128), (28, 4, 128, 128), (4, 2, 256, 256), (4, 2, 192, 128)]
HEADS += [(71, 1, 64, 64), (32, 1, 128, 128), (4, 4, 80, 80), (6, 2, 96, 96), (3, 1, 72, 40)]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 66, 129, 257, 900, 961, 1023, 1025, 1026, 2300]


@dataclass(frozen=True)
class Step:
    """Arguments of one call."""

    qkv: Tensor
    table: Tensor | None
    caches: tuple[Tensor, Tensor]
    at: Sequences
    layer: AttentionLayer

    def to(self, device: torch.device, dtype: torch.dtype) -> Step:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone().to(device)

        names = ("page_table", "seq_lens", "query_starts", "slots")
        at = Sequences(*(move(getattr(self.at, name)) for name in names))
        norms = {name: move(getattr(self.layer, name)) for name in ("q_norm", "k_norm")}
        caches = (move(self.caches[0]), move(self.caches[1]))
        qkv = self.qkv.to(dtype).clone().to(device)
        return Step(qkv, move(self.table), caches, at, replace(self.layer, **norms))

    def run(self, **options: Any) -> Tensor:
        return decode_attention(self.qkv, self.table, *self.caches, self.at, self.layer, **options)

    def reference(self, **options: Any) -> Tensor:
        return decode_attention_reference(
            self.qkv, self.table, *self.caches, self.at, self.layer, **options
        )


def step(
    lengths: list[int],
    queries: int,
    heads: tuple[int, int, int, int],
    *,
    copies: list[int] | None = None,
    rot: int | None = None,
    norm: bool = False,
    **layer: Any,
) -> Step:
    """One step of `queries` new rows each. The slots of new rows are NaN in the cache, as all that
    no query sees; sequences of length 0 store nothing.

    Args:
        copies: text b is passed as copies[b] sequences, the last of which has its whole length and
            each `queries` more than the one before, as the generator passes drafted tokens.
    """
    q_heads, kv_heads, dim, _ = heads
    args, options = case([(n, queries) for n in lengths], heads)
    wide, k_cache, v_cache, pages = args[:4]
    each = [1] * len(lengths) if copies is None else copies
    own_lengths = [
        n - queries * left
        for n, c in zip(lengths, each, strict=True)
        for left in reversed(range(c))
    ]
    pages = pages.repeat_interleave(torch.tensor(each), dim=0)
    seq_lens = torch.tensor(own_lengths, dtype=torch.int32)
    starts = torch.arange(len(own_lengths) + 1, dtype=torch.int32) * queries
    m = len(own_lengths) * queries
    qkv = torch.randn(m, wide.shape[1] + 8)[:, : wide.shape[1]].half().float()
    slots = torch.full((m,), -1, dtype=torch.int64)
    for b, length in enumerate(own_lengths):
        for i in range(queries):
            position = length - queries + i
            if position >= 0:
                slot = int(pages[b, position // PAGE]) * PAGE + position % PAGE
                slots[b * queries + i] = slot
                for cache in (k_cache, v_cache):
                    cache.flatten(0, 1)[slot] = torch.nan
    rot = dim if rot is None else rot
    table = rope_table_reference(torch.arange(m, dtype=torch.int32) * 97, inv_freq(rot))
    weights = {n: torch.randn(dim) for n in ("q_norm", "k_norm")} if norm else {}
    own = AttentionLayer(q_heads, kv_heads, dim, options["scale"], **weights, **layer)
    at = Sequences(pages, seq_lens, starts, slots)
    return Step(qkv, table if rot else None, (k_cache, v_cache), at, own)
