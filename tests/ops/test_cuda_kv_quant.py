"""The quantised cache on CUDA: the case lists of the CPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DIMS, PAGE
from kv_quant_cases import BITS, PAIRS, append_quant_case, attention_quant_case, copied, to
from rope_cases import HEADS
from test_kv_quant import compare_appended

from exl3.ops.attention import paged_attention, paged_attention_reference
from exl3.ops.graph import capture
from exl3.ops.kv_quant import QuantPages, dequantise_reference, new_quant_pages
from exl3.ops.rope import rope_append_, rope_append_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_torch_thread")]

FITTING = [h for h in DIMS if max(h[2:]) <= 256 and h[2] % 8 == h[3] % 8 == 0]


def check_attention(args: list[Any], options: dict[str, Any], device: torch.device) -> None:
    """Both activation types; queries are rounded to float16 beforehand."""
    args = [args[0].half(), *args[1:]]
    want = paged_attention_reference(args[0].float(), *args[1:], **options)
    for dtype in (torch.float16, torch.float32):
        there = to([args[0].to(dtype), *args[1:]], device)
        got = paged_attention(*there, **options)
        assert got.dtype == dtype
        # Rotated queries, keys, values and weights are rounded to float16.
        torch.testing.assert_close(got.cpu().float(), want, rtol=4e-3, atol=4e-3)
        assert torch.equal(got, paged_attention(*there, **options))


@pytest.mark.parametrize("bits", PAIRS, ids=str)
def test_attention_of_all_pairs(device: torch.device, bits: tuple[int, int]) -> None:
    check_attention(*attention_quant_case([(70, 1), (33, 20)], (3, 1, 64, 64), bits), device)
    check_attention(*attention_quant_case([(70, 1), (5, 1)], (4, 2, 128, 128), bits), device)


@pytest.mark.parametrize("heads", FITTING)
def test_attention_of_all_head_dims(device: torch.device, heads: tuple[int, int, int, int]) -> None:
    bits = (2 + heads[2] // 16 % 7, 2 + heads[3] // 32 % 7)
    check_attention(*attention_quant_case([(300, 1), (70, 70), (40, 9)], heads, bits), device)
    check_attention(*attention_quant_case([(300, 1), (70, 1), (1, 1)], heads, bits), device)


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("heads", [(2, 1, 64, 64), (8, 2, 80, 80)])
def test_long_context_window_and_softcap(
    device: torch.device, queries: int, heads: tuple[int, int, int, int]
) -> None:
    args, options = attention_quant_case([(3000, queries)], heads, (4, 3))
    check_attention(args, options, device)
    check_attention(args, options | {"window": 1100, "softcap": 20.0}, device)


@pytest.mark.parametrize(("queries", "at"), [(1, 0), (1, 299), (100, 250)])
def test_nan_of_a_key_reaches_its_queries(device: torch.device, queries: int, at: int) -> None:
    args, options = attention_quant_case([(300, queries)], (3, 1, 64, 64), (4, 4))
    args[1].scales[args[3][0, at // PAGE], at % PAGE] = torch.nan
    got = paged_attention(*to(args, device), **options).cpu().isnan().all(1)
    assert torch.equal(got, torch.arange(queries) + 300 - queries >= at)


def check_append(args: list[Any], options: dict[str, Any], device: torch.device) -> None:
    there = to(args, device)
    want = copied(args)
    rope_append_reference(*want, **options)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    rope_append_(*there, **on_device)
    compare_appended(to(there, torch.device("cpu")), want, options)


@pytest.mark.parametrize("bits", PAIRS, ids=str)
def test_append_of_all_pairs(device: torch.device, bits: tuple[int, int]) -> None:
    check_append(*append_quant_case(HEADS[0], 6, bits), device)
    check_append(*append_quant_case(HEADS[3], 3, bits), device)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("m", "norm"), [(5, True), (40, False), (0, False)])
def test_append_of_all_head_dims(
    device: torch.device, heads: tuple[int, ...], m: int, norm: bool
) -> None:
    check_append(*append_quant_case(heads, m, (4, 3), norm=norm), device)


def test_append_of_float16(device: torch.device) -> None:
    args, options = append_quant_case(HEADS[0], 8, (8, 8))
    there = to([args[0].half(), *args[1:]], device)
    rope_append_(*there, **options)
    rope_append_reference(*args, **options)
    stored = args[4][args[4] >= 0]
    for got, want in zip(there[2:4], args[2:4], strict=True):
        got, want = (dequantise_reference(x).cpu().flatten(0, 1)[stored] for x in (got, want))
        assert (got - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_not_finite(device: torch.device, bits: int) -> None:
    pages = [new_quant_pages(1, 1, 80, bits=bits, device=device) for _ in range(2)]
    rows = torch.zeros(5, 240, device=device)
    rows[1:, 80:] = torch.randn(4, 160)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf), 2):
        rows[row, 81] = bad
    heads = {"q_heads": 1, "kv_heads": 1, "head_dim": 80}
    rope_append_(rows, None, *pages, torch.arange(5, device=device), **heads)
    got = dequantise_reference(QuantPages(pages[0].words.cpu(), pages[0].scales.cpu(), 80))[0, :5]
    assert not got[0].any() and got[:2].isfinite().all()
    assert got[2:, 0, :32].isnan().all() and got[2:, 0, 32:].isfinite().all()


def test_captured_step_reads_slots_and_lengths(device: torch.device) -> None:
    args, options = append_quant_case(HEADS[0], 1, (5, 3))
    args[4][0] = 2 * PAGE
    args = to(args, device)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([1], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    shape = {n: options[n] for n in ("q_heads", "kv_heads", "head_dim")} | {"scale": 0.125}
    start = args[0].clone()

    def step() -> torch.Tensor:
        rope_append_(*args, **options)
        return paged_attention(args[0], *args[2:4], table, lengths, starts, **shape)

    graph = capture(step, device)
    for position in range(1, 5):
        args[0].copy_(start * (1 + position))
        args[4][0], lengths[0] = 2 * PAGE + position, position + 1
        got = graph.replay().cpu()
        host = to([args[0], *args[2:4], table, lengths, starts], torch.device("cpu"))
        want = paged_attention_reference(*host, **shape)
        torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
