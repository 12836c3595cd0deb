"""The fused linear layer against exact weights, at every instruction level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from linear_cases import GROUPS, ROWS, random_weight
from safetensors.torch import load_file
from torch import Tensor

from exl3.errors import ConfigError
from exl3.ops.activation import gated_activation
from exl3.ops.codebook import Codebook
from exl3.ops.graph import record
from exl3.ops.linear import (
    ACTIVATIONS,
    LinearWeight,
    Norm,
    consolidate,
    linear,
    linear_add_,
    linear_reference,
)
from exl3.ops.norm import rms_norm
from exl3.ops.registry import ops
from exl3.ops.trellis import prepare_trellis

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "linear.safetensors"


def tolerance(bits: int, codebook: Codebook) -> float:
    """Relative error of the output that rounding the activations may cause (linear_select.cpp:
    steps of peak / q_max; 3.5 is a generous peak of 128 values). 5e-4: weights are not rounded to
    float16."""
    q_max = ops().linear_select(ops().cpu_isa(False), codebook, bits, 1)[1]
    return 1.3 * 3.5 / q_max / 12**0.5 + 5e-4


def check(got: Tensor, want: Tensor, limit: float) -> None:
    """Error of each row relative to the row's size."""
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.numel() == 0 or error.max() <= limit, f"{error.max():.2e} > {limit:.2e}"


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_golden(isa: str, codebook: Codebook, bits: int) -> None:
    golden = load_file(GOLDEN)
    trellis, suh, svh, y = (
        golden[f"{codebook.label}.{bits}.{name}"] for name in ("trellis", "suh", "svh", "y")
    )
    weight = LinearWeight(prepare_trellis(trellis), suh, svh, None, codebook, 256, 384)
    check(linear(golden["x"].float(), [weight]), y.double(), tolerance(bits, codebook))


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_rate_and_codebook(isa: str, bits: int, codebook: Codebook) -> None:
    weight = random_weight(256, 256, bits, codebook, seed=bits)
    x = torch.randn(19, 256)
    want = linear_reference(x, [weight])
    for m in (1, 2, 5, 16, 19):
        check(linear(x[:m], [weight]), want[:m], tolerance(bits, codebook))


@pytest.mark.parametrize("bits", [4, 6])
def test_every_row_count(isa: str, bits: int) -> None:
    weight = random_weight(384, 128, bits)
    x = torch.randn(max(ROWS), 384)
    want = linear_reference(x, [weight])
    for m in ROWS:
        check(linear(x[:m], [weight]), want[:m], tolerance(bits, weight.codebook))


@pytest.mark.parametrize(("k", "sizes"), GROUPS)
@pytest.mark.parametrize("m", [1, 3, 17])
def test_groups_and_padding(isa: str, k: int, sizes: tuple[int, ...], m: int) -> None:
    weights = [random_weight(k, n, 4, bias=i != 1, seed=i) for i, n in enumerate(sizes)]
    norm = Norm(torch.rand(k) + 0.5, 1e-5)
    x = torch.randn(m, k) * 3
    want = linear_reference(x, weights, norm=norm)
    check(linear(x, weights, norm=norm), want, tolerance(4, Codebook.MUL1))
    mixed = [random_weight(k, n, 3 + i, Codebook(i), seed=i) for i, n in enumerate(sizes)]
    want = linear_reference(x, mixed, norm=Norm(norm.weight, 1e-5, 1.0))
    check(linear(x, mixed, norm=Norm(norm.weight, 1e-5, 1.0)), want, 0.02)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 9])
def test_gated_activation(isa: str, activation: str, m: int) -> None:
    weights = [random_weight(576, 320, 5, bias=True, seed=i) for i in range(2)]
    norm = Norm(torch.rand(576) + 0.5, 1e-6)
    x = torch.randn(m, 576)
    want = linear_reference(x, weights, norm=norm, activation=activation)
    check(linear(x, weights, norm=norm, activation=activation), want, 3e-3)
    residual = torch.randn(m, 320)
    want = linear_reference(x, weights, activation=activation, residual=residual)
    check(linear(x, weights, activation=activation, residual=residual), want, 3e-3)


def test_activation_at_extremes(isa: str) -> None:
    """Large gates of both signs: no overflow, the limits are exact."""
    weights = [random_weight(128, 128, 8, seed=i) for i in range(2)]
    x = torch.randn(1, 128) * 1e4
    for activation in ACTIVATIONS:
        want = linear_reference(x, weights, activation=activation)
        check(linear(x, weights, activation=activation), want, 3e-3)


