"""decode_attention against its reference on the CPU, where it is two launches."""

from __future__ import annotations

import pytest
import torch
from decode_cases import HEADS, step

from exl3.ops.graph import record
from exl3.ops.kv_quant import new_quant_pages

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("queries", [1, 3])
def test_matches_reference(heads: tuple[int, int, int, int], queries: int) -> None:
    copies = [1, 4, 1] if queries == 1 else None
    own = step([queries, 70, 300], queries, heads, copies=copies, norm=True, window=100)
    got, want = own.to(CPU, torch.float32), own.to(CPU, torch.float32)
    # K is rounded to float16 after sums in another order: one step of float16 here and there.
    torch.testing.assert_close(got.run(), want.reference(), rtol=3e-3, atol=3e-3)
    for mine, other in zip(got.caches, want.caches, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def test_recorded_step_reads_lengths_and_pages() -> None:
    own = step([200, 300], 1, (4, 2, 64, 64)).to(CPU, torch.float32)
    rows = own.qkv.clone()
    graph = record(own.run)
    first = graph.result.clone()
    own.qkv.copy_(rows)
    assert torch.equal(graph.replay(), first)


def test_quantised_cache_takes_the_same_call() -> None:
    own = step([5, 40], 1, (4, 2, 64, 64)).to(CPU, torch.float32)
    pages = own.caches[0].shape[0]
    caches = [new_quant_pages(pages, 2, 64, bits=8) for _ in range(2)]
    object.__setattr__(own, "caches", tuple(caches))
    out = own.run()
    assert out.shape == (2, 256) and bool(out.isfinite().all())


def test_opcheck() -> None:
    own = step([5, 40], 1, (4, 2, 64, 64), norm=True).to(CPU, torch.float32)
    for cache in own.caches:
        cache.nan_to_num_()
    at, layer = own.at, own.layer
    args = (own.qkv.contiguous(), own.table, *own.caches, at.slots, layer.q_norm, layer.k_norm)
    args += (at.page_table, at.seq_lens, at.query_starts, 4, 2, 64, 1e-6, 0.0, False)
    op = torch.ops.exl3.decode_attention.default
    torch.library.opcheck(op, (*args, 0.125, 0, 0.0, True, False))
