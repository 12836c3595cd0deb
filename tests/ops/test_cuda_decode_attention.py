"""decode_attention on CUDA: one launch where it can, on the cases of every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import HEADS, LENGTHS, Step, step

from exl3.ops.registry import ops

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_torch_thread")]

CPU = torch.device("cpu")


def check(own: Step, device: torch.device, **options: Any) -> None:
    """Results and cache for both activation types, twice the same bits."""
    want = own.to(CPU, torch.float32)
    wanted = want.reference(**options)
    for dtype in (torch.float16, torch.float32):
        got = own.to(device, dtype)
        out = got.run(**options)
        assert out.dtype == dtype
        # q, weights and the result are rounded to float16: 2^-11 each of values of order 1 to 4.
        torch.testing.assert_close(out.cpu().float(), wanted, rtol=4e-3, atol=4e-3)
        for mine, other in zip(got.caches, want.caches, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=2e-3, atol=1e-4, equal_nan=True)
            assert torch.equal(mine.cpu().isnan(), other.isnan())
        assert torch.equal(out, own.to(device, dtype).run(**options))


def need_clusters(device: torch.device) -> None:
    if ops().cuda_capability(device.index) not in (90, 100, 103):
        pytest.skip("no clusters, or too little shared memory to share keys out in any number")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_head_dims(device: torch.device, heads: tuple[int, int, int, int], queries: int) -> None:
    check(step([queries, 70, 300], queries, heads), device)
    check(step([300, queries], queries, heads, norm=True, eps=1e-5), device)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(device: torch.device, length: int) -> None:
    for queries in (1, 4, 16):
        if queries <= length:
            check(step([length], queries, (8, 2, 128, 128)), device)


@pytest.mark.parametrize("rot", [0, 16, 64, 128])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations(device: torch.device, rot: int, interleaved: bool) -> None:
    own = step([70, 9], 2, (4, 2, 128, 128), rot=rot, norm=True, interleaved=interleaved)
    check(own, device)


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
def test_windows(device: torch.device, window: int) -> None:
    lengths = [3, window + 1, window + 2, window + 400, 1900]
    for queries in (1, 3):
        fitting = [n for n in lengths if n >= queries]
        own = step(fitting, queries, (4, 2, 64, 64), window=window)
        check(own, device)
        check(own, device, causal=False)


@pytest.mark.parametrize("heads", [(16, 2, 256, 256), (32, 2, 128, 128), (16, 1, 64, 64)])
def test_every_cluster_size(device: torch.device, heads: tuple[int, int, int, int]) -> None:
    """More sequences, smaller clusters; 8 rows of 256 dims have no room in the smallest."""
    for count in (1, 4, 9, 20, 40, 140):
        check(step([70 + 9 * b % 200 for b in range(count)], 1, heads), device)


def test_softcap_and_no_mask(device: torch.device) -> None:
    check(step([300, 5], 3, (4, 2, 64, 64), softcap=5.0), device)
    check(step([300, 5], 3, (4, 2, 64, 64)), device, causal=False)


def test_many_sequences_and_empty_ones(device: torch.device) -> None:
    check(step([37 * b % 500 for b in range(40)], 1, (8, 2, 128, 128)), device)
    check(step([0, 0], 1, (8, 2, 128, 128)), device)
    check(step([1, 2, 0, 5], 3, (8, 2, 128, 128)), device)  # some rows have no position


@pytest.mark.parametrize("heads", [(32, 8, 128, 128), (14, 2, 64, 64)])
@pytest.mark.parametrize("queries", [1, 3])
def test_batched_equals_single(
    device: torch.device, heads: tuple[int, int, int, int], queries: int
) -> None:
    """A sequence's bits do not depend on its neighbours, however keys are shared out."""
    need_clusters(device)
    lengths = [2000, 5, 64, 700, 1100, 3, 3000, 90] * 5
    own = step(lengths, queries, heads).to(device, torch.float16)
    together = own.run()
    for b in range(0, 8):
        rows = slice(b * queries, (b + 1) * queries)
        at = own.at
        alone = type(at)(
            at.page_table[b : b + 1].clone(),
            at.seq_lens[b : b + 1].clone(),
            torch.tensor([0, queries], dtype=torch.int32, device=device),
            at.slots[rows].clone(),
        )
        single = Step(own.qkv[rows].contiguous(), own.table[rows], own.caches, alone, own.layer)
        assert torch.equal(single.run(), together[rows])