@pytest.mark.parametrize("m", [1, 4, 18])
def test_strides_residual_and_poison(isa: str, m: int) -> None:
    """Strided rows; NaN beside, before and after everything that is read; guards stay."""
    k, n = 192, 200
    weight = random_weight(k, n, 4, bias=True)
    nan = float("nan")
    wide = torch.full((m + 2, k + 96), nan)
    x = wide[1 : m + 1, 32 : 32 + k]
    x.copy_(torch.randn(m, k))
    out = torch.full((m + 2, n + 40), nan)
    residual = out[1 : m + 1, 8 : 8 + n]
    residual.copy_(torch.randn(m, n))
    want = linear_reference(x, [weight], residual=residual)
    check(linear(x, [weight], residual=residual), want, 0.01)
    assert linear_add_(residual, x, [weight]) is residual
    check(residual.clone(), want, 0.01)
    guards = torch.ones_like(out, dtype=torch.bool)
    guards[1 : m + 1, 8 : 8 + n] = False
    assert out[guards].isnan().all()


def test_in_place_on_the_input(isa: str) -> None:
    weight = random_weight(256, 256, 4)
    x = torch.randn(3, 256)
    want = linear_reference(x, [weight], residual=x)
    check(linear_add_(x, x, [weight]), want, 0.01)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_do_not_depend_on_company(isa: str, bits: int, codebook: Codebook) -> None:
    """Batched = single and chunked = whole, to the bit: every kernel sums the same integers."""
    weights = [random_weight(320, n, bits, codebook, bias=n == 200, seed=n) for n in (256, 200)]
    norm = Norm(torch.rand(320) + 0.5, 1e-5)
    x = torch.randn(40, 320)
    x[3] *= 1e4
    x[5, 100] = float("inf")
    alone = torch.cat([linear(x[i : i + 1], weights, norm=norm) for i in range(40)])
    for m in (2, 4, 5, 8, 15, 16, 17, 31, 32, 33, 40):
        got = linear(x[:m], weights, norm=norm)
        torch.testing.assert_close(got, alone[:m], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [4, 6])
def test_rows_do_not_depend_on_many(isa: str, bits: int) -> None:
    """The same for inputs of several panels (amx/linear_many.cpp) and a gated pair."""
    weights = [random_weight(1664, 256, bits, seed=n) for n in range(2)]
    x, residual = torch.randn(200, 1664), torch.randn(200, 256)
    whole = linear(x, weights, activation="silu", residual=residual)
    for first, last in ((0, 1), (199, 200), (10, 26), (3, 20), (60, 188)):
        rows = slice(first, last)
        got = linear(x[rows], weights, activation="silu", residual=residual[rows])
        assert torch.equal(got, whole[rows])


@pytest.mark.parametrize("m", [1, 2, 5, 16, 17, 512])
@pytest.mark.parametrize("bits", [1, 4, 5, 8])
def test_selection(bits: int, m: int) -> None:
    """Finer activations from 5 bits on, whatever m and level."""
    for level in range(4):
        assert ops().linear_select(level, Codebook.MUL1, bits, m)[1] == (
            127 if bits <= 4 else 32512
        )
        assert ops().linear_select(level, Codebook.MCG, bits, m)[1] == 511


def test_many_rows_in_parts(isa: str) -> None:
    """More rows than one part has (linear_plan.h), with all that an epilogue does."""
    weights = [random_weight(128, 128, 4, bias=True, seed=i) for i in range(2)]
    x, residual = torch.randn(1041, 128), torch.randn(1041, 128)
    norm = Norm(torch.rand(128) + 0.5, 1e-5)
    want = linear_reference(x, weights, norm=norm, activation="silu", residual=residual)
    check(linear(x, weights, norm=norm, activation="silu", residual=residual), want, 0.02)


def test_threads_and_runs_do_not_matter(isa: str) -> None:
    weights = [random_weight(640, 1536, 4, seed=i) for i in range(2)]
    x = torch.randn(2, 640)
    level, threads = ops().cpu_isa(False), ops().cpu_threads()
    want = linear(x, weights, activation="silu")
    try:
        for count in (1, 2, 3, 7):
            ops().configure_cpu(count, level)
            for _ in range(3):
                assert torch.equal(linear(x, weights, activation="silu"), want)
    finally:
        ops().configure_cpu(threads, level)


