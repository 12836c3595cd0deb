"""Rounding with feedback down the rows and across the columns, against its definition."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.quant import Hessian, InputGroup, LinearJob, QuantizeOptions, quantize_groups
from exl3.quant.ldlq import Problem, block_ldl, ldlq
from exl3.quant.output_hessian import OutputHessian
from exl3.quant.packing import from_tiles, to_tiles
from exl3.quant.refit import refit_scales
from exl3.quant.two_sided import TwoSidedWalk

Right = list[tuple[slice, Tensor]]
STEP = 0.25


def moments(size: int, seed: int) -> Tensor:
    """A Hessian with a falling spectrum, mean diagonal 1."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
    x = torch.randn(4 * size, size, generator=generator) * torch.logspace(0, -1.3, size) @ turn
    matrix = x.T @ x
    return matrix / matrix.diagonal().mean()


def factors(columns: list[int], seed: int) -> Right:
    result: Right = []
    start = 0
    for index, size in enumerate(columns):
        lower = block_ldl(moments(size, seed + index), 0.1)
        result.append((slice(start, start + size), lower))
        start += size
    return result


def dense(right: Right) -> Tensor:
    return torch.block_diag(*[block for _, block in right])


def walk_to_grid(weight: Tensor, lower: Tensor | None, right: Right) -> tuple[Tensor, int]:
    """Decoded values with rounding to a grid in place of the search, and the number of steps."""
    decoded, most = [], 0
    for columns, block in right:
        lowers = None if lower is None else [lower]
        walk = TwoSidedWalk([weight[:, columns]], lowers, [block], 4)
        steps = 0
        while not walk.done:
            values = torch.round(walk.target_tiles() / STEP) * STEP
            words = torch.full((len(values), 64), steps, dtype=torch.int16)
            walk.take(words, values)
            steps += 1
        assert int(walk.trellis(0).max()) == steps - 1
        decoded.append(walk.decoded(0))
        most = max(most, steps)
    return torch.cat(decoded, 1), most


def tile_by_tile(weight: Tensor, lower: Tensor, right: Tensor) -> Tensor:
    """The same by the definition: L^T E R of all that is known, in float64."""
    weight, lower, right = weight.double(), lower.double(), right.double()
    error = torch.zeros_like(weight)
    decoded = torch.zeros_like(weight)
    for i in range(weight.shape[0] - 16, -1, -16):
        for j in range(weight.shape[1] - 16, -1, -16):
            place = slice(i, i + 16), slice(j, j + 16)
            target = weight[place] + lower[:, place[0]].T @ error @ right[:, place[1]]
            decoded[place] = torch.round(target / STEP) * STEP
            error[place] = weight[place] - decoded[place]
    return decoded


@pytest.mark.parametrize("columns", [[128], [384], [256, 128], [128, 128, 128]])
@pytest.mark.parametrize("rows", [128, 256])
def test_order_and_feedback_follow_the_definition(rows: int, columns: list[int]) -> None:
    weight = torch.randn(rows, sum(columns))
    lower, right = block_ldl(moments(rows, 1), 0.01), factors(columns, 2)
    got, steps = walk_to_grid(weight, lower, right)
    assert steps == rows // 16 + max(columns) // 16 - 1
    want = tile_by_tile(weight, lower, dense(right))
    # Float32 sums may fall on the other side of a step here and there, and that is fed back.
    white = lower.T @ (weight - got) @ dense(right)
    assert float(white.abs().max()) <= STEP / 2 + 1e-3
    assert float((got.double() != want).float().mean()) < 0.05


def test_without_feedback_down_the_rows() -> None:
    weight, right = torch.randn(128, 256), factors([256], 3)
    got, _ = walk_to_grid(weight, None, right)
    assert float(((weight - got) @ dense(right)).abs().max()) <= STEP / 2 + 1e-3


def test_columns_that_do_not_matter_to_each_other_change_nothing() -> None:
    weight, lower = torch.randn(256, 256) * 1.2, block_ldl(moments(256, 4), 0.01)
    one = ldlq([Problem(weight, lower)], bits=2, codebook=Codebook.MUL1)[0]
    apart = [(slice(i, i + 128), torch.eye(128)) for i in (0, 128)]
    both = ldlq([Problem(weight, lower, apart)], bits=2, codebook=Codebook.MUL1)[0]
    assert float((one.w_inner != both.w_inner).float().mean()) < 0.02  # sums in another order


def test_search_aims_at_less_loss() -> None:
    weight, inputs, outputs = torch.randn(256, 256) * 1.2, moments(256, 5), moments(256, 6)
    lower, right = block_ldl(inputs, 0.01), block_ldl(outputs, 0.01)

    def loss(*factors_: object) -> float:
        (encoded,) = ldlq([Problem(weight, *factors_)], bits=3, codebook=Codebook.MUL1)  # type: ignore[arg-type]
        error = weight - encoded.w_inner
        return float((error.T @ inputs @ error @ outputs).trace())

    assert loss(lower, [(slice(0, 256), right)]) < 0.8 * loss(lower)


def test_problems_of_both_kinds_share_calls_and_keep_their_results() -> None:
    lower, right = block_ldl(moments(128, 7), 0.01), factors([256], 8)
    one = Problem(torch.randn(128, 128), lower)
    two = Problem(torch.randn(128, 256), lower, right)
    parts = factors([128, 128], 9)
    others = [
        Problem(torch.randn(128, 256), block_ldl(moments(128, i), 0.01), r)
        for i, r in enumerate((right, parts, parts))
    ]
    problems = [one, two, *others, Problem(torch.randn(128, 256), None, right)]
    apart = [ldlq([p], bits=4, codebook=Codebook.MUL1)[0] for p in problems]
    together = ldlq(problems, bits=4, codebook=Codebook.MUL1)
    for a, b in zip(apart, together, strict=True):
        assert torch.equal(a.trellis, b.trellis) and torch.equal(a.w_inner, b.w_inner)


