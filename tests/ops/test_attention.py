"""paged_attention against its reference, at every instruction level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DIMS, PAGE, case, in_pieces

from exl3.ops.attention import paged_attention, paged_attention_reference
from exl3.ops.graph import record

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def check(args: list[torch.Tensor], options: dict[str, Any], tolerance: float = 3e-6) -> None:
    got = paged_attention(*args, **options)
    want = paged_attention_reference(*args, **options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(got, paged_attention(*args, **options))


@pytest.mark.parametrize("heads", DIMS)
def test_head_dims_in_decode_and_prefill(isa: str, heads: tuple[int, int, int, int]) -> None:
    check(*case([(300, 1), (70, 70), (270, 3), (40, 9)], heads))


@pytest.mark.parametrize("queries", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 16, 17, 255, 256, 257, 1025])
def test_decode_lengths(isa: str, length: int, queries: int) -> None:
    if queries <= length:
        check(*case([(length, queries)], (4, 2, 64, 64)))


@pytest.mark.parametrize("queries", [3, 22, 64, 257])
@pytest.mark.parametrize("before", [0, 1, 63, 300])
def test_prefill_lengths(isa: str, queries: int, before: int) -> None:
    check(*case([(queries + before, queries)], (3, 1, 64, 64)))


@pytest.mark.parametrize(("length", "queries"), [(8191, 1), (9000, 3), (9000, 40)])
def test_long_context_is_split(isa: str, length: int, queries: int) -> None:
    check(*case([(length, queries)], (2, 1, 64, 64)))


@pytest.mark.parametrize("window", [1, 16, 100, 256])
@pytest.mark.parametrize("queries", [1, 3, 90])
def test_window_edges(isa: str, window: int, queries: int) -> None:
    lengths = (window - 1, window, window + 1, window + 300)
    args, options = case([(n, queries) for n in lengths if n >= queries], (3, 1, 64, 64))
    check(args, options | {"window": window})
    check(args, options | {"window": window, "causal": False})


def test_keys_before_the_window_are_not_read(isa: str) -> None:
    args, options = case([(900, 2), (900, 120)], (3, 1, 64, 64))
    want = paged_attention_reference(*args, **options, window=100)
    for b, first in ((0, 900 - 2 + 1 - 100), (1, 900 - 120 + 1 - 100)):
        for t in range(first):
            args[1][args[3][b, t // PAGE], t % PAGE] = torch.nan
            args[2][args[3][b, t // PAGE], t % PAGE] = torch.nan
        args[3][b, : first // PAGE] = 1 << 30
    got = paged_attention(*args, **options, window=100)
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("queries", [1, 90])
def test_softcap_scale_and_no_mask(isa: str, queries: int) -> None:
    args, options = case([(300, queries)], (3, 1, 64, 64))
    check(args, options | {"softcap": 30.0, "scale": 4.0}, 2e-5)
    check(args, options | {"causal": False})
    check(args, options | {"scale": 10.0}, 2e-4)  # scores of hundreds: a one-hot softmax


def test_empty_sequences_and_rows_of_none(isa: str) -> None:
    args, options = case([(0, 0), (300, 1), (7, 0), (0, 0), (20, 20), (0, 0)], (3, 1, 64, 64))
    check(args, options)
    args[0] = torch.cat([args[0], torch.zeros(5, args[0].shape[1])])
    args[5][-1] += 2  # two queries of a sequence without keys, then three rows of no sequence
    got = paged_attention(*args, **options)
    assert torch.equal(got[-5:], torch.zeros_like(got[-5:]))
    torch.testing.assert_close(got, paged_attention_reference(*args, **options), rtol=0, atol=3e-6)
    args, options = case([(5, 5)], (3, 1, 64, 64))
    args[4][0] = 3  # two queries before position 0
    assert torch.equal(paged_attention(*args, **options)[:2], torch.zeros(2, 3 * 64))
    check(args, options)
    args, options = case([], (3, 1, 64, 64))
    assert paged_attention(*args, **options).shape == (0, 3 * 64)


def test_batched_equals_single_bit_for_bit(isa: str) -> None:
    lengths = [(2000, 1), (300, 40), (64, 1), (700, 2)]
    args, options = case(lengths, (9, 3, 64, 64))
    together = paged_attention(*args, **options)
    for b in range(len(lengths)):
        start, stop = args[5][b : b + 2].tolist()
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        alone = [args[0][start:stop], *args[1:3], args[3][b : b + 1], args[4][b : b + 1], starts]
        assert torch.equal(paged_attention(*alone, **options), together[start:stop])


@pytest.mark.parametrize("heads", [(9, 3, 64, 64), (2, 2, 72, 40), (3, 1, 8, 36), (2, 1, 128, 256)])
@pytest.mark.parametrize("extra", [{}, {"window": 100}, {"softcap": 20.0, "scale": 1.0}])
def test_chunked_equals_whole_bit_for_bit(
    isa: str, heads: tuple[int, int, int, int], extra: dict[str, Any]
) -> None:
    """Few rows and many take other kernels and other splits of the keys."""
    args, options = case([(900, 330)], heads)
    options |= extra
    whole = paged_attention(*args, **options)
    for sizes in ((1,), (2, 3, 1, 8), (7, 40), (128,), (300,)):
        assert torch.equal(in_pieces(args, options, sizes), whole), sizes


@pytest.mark.parametrize(("length", "queries"), [(8200, 30), (3000, 1100)])
def test_long_context_bit_for_bit(isa: str, length: int, queries: int) -> None:
    args, options = case([(length, queries)], (2, 1, 16, 16))
    whole = paged_attention(*args, **options)
    assert torch.equal(in_pieces(args, options, (1, 9, 500)), whole)


@pytest.mark.parametrize(("queries", "at"), [(1, 0), (1, 299), (100, 250)])
def test_nan_of_a_key_reaches_its_queries(isa: str, queries: int, at: int) -> None:
    args, options = case([(300, queries)], (3, 1, 64, 64))
    args[1][args[3][0, at // PAGE], at % PAGE] = torch.nan
    got = paged_attention(*args, **options).isnan().all(1)
    sees = torch.arange(queries) + 300 - queries >= at
    assert torch.equal(got, sees)


def test_replay_reads_lengths_and_pages(isa: str) -> None:
    args, options = case([(700, 1)], (9, 3, 64, 64))
    args[4][0] = 10
    graph = record(lambda: paged_attention(*args, **options))
    for length in (255, 256, 257, 700):
        args[4][0] = length
        want = paged_attention_reference(*args, **options)
        torch.testing.assert_close(graph.replay(), want, rtol=3e-6, atol=3e-6)


# Argument, place and bad value.
BAD = [(3, (0, 0), -1), (3, (0, 1), 9), (4, 0, 5000), (4, 0, -1), (5, 1, 7), (5, 0, -1)]


def test_bad_lengths_and_pages_are_errors() -> None:
    for index, place, value in BAD:
        args, options = case([(300, 4)], (3, 1, 64, 64))
        args[index][place] = value
        with pytest.raises(RuntimeError, match="outside its table"):
            paged_attention(*args, **options)
    args, options = case([(300, 1)], (3, 1, 64, 64))
    with pytest.raises(RuntimeError, match="expected a multiple of kv_heads"):
        paged_attention(*args, **options | {"kv_heads": 2})
    with pytest.raises(RuntimeError, match="page_table has dtype Long, expected Int"):
        paged_attention(*args[:3], args[3].long(), *args[4:], **options)


def test_opcheck() -> None:
    args, _ = case([(20, 2)], (2, 1, 16, 16))
    args = [a.nan_to_num(0.0) if a.is_floating_point() else a for a in args]
    op = torch.ops.exl3.paged_attention.default
    torch.library.opcheck(op, (*args, 2, 1, 16, 0.25, 0, 0.0, True))
