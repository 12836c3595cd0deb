"""Running calibration rows through one module and gathering what its linear layers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modules import Batch, Embedding, Head, Linear, Module
from ..quant import Hessian, HessianAccumulator

_CPU = torch.device("cpu")
TOKENS_PER_PASS = {"cpu": 4096, "cuda": 16384}
"""Bounds the activations that are alive at once; a device wants more work between two waits."""


@dataclass(frozen=True, slots=True)
class Group:
    """Linear layers that read one input."""

    key: str
    layers: tuple[Linear, ...]


def share_groups(module: Module) -> list[Group]:
    """The Hessian groups of a module, in the order in which they run."""
    groups: dict[str, list[Linear]] = {}
    for part in module:
        if isinstance(part, Linear) and part.quantizable:
            groups.setdefault(part.share, []).append(part)
    return [Group(key, tuple(layers)) for key, layers in groups.items()]


@dataclass(frozen=True, slots=True)
class Captured:
    """Result of one pass over all rows."""

    output: Tensor | None
    """float32 (rows, cols, hidden); None for a head."""
    hessians: dict[str, Hessian]
    bad_rows: tuple[int, ...]
    """Rows whose output, or input of some layer, is not finite; their output is 0."""


def run_rows(
    module: Module,
    state: Tensor,
    *,
    groups: Sequence[Group] = (),
    skip: frozenset[int] = frozenset(),
    weights: Mapping[str, Tensor] | None = None,
    device: torch.device = _CPU,
) -> Captured:
    """Run every row that is not in `skip`, gathering a Hessian per group.

    Args:
        state: int64 (rows, cols) for an embedding, else float32 (rows, cols, hidden); on any
            device, where the output comes to lie as well.
        weights: float32 (rows, cols) by group, how much each token counts in its Hessian; a group
            without any counts all alike.
        device: where the module is loaded, and the Hessians are left.
    """
    rows, cols = state.shape[:2]
    sums = {group.key: HessianAccumulator(group.layers[0].in_features, device) for group in groups}
    bad: list[int] = []
    output: Tensor | None = None
    wanted = [row for row in range(rows) if row not in skip]
    step = max(1, TOKENS_PER_PASS[device.type] // cols)
    for start in range(0, len(wanted), step):
        part = wanted[start : start + step]
        inputs: dict[str, Tensor] = {}
        y = _run(module, state[part].to(device), groups, inputs)
        seen = [*inputs.values(), *([] if y is None else [y])]
        good = torch.ones(len(part), dtype=torch.bool, device=device)
        for x in seen:
            good &= torch.isfinite(x).reshape(len(part), -1).all(1)
        bad += [row for row, fine in zip(part, good.tolist(), strict=True) if not fine]
        for key, x in inputs.items():
            rows_in = x.unflatten(0, (len(part), cols))[good] if not bool(good.all()) else x
            counts = None if weights is None else weights.get(key)
            if counts is not None:
                counts = counts[part].to(device)[good].flatten()
            sums[key].add(rows_in.reshape(-1, x.shape[-1]), counts)
        if y is not None:
            if output is None:
                output = torch.zeros(rows, cols, y.shape[-1], device=state.device)
            y = y.unflatten(0, (len(part), cols))
            kept = torch.where(good[:, None, None], y, y.new_zeros(()))
            output[part] = kept.to(output.device, torch.float32)
    return Captured(output, {key: s.finish() for key, s in sums.items()}, tuple(bad))


@torch.inference_mode()
def _run(
    module: Module, state: Tensor, groups: Sequence[Group], inputs: dict[str, Tensor]
) -> Tensor | None:
    """One pass over a few rows; `inputs` receives what the first layer of each group reads."""
    rows, cols = state.shape[:2]
    if isinstance(module, Head):
        if groups:
            inputs[groups[0].key] = state.flatten(0, 1)
        return None  # a vocabulary of outputs per token would be too much, and nobody reads it
    for group in groups:
        group.layers[0].capture = lambda x, key=group.key: inputs.__setitem__(key, x.clone())
    try:
        if isinstance(module, Embedding):
            batch = Batch.dense(rows, cols, input_ids=state)
            return module.forward(state.reshape(-1), batch)
        return module.forward(state.flatten(0, 1), Batch.dense(rows, cols).to(state.device))
    finally:
        for group in groups:
            group.layers[0].capture = None
