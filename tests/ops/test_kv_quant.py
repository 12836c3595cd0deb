"""The quantised cache: its format, and both ops against their references at every level."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import DIMS, PAGE, in_pieces
from attention_cases import case as attention_case
from kv_quant_cases import (
    BITS,
    PAIRS,
    append_quant_case,
    attention_quant_case,
    copied,
    quantised,
)
from rope_cases import HEADS

from exl3.errors import ConfigError
from exl3.ops.attention import paged_attention, paged_attention_reference
from exl3.ops.graph import record
from exl3.ops.kv_quant import (
    QuantPages,
    dequantise_reference,
    new_quant_pages,
    pack_codes,
    quantise_reference,
    rotate_reference,
    unpack_codes,
)
from exl3.ops.rope import rope_append_, rope_append_reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("bits", BITS)
def test_packed_bits_lie_where_the_format_says(bits: int) -> None:
    torch.manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (5, 32))
    words = pack_codes(codes, bits)
    assert words.shape == (5, bits) and torch.equal(unpack_codes(words, bits), codes)
    for row in range(5):
        at = low = 0
        for width in (w for w in (8, 4, 2, 1) if bits & w):
            for t in range(32):
                word = int(words[row, at + t % 16 // (16 // width)]) & 0xFFFFFFFF
                shift = 16 * (t // 16) + width * (t % 16 % (16 // width))
                assert word >> shift & (1 << width) - 1 == int(codes[row, t]) >> low & (
                    (1 << width) - 1
                )
            at, low = at + width, low + width


@pytest.mark.parametrize("dim", [1, 20, 64, 72, 80, 96, 128, 192, 256, 512])
def test_rotation_is_its_own_inverse(dim: int) -> None:
    x = torch.randn(3, 2, dim, dtype=torch.float64)
    turned = rotate_reference(x)
    torch.testing.assert_close(rotate_reference(turned), x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    spike = torch.zeros(dim, dtype=torch.float64)
    spike[0] = 1.0
    assert rotate_reference(spike).abs().max() <= max(dim & -dim, 1) ** -0.5 + 1e-12 or dim >= 32


def check_attention(args: list[Any], options: dict[str, Any]) -> None:
    got = paged_attention(*args, **options)
    want = paged_attention_reference(*args, **options)
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
    assert torch.equal(got, paged_attention(*args, **options))


@pytest.mark.parametrize("bits", PAIRS, ids=str)
def test_attention_of_all_pairs(isa: str, bits: tuple[int, int]) -> None:
    check_attention(*attention_quant_case([(70, 1), (33, 20)], (3, 1, 64, 64), bits))


@pytest.mark.parametrize("heads", DIMS)
def test_attention_of_all_head_dims(isa: str, heads: tuple[int, int, int, int]) -> None:
    bits = (2 + heads[2] // 16 % 7, 2 + heads[3] // 32 % 7)
    lengths = [(300, 1), (30, 30), (40, 9)]
    check_attention(*attention_quant_case(lengths, heads, bits))


@pytest.mark.parametrize("queries", [1, 3, 30])
def test_long_context_window_and_softcap(isa: str, queries: int) -> None:
    args, options = attention_quant_case([(3000, queries)], (2, 1, 64, 64), (4, 3))
    check_attention(args, options)
    check_attention(args, options | {"window": 1100, "softcap": 20.0})


def test_batched_equals_single_bit_for_bit(isa: str) -> None:
    lengths = [(2000, 1), (300, 40), (64, 1)]
    args, options = attention_quant_case(lengths, (9, 3, 64, 64), (4, 4))
    together = paged_attention(*args, **options)
    for b in range(len(lengths)):
        start, stop = args[5][b : b + 2].tolist()
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        alone = [args[0][start:stop], *args[1:3], args[3][b : b + 1], args[4][b : b + 1], starts]
        assert torch.equal(paged_attention(*alone, **options), together[start:stop])


@pytest.mark.parametrize("heads", [(6, 2, 64, 64), (2, 1, 72, 40)])
def test_chunked_equals_whole_bit_for_bit(isa: str, heads: tuple[int, int, int, int]) -> None:
    args, options = attention_quant_case([(600, 330)], heads, (5, 4))
    whole = paged_attention(*args, **options)
    for sizes in ((1,), (2, 3, 8), (7, 40), (128,)):
        assert torch.equal(in_pieces(args, options, sizes), whole), sizes


def decoded_error(pages: QuantPages, want: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Squared error of each stored head."""
    got = dequantise_reference(pages).flatten(0, 1)[slots]
    return ((got - want) ** 2).sum(-1)


