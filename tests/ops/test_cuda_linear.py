"""The fused linear layer on a CUDA device against exact weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from linear_cases import GROUPS, ROWS, random_weight
from safetensors.torch import load_file
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.linear import (
    ACTIVATIONS,
    LinearWeight,
    Norm,
    linear,
    linear_add_,
    linear_reference,
)
from exl3.ops.trellis import prepare_trellis

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "linear.safetensors"
# Relative error of a row: float16 in and out, and `mul1` weights without their last rounding.
LIMIT = 1.5e-3
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(got: Tensor, want: Tensor, limit: float = LIMIT) -> None:
    """Error of each row relative to the row's size."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    if got.dtype == torch.bfloat16:
        limit = max(limit, 4e-3)
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.numel() == 0 or error.max() <= limit, f"{error.max():.2e} > {limit:.2e}"


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_golden(codebook: Codebook, bits: int) -> None:
    golden = {key: value.cuda() for key, value in load_file(GOLDEN).items()}
    trellis, suh, svh, y = (
        golden[f"{codebook.label}.{bits}.{name}"] for name in ("trellis", "suh", "svh", "y")
    )
    weight = LinearWeight(prepare_trellis(trellis), suh, svh, None, codebook, 256, 384)
    check(linear(golden["x"].half(), [weight]), y.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_rate_and_codebook(bits: int, codebook: Codebook, dtype: torch.dtype) -> None:
    weight = random_weight(384, 256, bits, codebook, seed=bits, device="cuda")
    x = randn(19, 384, dtype=dtype)
    want = linear_reference(x, [weight])
    for m in (1, 2, 5, 9, 19):
        got = linear(x[:m], [weight])
        assert got.dtype == dtype
        check(got, want[:m])
        assert torch.equal(linear(x[:m], [weight]), got)


@pytest.mark.parametrize("bits", [4, 6])
def test_every_row_count(bits: int) -> None:
    weight = random_weight(384, 128, bits, device="cuda")
    x = randn(512, 384)
    want = linear_reference(x, [weight])
    for m in (*ROWS, 6, 9, 65, 127, 128, 129, 512):
        check(linear(x[:m], [weight]), want[:m])


@pytest.mark.parametrize(
    ("k", "sizes"), [*GROUPS, (640, (384,)), (4096, (1024, 128)), (14336, (640,))]
)
@pytest.mark.parametrize("m", [1, 3, 8, 17, 40, 100])
def test_groups_and_padding(k: int, sizes: tuple[int, ...], m: int) -> None:
    weights = [
        random_weight(k, n, 4, bias=i != 1, seed=i, device="cuda") for i, n in enumerate(sizes)
    ]
    norm = Norm(torch.rand(k, device="cuda") + 0.5, 1e-5)
    x = randn(m, k) * 3
    want = linear_reference(x, weights, norm=norm)
    check(linear(x, weights, norm=norm), want)
    mixed = [
        random_weight(k, n, 3 + i, Codebook(i), seed=i, device="cuda") for i, n in enumerate(sizes)
    ]
    norm = dataclasses.replace(norm, weight_offset=1.0)
    want = linear_reference(x, mixed, norm=norm)
    check(linear(x, mixed, norm=norm), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 4, 9, 40])
def test_gated_activation(activation: str, m: int) -> None:
    weights = [random_weight(576, 320, 5, bias=True, seed=i, device="cuda") for i in range(2)]
    norm = Norm(torch.rand(576, device="cuda") + 0.5, 1e-6)
    x = randn(m, 576)
    want = linear_reference(x, weights, norm=norm, activation=activation)
    check(linear(x, weights, norm=norm, activation=activation), want)
    weights[1] = random_weight(576, 320, 3, Codebook.MCG, bias=True, device="cuda")
    residual = randn(m, 320)
    want = linear_reference(x, weights, activation=activation, residual=residual)
    check(linear(x, weights, activation=activation, residual=residual), want)


@pytest.mark.parametrize("m", [1, 2, 8, 16])
def test_wide_head(m: int) -> None:
    weight = random_weight(512, 128256, 6, device="cuda")
    x = randn(m, 512)
    columns = slice(128000, None)
    tail = linear(x, [weight])[:, columns]
    check(tail, linear_reference(x, [weight])[:, columns])


