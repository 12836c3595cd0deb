"""Quantising whole layers: size of the error, stored form, and the inputs that are not usual."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exl3.errors import ConfigError
from exl3.ops.codebook import Codebook
from exl3.ops.trellis import reconstruct
from exl3.quant import (
    Hessian,
    HessianAccumulator,
    InputGroup,
    LinearJob,
    QuantizedLinear,
    QuantizeOptions,
    quantize_group,
    quantize_groups,
)
from exl3.quant.packing import stored_tensors
from exl3.quant.regularize import assemble, random_signs, regularize


def random_weight(k: int, n: int, *, seed: int = 0, spread: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(k, n, generator=generator)
    rows = torch.rand(k, generator=generator).mul(spread).exp()
    columns = torch.rand(n, generator=generator).mul(spread).exp()
    return rows[:, None] * weight * columns


def inputs(k: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(k) + 0.2 * torch.randn(k, k, generator=generator) / k**0.5
    mix[:, : k // 16] *= 4
    return torch.randn(4 * k, k, generator=generator) @ mix


def hessian_of(x: Tensor) -> Hessian:
    accumulator = HessianAccumulator(x.shape[1])
    accumulator.add(x)
    return accumulator.finish()


UNUSED = Hessian(torch.zeros(192, 192), 0)


def quantize(
    *jobs: LinearJob, hessian: Hessian, options: QuantizeOptions | None = None
) -> Sequence[QuantizedLinear]:
    return quantize_group(jobs, hessian, options or QuantizeOptions(), share_key="m.in")


def test_groups_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(9)
    groups = []
    for name, k, bits in (("a", 192, (2, 3)), ("b", 256, (3,)), ("c", 192, (2,))):
        jobs = [
            LinearJob(f"{name}.{i}", torch.randn(k, 128, generator=generator), b)
            for i, b in enumerate(bits)
        ]
        groups.append(InputGroup(jobs, UNUSED if name == "c" else hessian_of(inputs(k)), name))
    assert [group.tiles() for group in groups] == [16, 8, 8]
    together = quantize_groups(groups, QuantizeOptions())
    alone = [r for group in groups for r in quantize_groups([group], QuantizeOptions())]
    assert [r.report for r in together] == [r.report for r in alone]
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.tensors.trellis, b.tensors.trellis)
        assert torch.equal(a.weight, b.weight)
    assert bool(together[-1].report.note) and not together[0].report.note


def test_hessian_in_batches() -> None:
    x = inputs(300)
    accumulator = HessianAccumulator(300)
    for part in x.split(70):
        accumulator.add(part)
    result = accumulator.finish()
    exact = (x.double().T @ x.double() / len(x)).float()
    assert result.count == len(x)
    assert torch.equal(result.matrix, result.matrix.T)
    torch.testing.assert_close(result.matrix, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_scales", [True, False])
def test_regularised_weight_comes_back(out_scales: bool) -> None:
    weight = random_weight(256, 384, spread=2.0)
    weight[200:] = 0
    weight[:, 300:] = 0
    signs = [random_signs(name, seed=0, size=size) for name, size in (("a", 256), ("b", 384))]
    parts = regularize(weight, *signs, out_scales=out_scales)
    back = assemble(parts.inner, parts.suh, parts.svh)
    torch.testing.assert_close(back, weight, rtol=1e-4, atol=1e-6)
    assert not parts.suh[200:].any() and not parts.svh[300:].any()
    spread = parts.inner.reshape(2, 128, 3, 128).square().mean((1, 3)).sqrt()
    assert float(spread.max() / spread.min()) < 1.3  # every block fills the codebook alike


def test_signs_depend_on_key_and_seed_only() -> None:
    first = random_signs("model.layers.0", seed=0, size=640)
    assert torch.equal(first, random_signs("model.layers.0", seed=0, size=640))
    assert set(first.tolist()) == {1.0, -1.0}
    for other in (
        random_signs("model.layers.1", seed=0, size=640),
        random_signs("model.layers.0", seed=1, size=640),
    ):
        assert 200 < int((first != other).sum()) < 440


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_near_theory(bits: int, codebook: Codebook) -> None:
    """White inputs: the best possible relative error at this rate is 4^-bits."""
    weight = random_weight(256, 128)
    (result,) = quantize(
        LinearJob("m.a", weight, bits),
        hessian=Hessian(torch.eye(256), 1000),
        options=QuantizeOptions(codebook=codebook),
    )
    slack = {1: 1.15, 2: 1.2, 4: 1.4, 8: 20.0}[bits]
    assert 4.0**-bits < result.report.weight_error < slack * 4.0**-bits
    assert abs(result.report.proxy_error / result.report.weight_error - 1) < 1e-3


@pytest.mark.parametrize("shape", [(192, 64), (256, 128)])
def test_stored_tensors_stand_for_the_weight(shape: tuple[int, int]) -> None:
    k, n = shape
    weight = random_weight(k, n, spread=1.0)
    bias = torch.randn(n)
    (result,) = quantize(LinearJob("m.a", weight, 3, bias), hessian=hessian_of(inputs(k)))
    t = result.tensors
    k_padded, n_padded = t.padded_shape
    assert (k_padded, n_padded) == (-(-k // 128) * 128, -(-n // 128) * 128)
    assert t.trellis.shape == (k_padded // 16, n_padded // 16, 48) and t.bits == 3
    full = reconstruct(t.trellis, t.suh, t.svh, t.codebook)
    torch.testing.assert_close(full[:k, :n], result.weight, rtol=1e-4, atol=1e-6)
    assert not full[k:].any() and not full[:, n:].any()
    assert float((result.weight - weight).square().sum() / weight.square().sum()) < 0.05
    names = stored_tensors("m.a", t)
    assert list(names) == ["m.a.suh", "m.a.svh", "m.a.mul1", "m.a.trellis", "m.a.bias"]
    assert [v.dtype for v in names.values()] == [torch.half] * 2 + [
        torch.int32,
        torch.int16,
        torch.half,
    ]
    assert int(names["m.a.mul1"]) & 0xFFFFFFFF == 0x83DCD12D


def test_feedback_scales_and_refit_lower_the_loss() -> None:
    x = inputs(256)
    job = LinearJob("m.a", random_weight(256, 128, spread=1.5), 2)
    plain = quantize(job, hessian=Hessian(torch.eye(256), 1))[0].weight
    losses = {"plain": float((x @ (plain - job.weight)).square().sum())}
    for name, options in {
        "bare": QuantizeOptions(out_scales="never", refit=False),
        "scaled": QuantizeOptions(refit=False),
        "refitted": QuantizeOptions(),
        "auto": QuantizeOptions(out_scales="auto"),
    }.items():
        (result,) = quantize(job, hessian=hessian_of(x), options=options)
        losses[name] = float((x @ (result.weight - job.weight)).square().sum())
        assert result.report.feedback
    assert losses["refitted"] < losses["scaled"] < 0.95 * losses["bare"]
    assert losses["scaled"] < 0.8 * losses["plain"]
    assert losses["auto"] == losses["refitted"]  # unequal columns: `auto` takes the scales


def test_group_equals_layers_alone() -> None:
    hessian = hessian_of(inputs(192))
    jobs = [
        LinearJob(f"m.{i}", random_weight(192, 64 * i, seed=i), b)
        for i, b in [(1, 2), (2, 3), (3, 2)]
    ]
    together = quantize(*jobs, hessian=hessian)
    assert [r.report.key for r in together] == ["m.1", "m.2", "m.3"]
    for job, result in zip(jobs, together, strict=True):
        (alone,) = quantize(job, hessian=hessian)
        for name, tensor in stored_tensors(job.key, alone.tensors).items():
            assert torch.equal(tensor, stored_tensors(job.key, result.tensors)[name])


@pytest.mark.parametrize(
    ("matrix", "count", "words"),
    [
        (torch.zeros(192, 192), 0, "no calibration token"),
        (torch.zeros(192, 192), 10, "vanishes"),
        (torch.full((192, 192), float("nan")), 10, "not finite"),
    ],
)
def test_unusable_hessian_means_plain_rounding(matrix: Tensor, count: int, words: str) -> None:
    job = LinearJob("m.a", random_weight(192, 64), 3)
    (result,) = quantize(job, hessian=Hessian(matrix, count))
    assert not result.report.feedback and words in result.report.note
    assert result.report.proxy_error == result.report.weight_error < 0.03


@pytest.mark.parametrize("hessian", [UNUSED, hessian_of(inputs(192))])
def test_zeros_stay_zeros(hessian: Hessian) -> None:
    nothing = torch.zeros(192, 64)
    holes = random_weight(192, 64)
    holes[3] = 0
    holes[:, 5] = 0
    results = quantize(LinearJob("m.a", nothing, 2), LinearJob("m.b", holes, 2), hessian=hessian)
    assert torch.equal(results[0].weight, nothing)
    assert not results[1].weight[3].any() and not results[1].weight[:, 5].any()
    assert 0 < results[1].report.weight_error < 0.2


def test_inputs_that_never_fire() -> None:
    x = inputs(192)
    x[:, 10:40] = 0
    (result,) = quantize(LinearJob("m.a", random_weight(192, 64), 3), hessian=hessian_of(x))
    assert bool(torch.isfinite(result.weight).all()) and result.report.proxy_error < 0.03


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e4])
def test_any_size_of_weight(size: float) -> None:
    weight = random_weight(192, 64) * (size / 0.02)
    (result,) = quantize(LinearJob("m.a", weight, 4), hessian=hessian_of(inputs(192)))
    assert result.report.weight_error < 0.02
    for scale in (result.tensors.suh, result.tensors.svh):
        assert bool(torch.isfinite(scale).all())


def test_weights_that_cannot_be_stored() -> None:
    bad = random_weight(192, 64)
    bad[7, 9] = float("inf")
    with pytest.raises(ConfigError, match=r"m.a: weight \[9, 7\] is inf"):
        quantize(LinearJob("m.a", bad, 4), hessian=UNUSED)
    with pytest.raises(ConfigError, match="does not fit float16"):
        quantize(LinearJob("m.a", torch.full((192, 64), 1e30), 4), hessian=UNUSED)
    with pytest.raises(ConfigError, match="from 1 to 8"):
        LinearJob("m.a", bad, 9)
    with pytest.raises(ConfigError, match="out_scales"):
        QuantizeOptions(out_scales="sometimes")


def test_same_bytes_twice() -> None:
    job = LinearJob("m.a", random_weight(128, 128), 2)
    first, second = (quantize(job, hessian=hessian_of(inputs(128)))[0].tensors for _ in range(2))
    assert torch.equal(first.trellis, second.trellis) and torch.equal(first.suh, second.suh)


def quantize_pair(device: str) -> Sequence[QuantizedLinear]:
    found = hessian_of(inputs(256))
    jobs = [
        LinearJob("m.q", random_weight(256, 384).to(device), 4),
        LinearJob("m.k", random_weight(256, 128, seed=2).to(device), 3),
    ]
    return quantize(*jobs, hessian=Hessian(found.matrix.to(device), found.count))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_cuda_device() -> None:
    """The CPU's quality, the same bytes twice, and everything stays on the device."""
    first, again, cpu = quantize_pair("cuda"), quantize_pair("cuda"), quantize_pair("cpu")
    for a, b, c in zip(first, again, cpu, strict=True):
        t = a.tensors
        assert t.trellis.is_cuda and torch.equal(t.trellis, b.tensors.trellis)
        assert torch.equal(t.suh, b.tensors.suh) and torch.equal(t.svh, b.tensors.svh)
        assert a.report.proxy_error == pytest.approx(c.report.proxy_error, rel=0.03)
        stored = reconstruct(t.trellis.cpu(), t.suh.cpu(), t.svh.cpu(), t.codebook)
        torch.testing.assert_close(stored[:256, : a.weight.shape[1]], a.weight.cpu())
