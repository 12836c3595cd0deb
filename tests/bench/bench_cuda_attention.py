"""Paged attention on CUDA at the shape of Llama-3.1-8B, per layer, in a captured graph.

python -m tests.bench cuda_attention
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from exl3.ops.attention import AttentionLayer, Sequences, decode_attention, paged_attention
from exl3.ops.rope import rope_append_
from tests.bench.bench_cuda_linear import graph_us

PAGE, Q_HEADS, KV_HEADS, DIM = 256, 32, 8, 128
COPIES = 16  # caches in turn, so that the second-level cache does not hold them


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call; the calls run in turn within one captured graph."""
    return graph_us(calls)[0] / len(calls)


def problem(bsz: int, queries: int, length: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    pages = bsz * -(-length // PAGE)
    width = (Q_HEADS + 2 * KV_HEADS) * DIM
    qkv = torch.randn(bsz * queries, width, device="cuda", dtype=torch.float16)
    copies = COPIES if bsz * length < 100_000 else 2
    shape = (pages, PAGE, KV_HEADS, DIM)
    caches = [
        (torch.randn(shape, device="cuda").half(), torch.randn(shape, device="cuda").half())
        for _ in range(copies)
    ]
    return qkv, caches


def row(bsz: int, queries: int, length: int) -> None:
    qkv, caches = problem(bsz, queries, length)
    per_row = -(-length // PAGE)
    options = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    table = torch.randperm(bsz * per_row, device="cuda").to(torch.int32).view(bsz, per_row)
    lens = torch.full((bsz,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(bsz + 1, dtype=torch.int32, device="cuda") * queries
    slots = table.long()[:, -1:].expand(bsz, queries).reshape(-1) * PAGE
    rope = torch.randn(bsz * queries, DIM, device="cuda")

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return paged_attention(qkv, k, v, table, lens, starts, scale=DIM**-0.5, **options)

    time = microseconds([lambda k=k, v=v: attend(k, v) for k, v in caches])
    append = microseconds(
        [lambda k=k, v=v: rope_append_(qkv, rope, k, v, slots, **options) for k, v in caches]
    )
    at, layer = Sequences(table, lens, starts, slots), AttentionLayer(**options, scale=DIM**-0.5)
    whole = microseconds(
        [
            lambda k=k, v=v: decode_attention(qkv, rope, k, v, at, layer, ahead=True)
            for k, v in caches
        ]
    )
    moved = 2 * 2 * bsz * length * KV_HEADS * DIM
    operations = 4 * bsz * Q_HEADS * DIM * queries * (length - (queries - 1) / 2)
    out = {
        "bench": "cuda_attention",
        "batch": bsz,
        "queries": queries,
        "context": length,
        "microseconds": round(time, 2),
        "rope_append_microseconds": round(append, 2),
        "decode_attention_microseconds": round(whole, 2),
        "gb_per_s": round(moved / time / 1e3),
        "tflops": round(operations / time / 1e6, 1),
    }
    print(json.dumps(out), flush=True)


def main() -> None:
    """Decode at several batch sizes and contexts, then prefill."""
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    for bsz, length in [
        (1, 128),
        (1, 1000),
        (1, 8192),
        (4, 1000),
        (16, 1000),
        (64, 1000),
        (64, 200),
    ]:
        row(bsz, 1, length)
    for length in (2048, 4096):
        row(1, length, length)


if __name__ == "__main__":
    main()