@pytest.mark.parametrize("m", [1, 4, 18, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_residual_and_poison(m: int, dtype: torch.dtype) -> None:
    """Strided rows; NaN beside, before and after everything that is read; guards stay."""
    k, n = 192, 200
    weight = random_weight(k, n, 4, bias=True, device="cuda")
    nan = float("nan")
    wide = torch.full((m + 2, k + 97), nan, device="cuda", dtype=dtype)
    x = wide[1 : m + 1, 33 : 33 + k]
    x.copy_(randn(m, k))
    out = torch.full((m + 2, n + 41), nan, device="cuda", dtype=torch.float32)
    residual = out[1 : m + 1, 9 : 9 + n]
    residual.copy_(randn(m, n))
    want = linear_reference(x, [weight], residual=residual)
    check(linear(x, [weight], residual=residual), want)
    assert linear_add_(residual, x, [weight]) is residual
    check(residual.clone(), want)
    guards = torch.ones_like(out, dtype=torch.bool)
    guards[1 : m + 1, 9 : 9 + n] = False
    assert out[guards].isnan().all()


@pytest.mark.parametrize("m", [3, 40])
def test_in_place_on_the_input(m: int) -> None:
    weight = random_weight(256, 256, 4, device="cuda")
    x = randn(m, 256)
    want = linear_reference(x, [weight], residual=x)
    check(linear_add_(x, x, [weight]), want)


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_inputs_show(value: float, m: int) -> None:
    """They reach every output of their row and none of another; no quiet garbage."""
    for codebook in (Codebook.MUL1, Codebook.MCG):
        weight = random_weight(256, 256, 4, codebook, device="cuda")
        x = randn(m, 256)
        clean = linear(x, [weight])
        x[1, 200] = value
        got = linear(x, [weight])
        assert not got[1].isfinite().any()
        assert torch.equal(got[::2], clean[::2])


def test_zeros_and_large() -> None:
    weight = random_weight(256, 128, 4, device="cuda")
    for m in (2, 20):
        zeros = torch.zeros(m, 256, device="cuda", dtype=torch.float16)
        assert torch.equal(linear(zeros, [weight]), zeros[:, :128])
        x = torch.full((m, 256), 1e15, device="cuda")
        check(linear(x, [weight]), linear_reference(x, [weight]))


@pytest.mark.parametrize("m", [1, 5, 16, 40])
def test_graph_capture(m: int) -> None:
    weights = [random_weight(256, 128, 4, seed=i, device="cuda") for i in range(2)]
    norm = Norm(torch.rand(256, device="cuda") + 0.5, 1e-5)
    x, residual = randn(m, 256), randn(m, 128)

    def step() -> Tensor:
        h = linear(x, weights, norm=norm, activation="silu")
        return linear(h.repeat(1, 2), [weights[0]], residual=residual)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(randn(m, 256) * 2)
    residual.copy_(randn(m, 128) + 1)
    graph.replay()
    assert torch.equal(y, step())


def test_bad_arguments_are_named() -> None:
    weight = random_weight(256, 128, 4, device="cuda")
    with pytest.raises(RuntimeError, match=r"linear: x.size\(1\) is 64, expected 129..256"):
        linear(randn(1, 64), [weight])
    with pytest.raises(RuntimeError, match="planes and x are on different"):
        linear(randn(1, 256), [random_weight(256, 128, 4)])
    with pytest.raises(RuntimeError, match=r"residual.size\(1\) is 64"):
        linear_add_(randn(1, 64), randn(1, 256), [weight])


def test_opcheck() -> None:
    weight = random_weight(256, 128, 4, device="cuda")
    lists = ([weight.planes], [weight.suh], [weight.svh], [None], [int(weight.codebook)], [128])
    args = (randn(2, 256), *lists, None, 0.0, 0.0, -1)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.exl3.linear.default, (*args, None), test_utils=tests)
    torch.library.opcheck(
        torch.ops.exl3.linear_add_.default, (randn(2, 128), *args), test_utils=tests
    )
