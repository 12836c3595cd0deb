"""The quantised cache: speed beside a float16 cache, and quality of a model on it.

    python -m tests.bench.bench_kv_quant [--device cuda:0] [--heads 32 8 128]
    python -m tests.bench.bench_kv_quant --model DIRECTORY [--text FILE]

Speed: attention of one token per sequence on caches of each kind, all in the same run; `ratio` is
the float16 cache's time over this one's. Quality: the divergence of the next-token distribution
from that on a float16 cache, over 512 tokens in chunks of 128. One JSON line per row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exl3.ops.attention import paged_attention, paged_attention_reference
from exl3.ops.graph import capture, record
from exl3.ops.kv_quant import dequantise_reference, new_quant_pages
from exl3.ops.rope import rope_append_

PAIRS = [(8, 8), (6, 6), (5, 5), (4, 4), (4, 3), (3, 3), (2, 2)]
TOKENS, CHUNK = 512, 128


def best_us(replay: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Median and least microseconds of a replay."""
    times = []
    for _ in range(30):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        replay()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), min(times)


def check_first_row(
    got: torch.Tensor,
    q: torch.Tensor,
    cache: list[Any],
    where: tuple[torch.Tensor, ...],
    shape: Any,
) -> None:
    """The first sequence against the reference on the decoded cache."""
    plain = [c if isinstance(c, torch.Tensor) else dequantise_reference(c).half() for c in cache]
    table, lengths, starts = (t.cpu() for t in where)
    args = (q[:1].cpu(), *[p.cpu() for p in plain], table[:1], lengths[:1], starts[:2])
    want = paged_attention_reference(*args, **shape, scale=shape["head_dim"] ** -0.5)
    torch.testing.assert_close(got[:1].cpu(), want, rtol=4e-3, atol=4e-3)


def speed_rows(context: int, batch: int, heads: list[int], device: torch.device) -> None:
    q_heads, kv_heads, dim = heads
    pages = (context + 255) // 256
    m, slots = batch * pages * 256, torch.arange(batch * pages * 256, device=device)
    table = slots[::256].to(torch.int32).view(batch, pages) // 256
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim}
    data = torch.randn(m, (q_heads + 2 * kv_heads) * dim, device=device)
    q, calls = data[:batch].clone(), 10
    plain_us = 0.0
    for bits in [None, *PAIRS]:
        if bits is None:
            cache = [torch.zeros(batch * pages, 256, kv_heads, dim, device=device).half()] * 2
            cache = [c.clone() for c in cache]
        else:
            cache = [
                new_quant_pages(batch * pages, kv_heads, dim, bits=b, device=device) for b in bits
            ]
        rope_append_(data.clone(), None, *cache, slots, **shape)

        def step(cache: Any = cache) -> torch.Tensor:
            return paged_attention(q, *cache, table, lengths, starts, **shape, scale=dim**-0.5)

        if context <= 1000:
            check_first_row(step(), q, cache, (table, lengths, starts), shape)
        repeated = lambda step=step: [step() for _ in range(calls)]  # noqa: E731
        graph = capture(repeated, device) if device.type == "cuda" else record(repeated)
        graph.replay()
        median, least = (us / calls for us in best_us(graph.replay, device))
        plain_us = plain_us or least
        fields = {"op": "paged_attention", "batch": batch, "context": context, "heads": heads}
        fields |= {"bits": bits or 16, "us": round(median, 2), "best_us": round(least, 2)}
        print(json.dumps(fields | {"ratio": round(plain_us / least, 2)}), flush=True)


def quality_rows(directory: str, text: str, device: str) -> None:
    from exl3 import Cache, CacheLayer_quant, Config, Model, Tokenizer

    config = Config.from_directory(directory)
    model = Model.from_config(config)
    tokenizer = Tokenizer.from_config(config)
    ids = tokenizer.encode(text)[:, :TOKENS]
    model.load(device=device)

    def log_probs(cache: Cache) -> torch.Tensor:
        params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, TOKENS)}
        parts = [
            model.forward(ids[:, at : at + CHUNK], {**params, "past_len": at}).clone()
            for at in range(0, ids.shape[1], CHUNK)
        ]
        logits = torch.cat(parts, 1)[0, :, : tokenizer.actual_vocab_size]
        return logits.float().log_softmax(-1)

    plain = Cache(model, TOKENS)
    want = log_probs(plain)
    for k_bits, v_bits in PAIRS:
        cache = Cache(model, TOKENS, layer_type=CacheLayer_quant, k_bits=k_bits, v_bits=v_bits)
        got = log_probs(cache)
        kl = (want.exp() * (want - got)).sum(-1)
        same = (want.argmax(-1) == got.argmax(-1)).float().mean()
        fields = {"bits": (k_bits, v_bits), "kl": round(float(kl.mean()), 5)}
        fields |= {"kl_p99": round(float(kl.quantile(0.99)), 4), "same_top": round(float(same), 4)}
        size = cache.storage_size() / plain.storage_size()
        print(json.dumps(fields | {"size": round(size, 3)}), flush=True)
        cache.detach_from_model()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory: measure quality in place of speed")
    parser.add_argument("--text", default="README.md", help="file to measure on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64])
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model:
        quality_rows(options.model, Path(options.text).read_text(), options.device)
        return
    cases = [(1000, 1), (8000, 1), (2000, 8)]
    if options.device != "cpu":
        cases += [(32000, 1), (8000, 32)]
    for context, batch in cases:
        speed_rows(context, batch, options.heads, torch.device(options.device))


if __name__ == "__main__":
    main()
