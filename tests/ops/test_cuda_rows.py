"""Norm, activation, embedding and argmax on CUDA: the case lists of the CPU tests."""

from __future__ import annotations

import pytest
import torch

from exl3.ops.activation import ACTIVATIONS, gated_activation, gated_activation_reference
from exl3.ops.embedding import embedding, embedding_reference
from exl3.ops.norm import rms_norm, rms_norm_reference
from exl3.ops.sampling import argmax, argmax_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_torch_thread")]

SHAPES = [(0, 576), (1, 1), (1, 576), (3, 15), (5, 17), (16, 4096), (2, 3, 1152)]
DTYPES = [torch.float16, torch.float32]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    half = dtype == torch.float16
    return {"rtol": 1e-3, "atol": 1e-4} if half else {"rtol": 2e-6, "atol": 3e-6}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(
    device: torch.device, shape: tuple[int, ...], weighted: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]) if weighted else None
    on = None if weight is None else weight.to(device)
    for offset in (0.0, 1.0):
        got = rms_norm(x.to(device), on, 1e-5, weight_offset=offset)
        want = rms_norm_reference(x, weight, 1e-5, weight_offset=offset)
        torch.testing.assert_close(got.cpu(), want, **tolerance(dtype))


def test_norm_of_strided_rows(device: torch.device) -> None:
    x = torch.full((4, 97), torch.nan)
    x[:, 17:81] = torch.randn(4, 64)
    want = rms_norm_reference(x[:, 17:81], torch.ones(64), 1e-6)
    got = rms_norm(x.to(device)[:, 17:81], torch.ones(64, device=device), 1e-6)
    torch.testing.assert_close(got.cpu(), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n"), [(0, 16), (1, 1536), (3, 17), (16, 1), (17, 1003)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(device: torch.device, kind: str, m: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(m, 2 * n) * 4).to(dtype)
    got = gated_activation(x.to(device), kind)
    torch.testing.assert_close(got.cpu(), gated_activation_reference(x, kind), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "dim"), [(0, 64), (1, 576), (7, 33), (130, 512)])
def test_embedding(device: torch.device, dtype: torch.dtype, m: int, dim: int) -> None:
    torch.manual_seed(0)
    table = (torch.randn(50, dim) * 10).to(dtype)
    ids = torch.randint(0, 50, (m,))
    for scale in (1.0, 24.0):
        got = embedding(ids.to(device), table.to(device), scale=scale)
        want = embedding_reference(ids, table, scale=scale)
        assert torch.equal(got.cpu(), want if dtype == torch.float32 else want.half())


def test_id_outside_the_table_gives_nan(device: torch.device) -> None:
    ids = torch.tensor([1, -1, 8, 1 << 40, 7], device=device)
    got = embedding(ids, torch.randn(8, 16, device=device))
    assert got.isnan().all(1).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(device: torch.device, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    x = torch.randn(5, columns + 3)
    x[1] = x[1].round()  # ties
    x[2, ::2] = torch.nan
    x[3] = -torch.inf
    x[4] = torch.nan
    x[:, columns:] = 6e4
    x = x.to(dtype)
    assert torch.equal(argmax(x.to(device), columns).cpu(), argmax_reference(x, columns))