def test_tiles_of_a_walk_are_in_stored_order() -> None:
    weight = torch.arange(128 * 128, dtype=torch.float32).reshape(128, 128)
    walk = TwoSidedWalk([weight], None, [torch.eye(128)], 4)
    first = walk.target_tiles()
    assert torch.equal(first, to_tiles(weight[-16:, -16:]))
    walk.take(torch.zeros(1, 64, dtype=torch.int16), first)
    assert torch.equal(walk.decoded(0)[-16:, -16:], from_tiles(first, 1))
    assert len(walk.target_tiles()) == 2


@pytest.mark.parametrize(("size", "columns"), [(128, 128), (100, 128), (576, 640), (64, 128)])
def test_padding_of_one_block(size: int, columns: int) -> None:
    blocks = moments(size, 9)[None]
    padded = OutputHessian(blocks).padded(columns)
    assert padded.blocks.shape == (1, columns, columns)
    assert torch.equal(padded.blocks[:, :size, :size], blocks)
    assert float(padded.blocks.sum() - blocks.sum()) == pytest.approx(0, abs=1e-2)


def test_many_blocks_are_cut_at_the_last_column() -> None:
    outputs = OutputHessian(torch.stack([moments(256, 10 + i) for i in range(3)])).padded(640)
    whole = torch.block_diag(*outputs.blocks)[:640, :640]
    x = torch.randn(5, 640)
    torch.testing.assert_close(outputs.right_multiply(x), x @ whole)
    assert [cut for cut, _ in outputs.pieces(640)] == [
        slice(0, 256),
        slice(256, 512),
        slice(512, 640),
    ]
    damped = outputs.damped(0.1)
    assert float(damped.blocks.diagonal(dim1=1, dim2=2).mean()) == pytest.approx(1.1, rel=1e-4)


@pytest.mark.parametrize("blocks", [1, 2])
def test_refitted_scales_leave_no_slope(blocks: int) -> None:
    """At the minimum over svh the gradient vanishes, and a round loses nothing."""
    size = 256 // blocks
    outputs = OutputHessian(torch.stack([moments(size, 20 + i) for i in range(blocks)]))
    hessian = moments(128, 30)
    weight = torch.randn(128, 256)
    core = weight + 0.3 * torch.randn(128, 256)
    suh, svh = torch.rand(128) + 0.5, torch.rand(256) + 0.5
    svh[7] = 0

    def loss(u: Tensor, v: Tensor) -> Tensor:
        error = weight - u[:, None] * core * v
        return (error * outputs.right_multiply(hessian @ error)).sum()

    new_suh, new_svh = refit_scales(weight, core, suh, svh, hessian=hessian, output=outputs)
    assert float(loss(new_suh, new_svh)) < float(loss(suh, svh))
    assert float(new_svh[7]) == 0
    at = new_svh.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(loss(new_suh, at), at)
    start = svh.clone().requires_grad_(True)
    (steep,) = torch.autograd.grad(loss(suh, start), start)
    slope[7] = 0
    assert float(slope.norm()) < 0.02 * float(steep.norm())


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_loses_less_where_the_loss_minds(count: int) -> None:
    """Odd sizes: rows and columns are padded; signs and scales turn the Hessians."""
    rows, columns = 200, 300
    size = columns if count == 1 else 256
    outputs = OutputHessian(torch.stack([moments(size, 40 + i) for i in range(count)]))
    weight = torch.randn(rows, columns) * 0.02
    inputs = moments(rows, 50)

    def loss(output: OutputHessian | None) -> float:
        group = InputGroup([LinearJob("a", weight, 4, None, output)], Hessian(inputs, 1000), "a")
        (result,) = quantize_groups([group], QuantizeOptions())
        error = torch.zeros(rows, 384)
        error[:, :columns] = weight - result.weight
        return float((error * outputs.padded(384).right_multiply(inputs @ error)).sum())

    assert loss(outputs) < 0.85 * loss(None)


@pytest.mark.cuda
def test_a_search_on_a_device_waits_once(device: torch.device) -> None:
    """Steps are queued one after another; the CPU's bytes, but for sums in another order."""
    lower, right = block_ldl(moments(256, 60), 0.01), factors([256, 128], 61)
    weight = torch.randn(256, 384)
    problems = [Problem(weight, lower, right), Problem(weight, lower)]
    want = ldlq(problems, bits=4, codebook=Codebook.MUL1)
    there = [
        Problem(
            p.weight.to(device),
            lower.to(device),
            None if p.right is None else [(cut, block.to(device)) for cut, block in right],
        )
        for p in problems
    ]
    ldlq(there, bits=4, codebook=Codebook.MUL1)  # tables go to the device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            got = ldlq(there, bits=4, codebook=Codebook.MUL1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = sum("called a synchronizing" in str(w.message) for w in caught)
    assert waits <= 1, [str(w.message) for w in caught]
    for a, b, p in zip(got, want, problems, strict=True):
        losses = []
        for result in (a.w_inner.cpu(), b.w_inner):
            white = lower.T @ (weight - result)
            losses.append(
                float((white if p.right is None else white @ dense(right)).square().sum())
            )
        assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_what_is_not_finite_is_refused() -> None:
    weight, right = torch.randn(128, 128), factors([128], 8)
    weight[3, 100] = torch.nan
    with pytest.raises(ArithmeticError, match="NaN or infinite"):
        ldlq([Problem(weight, None, right)], bits=4, codebook=Codebook.MUL1)