def test_levels_agree() -> None:
    """Every level sums the same integers; only a norm's sum may round differently."""
    highest, threads = ops().cpu_isa(True), ops().cpu_threads()
    cases = [(bits, codebook) for bits in (1, 4, 5, 7) for codebook in Codebook]
    x = torch.randn(5, 256)
    try:
        for bits, codebook in cases:
            weight = random_weight(256, 128, bits, codebook, seed=3)
            results = []
            for level in range(highest + 1):
                ops().configure_cpu(threads, level)
                results.append(linear(x, [weight]))
            for other in results[1:]:
                torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-6)
    finally:
        ops().configure_cpu(threads, highest)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_inputs_show(isa: str, value: float) -> None:
    """They reach every output of their row and none of another; no quiet garbage."""
    weight = random_weight(256, 256, 4)
    x = torch.randn(3, 256)
    clean = linear(x, [weight])
    x[1, 200] = value
    got = linear(x, [weight])
    assert not got[1].isfinite().any()
    assert torch.equal(got[::2], clean[::2])


def test_zeros_and_tiny(isa: str) -> None:
    weight = random_weight(256, 128, 4)
    assert torch.equal(linear(torch.zeros(2, 256), [weight]), torch.zeros(2, 128))
    got = linear(torch.full((1, 256), 1e-38), [weight])
    assert got.isfinite().all()
    assert got.abs().max() < 1e-30


def test_replay() -> None:
    weights = [random_weight(256, 128, 4, seed=i) for i in range(2)]
    x, residual = torch.randn(1, 256), torch.zeros(1, 256)
    graph = record(lambda: linear_add_(residual, x, weights))
    assert len(graph) == 1
    x.copy_(torch.randn(1, 256))
    residual.copy_(torch.randn(1, 256))
    want = linear_reference(x, weights, residual=residual)
    check(graph.replay(), want, 0.01)


def test_consolidate() -> None:
    weights = [random_weight(256, n, bits, seed=bits) for n, bits in ((384, 3), (128, 1), (640, 8))]
    moved = consolidate(weights)
    for old, new in zip(weights, moved, strict=True):
        assert torch.equal(old.planes, new.planes)
        assert new.planes.data_ptr() % 64 == moved[0].planes.data_ptr() % 64
    x = torch.randn(2, 256)
    assert torch.equal(linear(x, moved), linear(x, weights))
    assert consolidate([]) == []


def test_bad_arguments_are_named() -> None:
    weight = random_weight(256, 128, 4)
    with pytest.raises(RuntimeError, match=r"linear: x.size\(1\) is 64, expected 129..256"):
        linear(torch.zeros(1, 64), [weight])
    with pytest.raises(RuntimeError, match="x has dtype Half, expected Float"):
        linear(torch.zeros(1, 256).half(), [weight])
    with pytest.raises(RuntimeError, match="needs two weights"):
        linear(torch.zeros(1, 256), [weight], activation="silu")
    with pytest.raises(RuntimeError, match="got 5 weights"):
        linear(torch.zeros(1, 256), [weight] * 5)
    with pytest.raises(RuntimeError, match=r"residual.size\(1\) is 64"):
        linear_add_(torch.zeros(1, 64), torch.zeros(1, 256), [weight])
    with pytest.raises(ConfigError, match="expected one of silu"):
        linear(torch.zeros(1, 256), [weight, weight], activation="tanh")


def test_opcheck() -> None:
    weight = random_weight(256, 128, 4)
    lists = ([weight.planes], [weight.suh], [weight.svh], [None], [int(weight.codebook)], [128])
    x = torch.randn(2, 256)
    tests = ("test_schema", "test_faketensor")
    args = (x, *lists, None, 0.0, 0.0, -1)
    torch.library.opcheck(torch.ops.exl3.linear.default, (*args, None), test_utils=tests)
    torch.library.opcheck(
        torch.ops.exl3.linear_add_.default, (torch.zeros(2, 128), *args), test_utils=tests
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_equals_steps(isa: str, activation: str) -> None:
    """Norm, activation and residual inside the launch or after it, to the bit: a batch takes the
    steps where one of its rows has an adapter."""
    weights = [random_weight(584, 320, 4, bias=True, seed=i) for i in range(2)]
    norm = Norm(torch.rand(584) + 0.5, 1e-5)
    x, residual = torch.randn(7, 584), torch.randn(7, 320)
    fused = linear(x, weights, norm=norm, activation=activation, residual=residual)
    both = linear(rms_norm(x, norm.weight, norm.eps), weights)
    assert torch.equal(gated_activation(both, activation) + residual, fused)
