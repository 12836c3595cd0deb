"""Cases of rope_append_, for every device."""

from __future__ import annotations

from typing import Any

import torch

from exl3.ops.rope import rope_table_reference

# q heads, kv heads, head dim, v head dim, rot
HEADS = [
    (9, 3, 64, 64, 64),
    (4, 4, 80, 80, 20),
    (2, 1, 96, 96, 96),
    (3, 1, 128, 128, 64),
    (2, 2, 192, 128, 48),
    (1, 1, 256, 256, 256),
    (2, 1, 512, 512, 0),
    (2, 1, 20, 24, 10),
]


def inv_freq(rot: int, theta: float = 1e4) -> torch.Tensor:
    return theta ** -(torch.arange(0, rot, 2, dtype=torch.float64) / rot).to(torch.float32)


def case(heads: tuple[int, ...], m: int, norm: bool) -> tuple[list[Any], dict[str, Any]]:
    q_heads, kv_heads, dim, v_dim, rot = heads
    torch.manual_seed(0)
    qkv = torch.randn(m, q_heads * dim + kv_heads * (dim + v_dim) + 8)
    table = rope_table_reference(torch.arange(m, dtype=torch.int32) * 97, inv_freq(rot))
    caches = [torch.full((3, 256, kv_heads, d), torch.nan).half() for d in (dim, v_dim)]
    slots = torch.randperm(3 * 256)[:m]
    slots[2:3] = -1
    options = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "eps": 1e-5,
        "q_norm": torch.randn(dim) if norm else None,
        "k_norm": torch.randn(dim) if norm else None,
    }
    width = q_heads * dim + kv_heads * (dim + v_dim)
    return [qkv[:, :width], table if rot else None, *caches, slots], options
