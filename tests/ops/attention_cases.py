"""Cases of paged_attention, for every device."""

from __future__ import annotations

from typing import Any

import torch

from exl3.ops.attention import paged_attention

PAGE = 256

DIMS = [(2, 1, d, d) for d in (64, 80, 96, 128, 192, 256, 512)]
DIMS += [(9, 3, 64, 64), (4, 4, 64, 64), (8, 1, 128, 128), (71, 1, 16, 16), (2, 1, 192, 128)]
DIMS += [(3, 1, 20, 36), (2, 2, 72, 40)]


def case(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int, int], *, seed: int = 0
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Sequences of (context, queries) in scattered pages; all that must not be read is poisoned."""
    torch.manual_seed(seed)
    q_heads, kv_heads, dim, v_dim = heads
    used = [(length + PAGE - 1) // PAGE for length, _ in lengths]
    max_pages = max([*used, 0]) + 2
    order = torch.randperm(sum(used) + 1).to(torch.int32)
    table = torch.full((len(lengths), max_pages), 1 << 30, dtype=torch.int32)
    caches = [
        torch.full((sum(used) + 1, PAGE, kv_heads, d), torch.nan).half() for d in (dim, v_dim)
    ]
    at = 0
    for b, (length, _) in enumerate(lengths):
        table[b, : used[b]] = order[at : at + used[b]]
        at += used[b]
        for t in range(0, length, PAGE):
            n = min(PAGE, length - t)
            for cache in caches:
                cache[table[b, t // PAGE], :n] = torch.randn(n, *cache.shape[2:]).half()
    starts = torch.tensor([0, *[q for _, q in lengths]]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([n for n, _ in lengths], dtype=torch.int32)
    width = q_heads * dim + kv_heads * (dim + v_dim)
    wide = torch.full((int(starts[-1]), width), torch.nan)
    wide[:, : q_heads * dim] = torch.randn(int(starts[-1]), q_heads * dim)
    options = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "scale": dim**-0.5}
    return [wide, *caches, table, seq_lens, starts], options


def in_pieces(args: list[Any], options: dict[str, Any], sizes: tuple[int, ...]) -> torch.Tensor:
    """The queries of one sequence, a few at a time, each piece seeing no later key."""
    out, at, last = [], 0, int(args[4][0])
    queries = int(args[5][1])
    while at < queries:
        n = min(sizes[len(out) % len(sizes)], queries - at)
        length = torch.tensor([last - queries + at + n], dtype=torch.int32)
        starts = torch.tensor([0, n], dtype=torch.int32)
        out.append(paged_attention(args[0][at : at + n], *args[1:4], length, starts, **options))
        at += n
    return torch.cat(out)
