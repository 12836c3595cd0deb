"""low_rank_add_ against its reference, at every instruction level."""

from __future__ import annotations

import pytest
import torch

from exl3.ops.graph import record
from exl3.ops.low_rank import MAX_PARTS, LowRankPart, low_rank_add_, low_rank_add_reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Rank and owner of the adapters on each target, in order: several on one, one on each, none.
CASES = {
    "one": [(0, 64, [(16, 0)])],
    "qkv": [(0, 96, [(8, 0), (5, 1)]), (96, 32, [(8, 0)]), (128, 31, [(1, 2), (64, 1)])],
    "a hole": [(3, 7, [(2, 1)]), (200, 130, [(4, 0)])],
}


def make(case: str, k: int, owners: int = 3, seed: int = 0) -> tuple[list[LowRankPart], int]:
    source = torch.Generator().manual_seed(seed)
    parts, end = [], 0
    for start, n, adapters in CASES[case]:
        for rank, owner in adapters:
            a = torch.randn(rank, k, generator=source) * k**-0.5
            parts.append(LowRankPart(a, torch.randn(rank, n, generator=source), start, owner))
        end = start + n
    return parts, end


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("m", "k"), [(0, 16), (1, 576), (3, 33), (16, 1), (40, 257)])
def test_matches_reference(isa: str, case: str, m: int, k: int) -> None:
    parts, end = make(case, k)
    torch.manual_seed(1)
    wide, x = torch.randn(m, end + 9), torch.randn(m, k + 5)[:, :k]
    y = wide[:, : end + 4]
    mask = torch.randint(0, 2, (m, 3)) * torch.tensor([1.0, 0.5, 1.0])
    guard, want = wide[:, end + 4 :].clone(), low_rank_add_reference(y, x, parts, mask)
    assert low_rank_add_(y, x, parts, mask) is y
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide[:, end + 4 :], guard)


def test_a_row_depends_on_itself_alone(isa: str) -> None:
    """Bit for bit: not on other rows, nor on adapters that it does not have."""
    parts, end = make("qkv", 576)
    torch.manual_seed(2)
    y, x = torch.randn(9, end), torch.randn(9, 576)
    mask = torch.randint(0, 2, (9, 3)).float()
    together = low_rank_add_(y.clone(), x, parts, mask)
    for row in range(9):
        own = [part for part in parts if mask[row, part.owner]]
        alone = y[row : row + 1].clone()
        if own:
            low_rank_add_(alone, x[row : row + 1], own, torch.ones(1, 3))
        assert torch.equal(alone[0], together[row])


def test_what_is_masked_is_not_read(isa: str) -> None:
    parts, end = make("qkv", 64)
    poisoned = [
        LowRankPart(p.a * torch.nan, p.b * torch.nan, p.start, p.owner) if p.owner == 1 else p
        for p in parts
    ]
    y, x, mask = torch.zeros(2, end), torch.randn(2, 64), torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    low_rank_add_(y, x, poisoned, mask)
    assert y.isfinite().all() and y[0].any() and not y[1].any()


def test_many_parts_and_a_recording() -> None:
    """More than one launch takes; the mask may change between replays."""
    source = torch.Generator().manual_seed(0)
    parts = [
        LowRankPart(
            torch.randn(2, 32, generator=source), torch.randn(2, 40, generator=source), 0, owner
        )
        for owner in range(2 * MAX_PARTS + 3)
    ]
    y, x, mask = torch.zeros(3, 40), torch.randn(3, 32), torch.ones(3, len(parts))

    def run() -> torch.Tensor:
        return low_rank_add_(y, x, parts, mask)

    graph = record(run)
    assert len(graph) == 3
    want = low_rank_add_reference(torch.zeros(3, 40), x, parts, mask)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)
    y.zero_()
    mask[1:, :] = 0
    mask[1, 5] = 1
    graph.replay()
    want = low_rank_add_reference(torch.zeros(3, 40), x, parts, mask)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 7)}, "a of part 0 is .4, 8., expected .1 or more, 7."),
        ({"x": torch.zeros(2, 8).half()}, "x has dtype Half"),
        ({"y": torch.zeros(3, 9)}, "y.size.0. is 3"),
        ({"y": torch.zeros(2, 5)}, "covers columns 0 to 6 of 5"),
        ({"mask": torch.zeros(2, 0)}, "owner of part 0 is 0, mask has 0"),
        ({"mask": torch.zeros(2)}, "mask has 1 dims"),
        ({"b": torch.zeros(3, 6)}, "b of part 0 has 3 rows, expected 4"),
        ({"a": torch.zeros(8, 4).T}, "a.stride.1. is 4"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, torch.Tensor], words: str) -> None:
    good = {"y": torch.zeros(2, 9), "x": torch.zeros(2, 8), "mask": torch.zeros(2, 1)}
    t = {**good, "a": torch.zeros(4, 8), "b": torch.zeros(4, 6), **change}
    with pytest.raises(RuntimeError, match=words):
        low_rank_add_(t["y"], t["x"], [LowRankPart(t["a"], t["b"], 0, 0)], t["mask"])


def test_parts_that_overlap_are_refused() -> None:
    a, b, x = torch.zeros(4, 8), torch.zeros(4, 6), torch.zeros(2, 8)
    parts = [LowRankPart(a, b, start, 0) for start in (0, 4)]
    with pytest.raises(RuntimeError, match="part 1 overlaps"):
        low_rank_add_(torch.zeros(2, 20), x, parts, torch.ones(2, 1))


def test_opcheck() -> None:
    parts, end = make("qkv", 24)
    torch.library.opcheck(
        torch.ops.exl3.low_rank_add_.default,
        (
            torch.randn(2, end),
            torch.randn(2, 24),
            [p.a for p in parts],
            [p.b for p in parts],
            [p.start for p in parts],
            [p.owner for p in parts],
            torch.ones(2, 3),
        ),
    )
