"""Quantising on a CUDA device: the same quality as on the CPU, the same bytes twice."""

import pytest
import torch

from exl3.ops.trellis import reconstruct
from exl3.quant import Hessian, LinearJob, QuantizedLinear, QuantizeOptions, quantize_group

from .test_quantize import hessian_of, inputs, random_weight

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def quantize(device: str) -> list[QuantizedLinear]:
    found = hessian_of(inputs(256))
    hessian = Hessian(found.matrix.to(device), found.count)
    jobs = [
        LinearJob("m.q", random_weight(256, 384).to(device), 4),
        LinearJob("m.k", random_weight(256, 128, seed=2).to(device), 3),
    ]
    return quantize_group(jobs, hessian, QuantizeOptions(), share_key="m.in")


def test_group_on_device() -> None:
    first, again, cpu = quantize("cuda"), quantize("cuda"), quantize("cpu")
    for a, b, c in zip(first, again, cpu, strict=True):
        assert a.tensors.trellis.is_cuda and torch.equal(a.tensors.trellis, b.tensors.trellis)
        assert torch.equal(a.tensors.suh, b.tensors.suh)
        assert a.report.proxy_error == pytest.approx(c.report.proxy_error, rel=0.03)
        t = a.tensors
        stored = reconstruct(t.trellis.cpu(), t.suh.cpu(), t.svh.cpu(), t.codebook)
        weight = a.weight.cpu()
        torch.testing.assert_close(stored[: weight.shape[0], : weight.shape[1]], weight)
