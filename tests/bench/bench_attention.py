"""Attention and the row-wise ops at SmolLM2's sizes: `python -m tests.bench.bench_attention`.

Ops run as in a decode step: recorded, replayed without Python between. The baseline, in the same
run, is torch in float32 on dense buffers. `us` is the median, `best_us` the least: where others use
the machine, compare the latter. One JSON line per row.
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

from exl3.ops.activation import gated_activation
from exl3.ops.attention import paged_attention
from exl3.ops.graph import record
from exl3.ops.norm import rms_norm
from exl3.ops.registry import ops
from exl3.ops.rope import rope_append_, rope_table
from exl3.ops.sampling import argmax

REPEATS = 30
CALLS = 10  # launches in one replay of a short op; long ones go one by one
SHORT_US = 100


def timed(function: Callable[[], Any], calls: int = 1) -> tuple[float, float]:
    """Median and least microseconds of a call, after warming up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times), min(times)


def row(
    op: str, shape: str, ours: Callable[[], Any], theirs: Callable[[], Any], flop: int = 0
) -> None:
    """Time both in the same run and print the row; `flop` gives a rate."""
    single = record(ours)
    median, least = timed(single.replay)
    if least < SHORT_US:
        several = record(lambda: [ours() for _ in range(CALLS)])
        median, least = timed(several.replay, CALLS)
    baseline, torch_least = timed(theirs)
    fields = {"op": op, "shape": shape, "us": round(median, 2), "best_us": round(least, 2)}
    fields |= {"torch_us": round(baseline, 1), "torch_best_us": round(torch_least, 1)}
    fields["best_ratio"] = round(torch_least / least, 2)
    if flop:
        fields["best_gflops"] = round(flop / least / 1e3, 1)
    print(json.dumps(fields), flush=True)


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

    def ours() -> torch.Tensor:
        return paged_attention(*args, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, scale=scale)

    dense = [c[table.long()].flatten(1, 2)[:, :context].float().transpose(1, 2) for c in (k, v)]
    dense = [d.repeat_interleave(q_heads // kv_heads, 1).contiguous() for d in dense]
    query = q[:, : q_heads * dim].view(batch, queries, q_heads, dim).transpose(1, 2).contiguous()
    hidden = torch.arange(context) <= torch.arange(queries)[:, None] + context - queries
    causal = queries == context

    def reference() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, *dense, attn_mask=None if causal else hidden, is_causal=causal, scale=scale
        )

    want = reference().transpose(1, 2).flatten(0, 1).flatten(1)
    torch.testing.assert_close(ours(), want, rtol=1e-4, atol=1e-5)
    seen = queries * (context - queries) + queries * (queries + 1) // 2
    flop = 4 * batch * q_heads * dim * seen
    shape = f"batch {batch} context {context} queries {queries} heads {q_heads}/{kv_heads}x{dim}"
    row("paged_attention", shape, ours, reference, flop)


def rope_case(m: int, heads: list[int]) -> None:
    q_heads, kv_heads, dim = heads
    qkv = torch.randn(m, (q_heads + 2 * kv_heads) * dim)
    cache = [torch.zeros(m // 256 + 1, 256, kv_heads, dim).half() for _ in range(2)]
    slots = torch.arange(m)
    table = rope_table(slots.to(torch.int32), 1e4 ** -(torch.arange(0, dim, 2) / dim))
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim}
    cos, sin = (torch.cat([t, t], 1)[:, None] for t in table.chunk(2, 1))
    q_k = qkv.clone().view(m, -1, dim)[:, : q_heads + kv_heads]

    def plain() -> torch.Tensor:
        a, b = q_k.chunk(2, -1)
        return q_k * cos + torch.cat([-b, a], -1) * sin

    row(
        "rope_append_",
        f"{m}x{qkv.shape[1]}",
        lambda: rope_append_(qkv, table, *cache, slots, **sizes),
        plain,
    )


def norm_case(m: int, dim: int) -> None:
    x, weight = torch.randn(m, dim), torch.ones(dim)
    row(
        "rms_norm",
        f"{m}x{dim}",
        lambda: rms_norm(x, weight, 1e-5),
        lambda: functional.rms_norm(x, (dim,), weight, 1e-5),
    )


def activation_case(m: int, dim: int) -> None:
    x = torch.randn(m, 2 * dim)
    row(
        "gated_activation silu",
        f"{m}x{dim}",
        lambda: gated_activation(x, "silu"),
        lambda: functional.silu(x[:, :dim]) * x[:, dim:],
    )


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
    for m in (1, 512):
        norm_case(m, 576)
        rope_case(m, options.heads)
        activation_case(m, 1536)
    logits = torch.randn(1, 49152)
    row("argmax", "1x49152", lambda: argmax(logits, 49152), lambda: logits.argmax(1))


if __name__ == "__main__":
    main()
