"""Rotary embedding and attention on CUDA: the case lists of the CPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DIMS, PAGE, case
from rope_cases import HEADS, inv_freq
from rope_cases import case as rope_case

from exl3.ops.attention import paged_attention, paged_attention_reference
from exl3.ops.rope import rope_append_, rope_append_reference, rope_table, rope_table_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_torch_thread")]

DTYPES = [torch.float16, torch.float32]


def run(args: list[torch.Tensor], options: dict[str, Any], device: torch.device) -> torch.Tensor:
    return paged_attention(*[a.to(device) for a in args], **options)


def check(args: list[torch.Tensor], options: dict[str, Any], device: torch.device) -> None:
    """Both activation types; q is rounded to float16 beforehand, as the kernel does."""
    args = [args[0].half(), *args[1:]]
    want = paged_attention_reference(args[0].float(), *args[1:], **options)
    for dtype in DTYPES:
        typed = [args[0].to(dtype), *args[1:]]
        got = run(typed, options, device)
        assert got.dtype == dtype
        # Weights and the result are rounded to float16: 2^-11 each, relative to values of order 1.
        torch.testing.assert_close(got.cpu().float(), want, rtol=2e-3, atol=2e-3)
        assert torch.equal(got, run(typed, options, device))


@pytest.mark.parametrize("heads", [h for h in DIMS if max(h[2:]) <= 256 and h[2] % 8 == 0])
def test_head_dims_in_decode_and_prefill(
    device: torch.device, heads: tuple[int, int, int, int]
) -> None:
    if heads[3] % 8:
        pytest.skip("head dims are multiples of 8 on CUDA")
    check(*case([(300, 1), (70, 70), (270, 3), (40, 9)], heads), device)
    check(*case([(300, 1), (70, 1), (1, 1)], heads), device)


@pytest.mark.parametrize("queries", [1, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025])
def test_decode_lengths(device: torch.device, length: int, queries: int) -> None:
    if queries <= length:
        check(*case([(length, queries)], (4, 2, 64, 64)), device)


@pytest.mark.parametrize("queries", [3, 22, 64, 257])
@pytest.mark.parametrize("before", [0, 1, 63, 300])
def test_prefill_lengths(device: torch.device, queries: int, before: int) -> None:
    check(*case([(queries + before, queries)], (3, 1, 64, 64)), device)


@pytest.mark.parametrize(("length", "queries"), [(8191, 1), (9000, 3), (9000, 40), (2048, 2048)])
def test_long_context_is_split(device: torch.device, length: int, queries: int) -> None:
    check(*case([(length, queries)], (2, 1, 64, 64)), device)
    check(*case([(length, queries)], (8, 2, 128, 128)), device)


@pytest.mark.parametrize("window", [1, 16, 100, 256])
@pytest.mark.parametrize("queries", [1, 3, 90])
def test_window_edges(device: torch.device, window: int, queries: int) -> None:
    lengths = (window - 1, window, window + 1, window + 300)
    args, options = case([(n, queries) for n in lengths if n >= queries], (3, 1, 64, 64))
    check(args, options | {"window": window}, device)
    check(args, options | {"window": window, "causal": False}, device)


def test_keys_before_the_window_are_not_read(device: torch.device) -> None:
    args, options = case([(900, 2), (900, 120)], (3, 1, 64, 64))
    want = paged_attention_reference(*args, **options, window=100)
    for b, first in ((0, 900 - 2 + 1 - 100), (1, 900 - 120 + 1 - 100)):
        for t in range(first):
            args[1][args[3][b, t // PAGE], t % PAGE] = torch.nan
            args[2][args[3][b, t // PAGE], t % PAGE] = torch.nan
        args[3][b, : first // PAGE] = 1 << 30
    got = run(args, options | {"window": 100}, device).cpu()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("queries", [1, 90])
def test_softcap_and_no_mask(device: torch.device, queries: int) -> None:
    args, options = case([(300, queries)], (3, 1, 64, 64))
    check(args, options | {"softcap": 30.0, "scale": 1.0}, device)
    check(args, options | {"causal": False}, device)


def test_empty_sequences_and_rows_of_none(device: torch.device) -> None:
    args, options = case([(0, 0), (300, 1), (7, 0), (0, 0), (20, 20), (0, 0)], (3, 1, 64, 64))
    check(args, options, device)
    args[0] = torch.cat([args[0], torch.zeros(5, args[0].shape[1])])
    args[5][-1] += 2  # two queries of a sequence without keys, then three rows of no sequence
    got = run(args, options, device)
    assert torch.equal(got[-5:], torch.zeros_like(got[-5:]))
    check(args, options, device)
    args, options = case([], (3, 1, 64, 64))
    assert run(args, options, device).shape == (0, 3 * 64)


def test_batched_equals_single(device: torch.device) -> None:
    lengths = [(2000, 1), (300, 40), (64, 1), (700, 2)]
    args, options = case(lengths, (9, 3, 64, 64))
    together = run(args, options, device)
    for b in range(len(lengths)):
        start, stop = args[5][b : b + 2].tolist()
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        alone = [args[0][start:stop], *args[1:3], args[3][b : b + 1], args[4][b : b + 1], starts]
        got = run(alone, options, device)
        torch.testing.assert_close(got, together[start:stop], rtol=2e-3, atol=2e-3)


def test_many_sequences(device: torch.device) -> None:
    lengths = [(1 + 37 * b % 600, 1) for b in range(70)]
    check(*case(lengths, (8, 2, 128, 128)), device)


@pytest.mark.parametrize(("queries", "at"), [(1, 0), (1, 299), (100, 250)])
def test_nan_of_a_key_reaches_its_queries(device: torch.device, queries: int, at: int) -> None:
    args, options = case([(300, queries)], (3, 1, 64, 64))
    args[1][args[3][0, at // PAGE], at % PAGE] = torch.nan
    got = run(args, options, device).cpu().isnan().all(1)
    assert torch.equal(got, torch.arange(queries) + 300 - queries >= at)


def test_captured_step_reads_lengths_and_pages(device: torch.device) -> None:
    args, options = case([(700, 1)], (9, 3, 64, 64))
    there = [a.to(device) for a in args]
    paged_attention(*there, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_attention(*there, **options)
    for length in (255, 256, 257, 700, 10):
        args[4][0] = length
        there[4][0] = length
        want = paged_attention_reference(*args, **options)
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)


def test_bad_lengths_and_pages_read_nothing(device: torch.device) -> None:
    for index, place, value in [(3, (0, 0), -1), (3, (0, 1), 9), (4, 0, 5000), (5, 1, 7)]:
        args, options = case([(300, 4)], (3, 1, 64, 64))
        args[index][place] = value
        run(args, options, device)
    torch.cuda.synchronize()
    args, options = case([(300, 1)], (1, 1, 512, 512))
    with pytest.raises(RuntimeError, match="no kernel"):
        run(args, options, device)


@pytest.mark.parametrize("rot", [2, 6, 16, 64, 128])
def test_table_is_exact_at_far_positions(device: torch.device, rot: int) -> None:
    positions = torch.tensor([0, 1, 511, 8191, 100_000, 1_000_000, 16_777_217], dtype=torch.int32)
    got = rope_table(positions.to(device), inv_freq(rot).to(device), 1.25).cpu()
    want = rope_table_reference(positions, inv_freq(rot), 1.25)
    torch.testing.assert_close(got, want, rtol=1.2e-7, atol=1e-7)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("m", "norm"), [(1, False), (5, True), (40, False), (0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_append(
    device: torch.device,
    heads: tuple[int, ...],
    interleaved: bool,
    m: int,
    norm: bool,
    dtype: torch.dtype,
) -> None:
    args, options = rope_case(heads, m, norm)
    args[0] = args[0].to(dtype)
    there = [a if a is None else a.to(device) for a in args]
    on = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    rope_append_reference(*args, **options, interleaved=interleaved)
    rope_append_(*there, v_head_dim=heads[3], **on, interleaved=interleaved)
    half = dtype == torch.float16
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if half else {"rtol": 1e-5, "atol": 4e-6}
    torch.testing.assert_close(there[0].cpu(), args[0], **tolerance)
    for got, want in ((there[2].cpu(), args[2]), (there[3].cpu(), args[3])):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert torch.equal(there[3].cpu().isnan(), args[3].isnan())


def test_bad_slot_stores_nothing(device: torch.device) -> None:
    args, options = rope_case(HEADS[0], 2, False)
    there = [a.to(device) for a in args]
    there[4][:] = torch.tensor([3 * 256, 1 << 40])
    rope_append_(*there, **options)
    assert bool(there[2].isnan().all()) and bool(there[3].isnan().all())
