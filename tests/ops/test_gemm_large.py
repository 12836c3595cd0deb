"""gemm_large against float64, at every instruction level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl3.ops.codebook import Codebook
from exl3.ops.gemm_large import gemm_large, gemm_large_reference, inner_weight
from exl3.ops.graph import record
from exl3.ops.registry import ops
from exl3.ops.trellis import prepare_trellis
from exl3.settings import ISA_LEVELS

ROWS = (0, 1, 2, 15, 16, 17, 31, 33, 64, 512)


def random_planes(k: int, n: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(bits)
    shape = (k // 16, n // 16, 16 * bits)
    return prepare_trellis(
        torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=generator)
    )


def check(x: Tensor, planes: Tensor, codebook: Codebook) -> None:
    """No element is off by more than twice what torch loses in the same arithmetic: bfloat16 at the
    AMX level, float32 elsewhere, where vector levels leave out a weight's rounding to float16."""
    got = gemm_large(x, planes, codebook)
    want = gemm_large_reference(x, planes, codebook)
    assert got.shape == want.shape and got.dtype == torch.float32
    assert got.isfinite().all()
    if not want.numel():
        return
    level = ISA_LEVELS[ops().cpu_isa(False)]
    weight = inner_weight(planes, codebook).float()
    if level == "amx":
        lost = x.bfloat16().double() @ weight.bfloat16().double() - want
    elif level != "generic":
        lost = x.double() @ (weight * (torch.rand_like(weight) * 2 - 1) * 2.0**-11).double()
    else:
        lost = (x @ weight).double() - want
    error = (got - want).abs()
    worst = divmod(int(error.argmax()), want.shape[1])
    assert error.max() <= 2 * lost.abs().max() + 1e-4, (
        f"element {worst}: {got[worst]} for {want[worst]}"
    )


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_and_codebooks(isa: str, bits: int, codebook: Codebook) -> None:
    planes = random_planes(256, 128, bits)
    check(torch.randn(33, 256), planes, codebook)


@pytest.mark.parametrize("m", ROWS)
def test_rows(isa: str, m: int) -> None:
    planes = random_planes(384, 256, 4)
    check(torch.randn(m, 384), planes, Codebook.MUL1)


@pytest.mark.parametrize(
    ("k", "n"), [(640, 640), (640, 1536), (1536, 640), (1152, 128), (4096, 128)]
)
def test_shapes(isa: str, k: int, n: int) -> None:
    check(torch.randn(17, k), random_planes(k, n, 3), Codebook.MUL1)


def test_empty(isa: str) -> None:
    planes = torch.zeros(8, 0, 64, dtype=torch.int16)
    assert torch.equal(gemm_large(torch.zeros(3, 0), planes, Codebook.MUL1), torch.zeros(3, 128))
    none = torch.zeros(0, 8, 64, dtype=torch.int16)
    assert gemm_large(torch.zeros(3, 128), none, Codebook.MUL1).shape == (3, 0)


def test_strided_rows_and_guard(isa: str) -> None:
    planes = random_planes(256, 128, 5)
    wide = torch.full((19, 300), float("nan"))
    wide[:, :256] = torch.randn(19, 256)
    check(wide[:, :256], planes, Codebook.MUL1)
    check(torch.randn(1, 256).expand(18, 256), planes, Codebook.MCG)


def test_deterministic_for_any_thread_count(isa: str) -> None:
    planes, x = random_planes(256, 128, 4), torch.randn(300, 256)
    level, threads = ops().cpu_isa(False), ops().cpu_threads()
    want = gemm_large(x, planes, Codebook.MUL1)
    try:
        for count in (1, 2, 5, 16):  # 16: rows are split too
            ops().configure_cpu(count, level)
            assert torch.equal(gemm_large(x, planes, Codebook.MUL1), want)
    finally:
        ops().configure_cpu(threads, level)


def test_rows_do_not_depend_on_each_other(isa: str) -> None:
    planes, x = random_planes(256, 128, 4), torch.randn(40, 256)
    want = gemm_large(x, planes, Codebook.MUL1)
    x[7] = float("nan")
    got = gemm_large(x, planes, Codebook.MUL1)
    assert got[7].isnan().all()
    keep = torch.arange(40) != 7
    assert torch.equal(got[keep], want[keep])


def test_replay(isa: str) -> None:
    planes, x = random_planes(128, 128, 4), torch.randn(20, 128)
    graph = record(lambda: gemm_large(x, planes, Codebook.MUL1))
    x.copy_(torch.randn(20, 128))
    assert torch.equal(graph.replay(), gemm_large(x, planes, Codebook.MUL1))


def test_bad_arguments_are_named() -> None:
    planes = random_planes(256, 128, 4)
    with pytest.raises(RuntimeError, match=r"gemm_large: x.size\(1\) is 128, expected 256"):
        gemm_large(torch.randn(2, 128), planes, Codebook.MUL1)
    with pytest.raises(RuntimeError, match=r"x.stride\(1\) is 2, expected 1"):
        gemm_large(torch.randn(256, 2).T, planes, Codebook.MUL1)
    with pytest.raises(RuntimeError, match="n is 64, expected a multiple of 128"):
        gemm_large(torch.randn(2, 256), planes[:4].contiguous(), Codebook.MUL1)


def test_opcheck() -> None:
    planes = random_planes(256, 128, 4)
    torch.library.opcheck(torch.ops.exl3.gemm_large.default, (torch.randn(3, 256), planes, 2))
