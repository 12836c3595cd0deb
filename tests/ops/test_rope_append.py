"""rope_table and rope_append_ against their references, at every instruction level."""

import pytest
import torch
from rope_cases import HEADS, case, inv_freq

from exl3.ops.graph import record
from exl3.ops.rope import (
    rope_append_,
    rope_append_reference,
    rope_table,
    rope_table_reference,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("rot", [2, 6, 16, 64, 128])
def test_table_is_exact_at_far_positions(isa: str, rot: int) -> None:
    positions = torch.tensor([0, 1, 511, 8191, 100_000, 1_000_000, 16_777_217], dtype=torch.int32)
    got = rope_table(positions, inv_freq(rot), 1.25)
    want = rope_table_reference(positions, inv_freq(rot), 1.25)
    torch.testing.assert_close(got, want, rtol=1.2e-7, atol=1e-7)
    assert rope_table(positions[:0], inv_freq(rot)).shape == (0, rot)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("m", "norm"), [(1, False), (5, True), (40, False), (0, True)])
def test_matches_reference(
    isa: str, heads: tuple[int, ...], interleaved: bool, m: int, norm: bool
) -> None:
    args, options = case(heads, m, norm)
    options["interleaved"] = interleaved
    want = [a if a is None else a.clone() for a in args]
    rope_append_reference(*want, **options)
    rope_append_(*args, v_head_dim=heads[3], **options)
    torch.testing.assert_close(args[0], want[0], rtol=1e-5, atol=2e-6)
    for got, expected in ((args[2], want[2]), (args[3], want[3])):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-6, equal_nan=True)
    assert torch.equal(args[3].isnan(), want[3].isnan())


def test_without_cache_and_with_norm_offset(isa: str) -> None:
    args, options = case(HEADS[0], 4, True)
    want = args[0].clone()
    options["norm_offset"] = 1.0
    rope_append_reference(want, args[1], None, None, None, **options)
    rope_append_(args[0], args[1], None, None, None, **options)
    torch.testing.assert_close(args[0], want, rtol=1e-5, atol=2e-6)


def test_half_rounding_of_the_cache(isa: str) -> None:
    values = torch.tensor([65519.0, 65520.0, -1e9, 6e-8, 2e-8, 1 + 2**-11, 1 + 3 * 2**-11, -0.0])
    qkv = torch.cat([torch.zeros(8), torch.zeros(8), values])[None].clone()
    caches = [torch.zeros(1, 256, 1, 8).half() for _ in range(2)]
    heads = {"q_heads": 1, "kv_heads": 1, "head_dim": 8}
    rope_append_(qkv, None, *caches, torch.tensor([255]), **heads)
    assert torch.equal(caches[1][0, 255, 0], values.half())


def test_bad_slot_is_an_error_also_in_replay() -> None:
    args, options = case(HEADS[0], 2, False)
    graph = record(lambda: rope_append_(*args, **options))
    before = args[2].clone()
    args[4][1] = 3 * 256
    with pytest.raises(RuntimeError, match="outside its table"):
        graph.replay()
    assert torch.equal(args[2].nan_to_num(), before.nan_to_num())


def test_bad_arguments_are_named() -> None:
    args, options = case(HEADS[0], 2, False)
    with pytest.raises(RuntimeError, match="go together"):
        rope_append_(args[0], args[1], args[2], None, None, **options)
    with pytest.raises(RuntimeError, match=r"table.size\(1\) is 66"):
        rope_append_(args[0], torch.zeros(2, 66), None, None, None, **options)
    with pytest.raises(RuntimeError, match="expected at least 960"):
        rope_append_(args[0][:, :900], args[1], None, None, None, **options)


def test_opcheck() -> None:
    args, _ = case(HEADS[0], 2, False)
    args[0] = args[0].contiguous()
    for i in (2, 3):
        args[i].zero_()
    op = torch.ops.exl3.rope_append_.default
    torch.library.opcheck(op, (*args, None, None, 9, 3, 64, 64, 1e-6, 0.0, False))
    positions = torch.arange(3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.exl3.rope_table.default, (positions, inv_freq(8), 1.0))