def compare_appended(args: list[Any], want: list[Any], options: dict[str, Any]) -> None:
    """Codes may differ where a value lies between two levels, the error may not be greater."""
    torch.testing.assert_close(args[0], want[0], rtol=1e-5, atol=2e-6)
    stored = args[4] >= 0
    slots = args[4][stored]
    heads, kv_heads, dim = (options[n] for n in ("q_heads", "kv_heads", "head_dim"))
    k, v = (
        want[0][:, heads * dim :]
        .double()
        .split([kv_heads * dim, kv_heads * options["v_head_dim"]], 1)
    )
    for got, expected, x in ((args[2], want[2], k), (args[3], want[3], v)):
        exact = x.unflatten(1, (kv_heads, -1))[stored]
        own, least = (decoded_error(pages, exact, slots) for pages in (got, expected))
        torch.testing.assert_close(own, least, rtol=2e-2, atol=1e-9)
        same = (got.words == expected.words).flatten(0, 1)[slots]
        assert not same.numel() or same.float().mean() > 0.97
        untouched = torch.ones(got.scales.shape[0] * PAGE, dtype=torch.bool)
        untouched[slots] = False
        assert not got.words.flatten(0, 1)[untouched].any()
        assert not got.scales.flatten(0, 1)[untouched].any()


def check_append(args: list[Any], options: dict[str, Any]) -> None:
    want = copied(args)
    rope_append_reference(*want, **options)
    rope_append_(*args, **options)
    compare_appended(args, want, options)


@pytest.mark.parametrize("bits", PAIRS, ids=str)
def test_append_of_all_pairs(isa: str, bits: tuple[int, int]) -> None:
    check_append(*append_quant_case(HEADS[0], 6, bits))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("m", "norm"), [(5, True), (40, False), (0, False)])
def test_append_of_all_head_dims(isa: str, heads: tuple[int, ...], m: int, norm: bool) -> None:
    check_append(*append_quant_case(heads, m, (4, 3), norm=norm))


def append_values(values: torch.Tensor, bits: int) -> QuantPages:
    """One kv head, no rotary embedding: the values stored at slot 0."""
    dim = values.shape[0]
    pages = [new_quant_pages(1, 1, dim, bits=bits) for _ in range(2)]
    qkv = values.repeat(3)[None].clone()
    rope_append_(qkv, None, *pages, torch.tensor([0]), q_heads=1, kv_heads=1, head_dim=dim)
    assert torch.equal(pages[0].words, pages[1].words)
    return pages[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 80])