# Lengths and number of sequences of texts that are passed as several: within and across pages and
# steps of 16 keys, from the start of a text, longer than a warp, next to others.
PACKED = [([8], [4]), ([258], [4]), ([300, 5, 257], [4, 4, 4]), ([300], [16]), ([4], [4])]
PACKED += [([1100, 90, 700], [40, 1, 3]), ([128, 129, 2000, 64], [3, 2, 8, 5])]


@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (32, 8, 128, 128), (4, 2, 192, 128)])
@pytest.mark.parametrize(("lengths", "copies"), PACKED)
def test_rows_of_one_text_as_sequences(
    device: torch.device,
    heads: tuple[int, int, int, int],
    lengths: list[int],
    copies: list[int],
) -> None:
    """They see each other's keys, which are not in the cache before."""
    check(step(lengths, 1, heads, copies=copies), device)
    check(step(lengths, 1, heads, copies=copies, norm=True, window=18), device)


def test_new_rows_of_one_text_as_sequences(device: torch.device) -> None:
    for queries in (2, 5, 16):
        own = step([300, queries * 2, 600], queries, (8, 2, 128, 128), copies=[3, 2, 1])
        check(own, device)


@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (32, 8, 128, 128)])
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_one_text_equal_steps(
    device: torch.device, heads: tuple[int, int, int, int], ahead: bool
) -> None:
    """Together in one launch or one after another: the same bits."""
    need_clusters(device)
    own = step([300, 1030, 4], 1, heads, copies=[4, 8, 4])
    there = own.to(device, torch.float16)
    together = there.run(ahead=ahead)
    apart = own.to(device, torch.float16)
    for row in range(together.shape[0]):
        at = type(own.at)(
            apart.at.page_table[row : row + 1],
            apart.at.seq_lens[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            apart.at.slots[row : row + 1],
        )
        rows = slice(row, row + 1)
        single = Step(apart.qkv[rows], apart.table[rows], apart.caches, at, apart.layer)
        assert torch.equal(single.run(), together[rows])
    for mine, other in zip(there.caches, apart.caches, strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("at", [0, 100, 299])
def test_nan_of_a_key_reaches_its_queries(device: torch.device, at: int) -> None:
    own = step([300], 1, (4, 2, 64, 64)).to(device, torch.float16)
    if at == 299:
        own.qkv[0, 4 * 64] = torch.nan  # of the first kv head's new key
    else:
        slot = int(own.at.page_table[0, at // 256]) * 256 + at % 256
        own.caches[0].flatten(0, 1)[slot, 0] = torch.nan
    got = own.run().isnan().view(4, 64).all(1).tolist()
    assert got == [True, True, False, False]


def test_captured_step_reads_lengths_and_pages(device: torch.device) -> None:
    own = step([2000], 1, (8, 2, 128, 128))
    there = own.to(device, torch.float16)
    there.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = there.run(ahead=True)
    for length in (1, 255, 256, 257, 1100, 1999):
        slot = int(own.at.page_table[0, (length - 1) // 256]) * 256 + (length - 1) % 256
        for at in (own.at, there.at):
            at.seq_lens[0], at.slots[0] = length, slot
        for cache, original in zip(there.caches, own.caches, strict=True):
            cache.copy_(original)  # what another length stored there
        want = own.to(CPU, torch.float32).reference()
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(got.cpu().float(), want, rtol=4e-3, atol=4e-3)


def test_bad_lengths_and_pages_read_nothing(device: torch.device) -> None:
    for name, place, value in [
        ("page_table", (0, 0), -1),
        ("page_table", (0, 1), 9),
        ("seq_lens", 0, 5000),
        ("seq_lens", 0, -3),
        ("slots", 0, 1 << 40),
    ]:
        own = step([300], 1, (4, 2, 64, 64)).to(device, torch.float16)
        getattr(own.at, name)[place] = value
        own.run()
    torch.cuda.synchronize()


def test_uneven_rows_are_refused(device: torch.device) -> None:
    own = step([300, 20], 2, (4, 2, 64, 64)).to(device, torch.float16)
    object.__setattr__(own, "qkv", own.qkv[:3])
    object.__setattr__(own, "table", own.table[:3])
    with pytest.raises(RuntimeError, match=r"expected a multiple of page_table.size\(0\), 2"):
        own.run()
