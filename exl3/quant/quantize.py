"""Quantising the linear layers that share one input (format page, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..constants import TILE_DIM
from ..errors import ConfigError
from .hessian import Hessian
from .ldlq import Encoded, Problem, block_ldl, ldlq
from .output_hessian import OutputHessian
from .packing import pad_square, pad_weight, padded
from .refit import refit_scales
from .regularize import (
    Regularized,
    left_hadamard,
    random_signs,
    regularize,
    right_hadamard,
    transform_hessian,
)
from .scale import Scale, global_scales
from .types import LinearJob, LinearReport, QuantizedTensors, QuantizeOptions

_HALF_MAX = 65504.0
_WEIGHT_MAX = 1e9  # both scales at their largest reach a little further
_RANK = 1e-4  # what makes a damped Hessian definite where scales are zero


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Result for one layer."""

    tensors: QuantizedTensors
    weight: Tensor
    """float32 (in_features, out_features): what the stored tensors stand for."""
    report: LinearReport


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A layer with its scales chosen, ready for the encoder."""

    job: LinearJob
    weight: Tensor
    parts: Regularized
    problem: Problem
    scale: Scale
    out_scales: bool
    matrix: Tensor | None
    """The Hessian, padded; None where it cannot be used, and why is the note."""
    output: OutputHessian | None
    """That of the outputs, padded and damped."""
    note: str


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Layers that read one input."""

    jobs: Sequence[LinearJob]
    """With equal in_features; bit rates may differ."""
    hessian: Hessian
    """Second moments of their input, (in_features, in_features)."""
    share_key: str
    """Names the group; the input signs derive from it."""

    def tiles(self) -> int:
        """Tiles of a step, at most: of 16 rows, or of an anti-diagonal."""
        counts = []
        for job in self.jobs:
            rows, columns = (padded(size) // TILE_DIM for size in job.weight.shape)
            counts.append(columns if job.output is None else min(rows, columns))
        return sum(counts)


def quantize_groups(
    groups: Sequence[InputGroup], options: QuantizeOptions
) -> list[QuantizedLinear]:
    """Quantise the layers of some groups, in the order given.

    The result of a layer does not depend on the others. Together, small ones keep a device or all
    cores busy; the memory is that of all of them.

    Raises:
        ConfigError: a weight that is not finite, or too large for float16 scales.
    """
    prepared: list[_Prepared] = []
    for group in groups:
        for job in group.jobs:
            _check(job, group.hessian)
        note = group.hessian.problem()
        matrix = None if note else pad_square(group.hessian.matrix)
        weight = group.jobs[0].weight
        signs = random_signs(group.share_key, seed=options.seed, size=padded(weight.shape[0]))
        signs = signs.to(weight.device)
        prepared += [_prepare(job, matrix, signs, options, note) for job in group.jobs]
    results: dict[str, QuantizedLinear] = {}
    for bits in sorted({p.job.bits for p in prepared}):
        batch = [p for p in prepared if p.job.bits == bits]
        problems = [replace(p.problem, weight=p.problem.weight * p.scale.factor) for p in batch]
        encoded = ldlq(problems, bits=bits, codebook=options.codebook)
        for p, e in zip(batch, encoded, strict=True):
            results[p.job.key] = _finish(p, e, options)
    return [results[p.job.key] for p in prepared]


def quantize_group(
    jobs: Sequence[LinearJob], hessian: Hessian, options: QuantizeOptions, *, share_key: str
) -> list[QuantizedLinear]:
    """`quantize_groups` of one group."""
    return quantize_groups([InputGroup(jobs, hessian, share_key)], options)


def _check(job: LinearJob, hessian: Hessian) -> None:
    if job.weight.shape[0] != hessian.matrix.shape[0]:
        raise ConfigError(
            f"{job.key}: {job.weight.shape[0]} input features, but its Hessian has"
            f" {hessian.matrix.shape[0]}"
        )
    check_weight(job.key, job.weight)


def check_weight(key: str, weight: Tensor) -> None:
    """Refuse a weight (in, out) that cannot be quantised.

    Raises:
        ConfigError: values that are not finite, or too large for float16 scales.
    """
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        row, column = (int(i) for i in (~finite).nonzero()[0])
        raise ConfigError(
            f"{key}: weight [{column}, {row}] is {float(weight[row, column])}, and"
            f" {int((~finite).sum())} values are not finite; the source checkpoint is damaged"
        )
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > _WEIGHT_MAX:
        raise ConfigError(
            f"{key}: a weight of {largest:g} does not fit float16 scales (limit"
            f" {_WEIGHT_MAX:g}); the source checkpoint is damaged, or is not a language model"
        )


def _prepare(
    job: LinearJob,
    matrix: Tensor | None,
    in_signs: Tensor,
    options: QuantizeOptions,
    note: str,
) -> _Prepared:
    """Regularise; under `auto`, both ways, keeping the one whose trial promises less loss."""
    weight = pad_weight(job.weight)
    output = None
    if job.output is not None and matrix is not None:
        output = job.output.padded(weight.shape[1]).damped(options.output_damping)
    out_signs = random_signs(job.key, seed=options.seed, size=weight.shape[1])
    out_signs = out_signs.to(weight.device)
    ways = {"always": (True,), "never": (False,), "auto": (True, False)}[options.out_scales]
    candidates = []
    for out_scales in ways:
        parts = regularize(weight, in_signs, out_signs, out_scales=out_scales)
        lower = None
        if matrix is not None and bool(parts.suh.any()):
            lower = block_ldl(transform_hessian(matrix, parts.suh), options.damping)
        right = None
        if output is not None and bool(parts.svh.any()):
            right = [(cut, block_ldl(h, _RANK)) for cut, h in output.inner(parts.svh)]
        problem = Problem(parts.inner, lower, right)
        seed = options.seed + 1
        (scale,) = global_scales([problem], bits=job.bits, codebook=options.codebook, seed=seed)
        candidates.append(
            _Prepared(job, weight, parts, problem, scale, out_scales, matrix, output, note)
        )
    return min(candidates, key=_promised_loss)


def _promised_loss(prepared: _Prepared) -> float:
    """Relative error of the trial times what the scales make of it."""
    suh, svh = prepared.parts.suh, prepared.parts.svh
    live = suh[suh != 0].abs()
    size = float(live.log().mean().exp()) if live.numel() else 0.0
    return prepared.scale.relative_error * size**2 * float(svh.square().mean())


def _finish(prepared: _Prepared, encoded: Encoded, options: QuantizeOptions) -> QuantizedLinear:
    """Scales in float16, re-fitted if asked, and the quality figures of what is stored."""
    job, weight, matrix = prepared.job, prepared.weight, prepared.matrix
    suh, svh = prepared.parts.suh / prepared.scale.factor, prepared.parts.svh
    core = right_hadamard(left_hadamard(encoded.w_inner))
    if options.refit and matrix is not None:
        suh, svh = refit_scales(weight, core, suh, svh, hessian=matrix, output=prepared.output)
    suh16, svh16 = _half_scales(job.key, suh, svh)
    bias = None if job.bias is None else job.bias.to(torch.float16)
    tensors = QuantizedTensors(encoded.trellis, suh16, svh16, options.codebook, bias)
    result = suh16.to(torch.float32)[:, None] * core * svh16.to(torch.float32)
    error = weight - result
    energy = max(float(weight.square().sum()), 1e-30)
    weight_error = float(error.square().sum()) / energy
    proxy = weight_error if matrix is None else _proxy_error(error, weight, matrix)
    report = LinearReport(
        key=job.key,
        bits=job.bits,
        in_features=job.weight.shape[0],
        out_features=job.weight.shape[1],
        proxy_error=proxy,
        weight_error=weight_error,
        feedback=prepared.problem.lower is not None,
        out_scales=prepared.out_scales,
        note=prepared.note,
    )
    rows, columns = job.weight.shape
    return QuantizedLinear(tensors, result[:rows, :columns].contiguous(), report)


def _proxy_error(error: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """tr(E^T H E) / tr(W^T H W)."""
    above = float((error * (hessian @ error)).sum())
    below = float((weight * (hessian @ weight)).sum())
    return above / below if below > 0 else 0.0


def _half_scales(key: str, suh: Tensor, svh: Tensor) -> tuple[Tensor, Tensor]:
    """float16 scales. If the weight's size puts suh near an end of float16, svh takes a share."""
    live = suh[suh != 0].abs()
    if live.numel():
        size = float(live.median().log2())
        if abs(size) > 9:
            shift = 2.0 ** round(size / 2)
            suh, svh = suh / shift, svh * shift
    for name, scale in (("suh", suh), ("svh", svh)):
        largest = float(scale.abs().max()) if scale.numel() else 0.0
        if not largest <= _HALF_MAX:
            raise ConfigError(
                f"{key}: the weight's scale {name} of {largest:g} does not fit float16"
                f" (limit {_HALF_MAX:g}); the source weight is too large to be stored as EXL3"
            )
    return suh.to(torch.float16), svh.to(torch.float16)