def test_zeros_tiny_huge_and_not_finite(isa: str, bits: int, dim: int) -> None:
    decode = lambda pages: dequantise_reference(pages)[0, 0, 0]  # noqa: E731
    assert not decode(append_values(torch.zeros(dim), bits)).any()
    pattern = torch.randn(dim)
    for size in (1e-4, 1.0, 1e4):
        got = decode(append_values(pattern * size, bits))
        assert (got - pattern * size).norm() <= 1.1 * 2.0**-bits * (pattern * size).norm() * 2
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = pattern.clone()
        spoilt[-1] = bad
        got = decode(append_values(spoilt, bits))
        block = 32 * ((dim - 1) // 32)
        assert got[block:].isnan().all() and got[:block].isfinite().all()


@pytest.mark.parametrize(("queries", "at"), [(1, 0), (1, 299), (100, 250)])
def test_nan_of_a_key_reaches_its_queries(isa: str, queries: int, at: int) -> None:
    args, options = attention_quant_case([(300, queries)], (3, 1, 64, 64), (4, 4))
    args[1].scales[args[3][0, at // PAGE], at % PAGE] = torch.nan
    got = paged_attention(*args, **options).isnan().all(1)
    assert torch.equal(got, torch.arange(queries) + 300 - queries >= at)


@pytest.mark.parametrize("queries", [4, 40])
def test_error_falls_with_each_bit(queries: int) -> None:
    """Of keys, of values, and of both, on heads with outlier channels."""
    args, options = attention_case([(200, queries)] * 5, (4, 2, 128, 128))
    args[1] *= (1 + 7 * (torch.rand(128) < 0.03)).half()
    plain = args[1:3]
    quant = {b: [quantised(cache, b) for cache in plain] for b in BITS}
    exact = quantised(plain[0], 8), quantised(plain[1], 8)

    def error(keys: Any, values: Any, want: torch.Tensor) -> float:
        got = paged_attention(args[0], keys, values, *args[3:], **options)
        return float((got - want).norm() / want.norm())

    def outcome(keys: Any, values: Any) -> torch.Tensor:
        return paged_attention_reference(args[0], keys, values, *args[3:], **options).double()

    base, key_base, value_base = (
        outcome(*plain),
        outcome(plain[0], exact[1]),
        outcome(exact[0], plain[1]),
    )
    of_keys = [error(quant[b][0], exact[1], key_base) for b in BITS]
    of_values = [error(exact[0], quant[b][1], value_base) for b in BITS]
    of_both = [error(*quant[b], base) for b in BITS]
    for errors in (of_keys, of_values, of_both):
        assert all(b < 0.75 * a for a, b in pairwise(errors)), errors
    assert of_both[-1] < 0.01 and of_both[0] < 0.7


@pytest.mark.parametrize("bits", BITS)
def test_search_beats_the_greatest_magnitude(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 64, dtype=torch.float64)
    words, scales = quantise_reference(x, bits)
    pages = QuantPages(words, scales, 64)
    error = float(((dequantise_reference(pages) - x) ** 2).mean())
    half = 2 ** (bits - 1)
    turned = rotate_reference(x).unflatten(-1, (-1, 32))
    step = turned.abs().amax(-1, keepdim=True) / (half - 0.5)
    plain = ((turned / step + half - 0.5).round() - half + 0.5) * step
    limit = {2: 0.6, 3: 0.85}.get(bits, 1.0)
    assert error < limit * float(((plain - turned) ** 2).mean())


def test_replay_reads_slots_lengths_and_pages(isa: str) -> None:
    heads = (9, 3, 64, 64, 64)
    args, options = append_quant_case(heads, 1, (5, 3))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    lengths, starts = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    args[4][0] = 2 * PAGE
    shape = {n: options[n] for n in ("q_heads", "kv_heads", "head_dim")} | {"scale": 0.125}
    start = args[0].clone()

    def step() -> torch.Tensor:
        rope_append_(*args, **options)
        return paged_attention(args[0], *args[2:4], table, lengths, starts, **shape)

    graph = record(step)
    for position in range(1, 5):
        args[0].copy_(start * (1 + position))
        args[4][0], lengths[0] = 2 * PAGE + position, position + 1
        got = graph.replay()
        want = paged_attention_reference(args[0], *args[2:4], table, lengths, starts, **shape)
        torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
    assert args[2].scales[2, :5].all() and not args[2].scales[2, 5:].any()


def test_bad_arguments_are_named() -> None:
    args, options = append_quant_case(HEADS[0], 2, (4, 4))
    plain = torch.zeros(3, PAGE, 3, 64).half()
    with pytest.raises(ConfigError, match="both keys and values"):
        rope_append_(*args[:3], plain, args[4], **options)
    with pytest.raises(RuntimeError, match=r"words.size\(3\) is 5, expected 2 times 2..8"):
        bad = QuantPages(args[2].words[..., :5].contiguous(), args[2].scales, 64)
        rope_append_(*args[:2], bad, *args[3:], **options)
    args[4][1] = 3 * PAGE
    with pytest.raises(RuntimeError, match="outside its table"):
        rope_append_(*args, **options)
    assert not args[2].words.any()
    args, options = attention_quant_case([(20, 2)], (2, 1, 16, 16), (4, 4))
    with pytest.raises(ConfigError, match="both keys and values"):
        paged_attention(args[0], args[1], torch.zeros(1), *args[3:], **options)
    for bits in (0, 1, 9):
        with pytest.raises(ConfigError, match="2 to 8 bits"):
            new_quant_pages(1, 1, 64, bits=bits)


def test_opcheck() -> None:
    args, _ = append_quant_case(HEADS[0], 2, (4, 3))
    tensors = [args[2].words, args[2].scales, args[3].words, args[3].scales]
    op = torch.ops.exl3.rope_append_quant_.default
    numbers = (9, 3, 64, 64, 1e-6, 0.0, False)
    torch.library.opcheck(
        op, (args[0].contiguous(), args[1], *tensors, args[4], None, None, *numbers)
    )
    args, _ = attention_quant_case([(20, 2)], (2, 1, 16, 16), (4, 3))
    tensors = [args[1].words, args[1].scales, args[2].words, args[2].scales]
    tensors = [t.nan_to_num(0.0) if t.is_floating_point() else t for t in tensors]
    op = torch.ops.exl3.paged_attention_quant.default
    first = args[0].nan_to_num(0.0)
    torch.library.opcheck(op, (first, *tensors, *args[3:], 2, 1, 16, 16, 0.25, 0, 0.0, True))
