"""Attention and the row-wise ops at SmolLM2's sizes, against torch. One JSON line per row.

python tests/bench/bench_attention.py [--heads 9 3 64] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from exl3.ops.attention import paged_attention
from exl3.ops.graph import record
from exl3.ops.norm import rms_norm
from exl3.ops.registry import ops
from exl3.ops.rope import rope_append_, rope_table
from exl3.ops.sampling import argmax

REPEATS = 30


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Median and least microseconds of a call, after warming up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), min(times)


def row(
    op: str, shape: str, ours: Callable[[], Any], theirs: Callable[[], Any], **more: Any
) -> None:
    """Time both in the same run and print the row; `flop` gives a rate."""
    median, least = timed(ours)
    baseline, _ = timed(theirs)
    fields = {"op": op, "shape": shape, "us": round(median, 1), "best_us": round(least, 1)}
    fields |= {"torch_us": round(baseline, 1), "speedup": round(baseline / median, 2)}
    if "flop" in more:
        fields["gflops"] = round(more["flop"] / median / 1e3, 1)
        fields["best_gflops"] = round(more["flop"] / least / 1e3, 1)
    print(json.dumps(fields))


def attention_case(context: int, queries: int, batch: int, heads: list[int]) -> None:
    q_heads, kv_heads, dim = heads
    pages = (context + 255) // 256
    q = torch.randn(batch * queries, (q_heads + 2 * kv_heads) * dim)
    k, v = (torch.randn(batch * pages, 256, kv_heads, dim).half() for _ in range(2))
    table = torch.randperm(batch * pages).to(torch.int32).view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * queries
    args = (q, k, v, table, lengths, starts)
    scale = dim**-0.5
    graph = record(
        lambda: paged_attention(
            *args, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, scale=scale
        )
    )
    dense = [c[table.long()].flatten(1, 2)[:, :context].float().transpose(1, 2) for c in (k, v)]
    dense = [d.repeat_interleave(q_heads // kv_heads, 1).contiguous() for d in dense]
    query = q[:, : q_heads * dim].view(batch, queries, q_heads, dim).transpose(1, 2).contiguous()
    hidden = torch.arange(context) <= torch.arange(queries)[:, None] + context - queries
    causal = queries == context

    def reference() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, *dense, attn_mask=None if causal else hidden, is_causal=causal, scale=scale
        )

    want = reference().transpose(1, 2).reshape(graph.result.shape)
    torch.testing.assert_close(graph.replay(), want, rtol=1e-4, atol=1e-5)
    seen = queries * (context - queries) + queries * (queries + 1) // 2
    flop = 4 * batch * q_heads * dim * seen
    shape = f"batch {batch} context {context} queries {queries} heads {q_heads}/{kv_heads}x{dim}"
    row("paged_attention", shape, graph.replay, reference, flop=flop)


def small_ops(heads: list[int]) -> None:
    q_heads, kv_heads, dim = heads
    for m in (1, 512):
        x, weight = torch.randn(m, q_heads * dim), torch.ones(q_heads * dim)
        graph = record(lambda x=x, weight=weight: rms_norm(x, weight, 1e-5))
        row(
            "rms_norm",
            f"{m}x{x.shape[1]}",
            graph.replay,
            lambda x=x, weight=weight: functional.rms_norm(x, (x.shape[1],), weight, 1e-5),
        )
        qkv = torch.randn(m, (q_heads + 2 * kv_heads) * dim)
        k, v = (torch.zeros(m // 256 + 1, 256, kv_heads, dim).half() for _ in range(2))
        slots = torch.arange(m)
        table = rope_table(slots.to(torch.int32), 1e4 ** -(torch.arange(0, dim, 2) / dim))
        sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim}
        append = record(
            lambda qkv=qkv, table=table, k=k, v=v, slots=slots, sizes=sizes: rope_append_(
                qkv, table, k, v, slots, **sizes
            )
        )
        cos = torch.cat([table[:, : dim // 2]] * 2, 1)[:, None]
        half = qkv.view(m, -1, dim)

        def plain(half: torch.Tensor = half, cos: torch.Tensor = cos) -> torch.Tensor:
            a, b = half.chunk(2, -1)
            return half * cos + torch.cat([-b, a], -1) * cos

        row("rope_append_", f"{m}x{qkv.shape[1]}", append.replay, plain)
    logits = torch.randn(1, 49152)
    graph = record(lambda: argmax(logits, 49152))
    row("argmax", "1x49152", graph.replay, lambda: logits.argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    ops()
    torch.set_num_threads(ops().cpu_threads())
    cases = [(100, 1, 1), (1000, 1, 1), (8000, 1, 1), (512, 512, 1)]
    if not options.quick:
        cases += [(500, 1, 8), (2048, 2048, 1), (2048, 512, 1), (1000, 4, 1)]
    for case in cases:
        attention_case(*case, options.heads)
    small_ops(options.heads)


if __name__ == "__main__":
    main()
