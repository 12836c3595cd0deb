"""Measuring which kernels a loaded model runs fastest with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..modules import Block, Linear, RMSNorm
from ..ops.linear import Norm, linear
from ..ops.linear_route import BUILT_IN, ROW_RANGES, LinearProblem, Route
from ..tuning import LOAD_SECONDS, Machine, Tunable, Values, tune
from ..version import __version__

if TYPE_CHECKING:
    from .model import Model


class Timer(Protocol):
    """What times launches: `exl3.ops.graph.GraphTimer`."""

    device: torch.device

    def seconds(self, function: Callable[[], object]) -> float: ...


logger = logging.getLogger(__name__)

_LEAST_BYTES = 192 << 20  # weights read in one replay: several times the cache
_MOST_CALLS = 32
_MOST_ERROR = 0.01  # of a row, between two ways; rounding makes 0.001, in bfloat16 0.004


class _Group:
    """Layers that run as one launch, as in a step."""

    def __init__(
        self, layers: Sequence[Linear], norm: RMSNorm | None = None, activation: str | None = None
    ) -> None:
        self.weights = [layer.weight for layer in layers if layer.weight is not None]
        self.fused = len(self.weights) == len(layers)
        self.norm = None
        if norm is not None and norm.weight is not None:
            self.norm = Norm(norm.weight, norm.eps)
        self.activation = activation

    def alone(self) -> list[_Group]:
        """Each layer as a group of its own: how unlike bit rates run."""
        found = []
        for weight in self.weights:
            group = _Group(())
            group.weights, group.norm = [weight], self.norm
            found.append(group)
        return found

    def run(self, x: Tensor) -> Tensor:
        return linear(x, self.weights, norm=self.norm, activation=self.activation)

    def n_bytes(self) -> int:
        return sum(weight.planes.nbytes for weight in self.weights)


class LinearTunable(Tunable):
    """`linear` on some rows of all groups of one problem on a device."""

    def __init__(
        self,
        problem: LinearProblem,
        groups: Sequence[_Group],
        rows: tuple[int, int],
        *,
        timer: Timer,
        dtype: torch.dtype,
    ) -> None:
        self.problem, self.rows = problem, rows
        self.groups, self.timer, self.dtype = groups, timer, dtype
        self.name = f"linear {problem.text()} rows={rows[0]}..{rows[1]}"
        self._ways: list[Values] | None = None

    def ways(self) -> Sequence[Values]:
        """See `Tunable.ways`."""
        if self._ways is None:
            routes = self.problem.routes(self.timer.device.index, self.rows[1])
            self._ways = [_values(route) for route in routes]
        return self._ways

    def seconds(self, values: Values) -> float:
        """See `Tunable.seconds`: of a captured run over the weights of many layers, so that they
        come from memory."""
        needed = -(-_LEAST_BYTES // max(self.groups[0].n_bytes(), 1))
        count = min(max(needed, 4), _MOST_CALLS)
        features = self.groups[0].weights[0].in_features
        x = torch.randn(self.rows[1], features, generator=torch.Generator().manual_seed(0))
        x = x.to(self.timer.device, self.dtype)

        def calls() -> None:
            for index in range(count):
                self.groups[index % len(self.groups)].run(x)

        expected = self.groups[0].run(x) if values else None
        self.take(values)
        try:
            if expected is not None and not _agrees(self.groups[0].run(x), expected):
                logger.warning("%s: %s gives other results, and is not taken", self.name, values)
                return math.inf
            return self.timer.seconds(calls) / count
        finally:
            self.take({})

    def take(self, values: Values) -> None:
        """See `Tunable.take`."""
        route = BUILT_IN
        if values:
            route = Route(str(values["path"]), int(values["cluster"]))
        self.problem.take(self.timer.device.index, self.rows, route)


def _agrees(y: Tensor, expected: Tensor) -> bool:
    """Whether rows differ by rounding only, that of activations included."""
    y, expected = y.float(), expected.float()
    error = (y - expected).norm(dim=-1)
    return bool((error <= _MOST_ERROR * expected.norm(dim=-1)).all())


def _values(route: Route) -> Values:
    return {} if route == BUILT_IN else {"path": route.path, "cluster": route.cluster}


def _groups(block: Block) -> list[_Group]:
    attention, mlp = block.attention, block.mlp
    return [
        _Group((attention.q_proj, attention.k_proj, attention.v_proj), block.attention_norm),
        _Group((attention.o_proj,)),
        _Group((mlp.gate_proj, mlp.up_proj), block.mlp_norm, mlp.activation),
        _Group((mlp.down_proj,)),
    ]


def linear_tunables(model: Model, part: int, timer: Timer) -> list[Tunable]:
    """What can be chosen for the EXL3 layers of a part of a loaded model, single tokens first."""
    blocks: dict[LinearProblem, list[_Group]] = {}
    heads: dict[LinearProblem, list[_Group]] = {}
    for segment in model.segments:
        for block in segment.blocks if segment.part == part else ():
            for group in _groups(block):
                _sort_in(group, blocks)
    if model.segments[-1].part == part:
        _sort_in(_Group((model.head,), model.final_norm), heads)
    return [
        LinearTunable(problem, groups, rows, timer=timer, dtype=dtype)
        for rows in ROW_RANGES
        for kinds, dtype in ((blocks, torch.float16), (heads, torch.float32))
        for problem, groups in kinds.items()
    ]


def _sort_in(group: _Group, found: dict[LinearProblem, list[_Group]]) -> None:
    if not group.weights:
        return
    problem = LinearProblem.of(group.weights, gated=group.activation is not None)
    if problem is not None and group.fused:
        found.setdefault(problem, []).append(group)
        return
    for one in group.alone():
        _sort_in(one, found)


def machine_of(device: torch.device) -> Machine:
    """What measurements on a CUDA device hold for."""
    import exl3_ext

    from ..ops.registry import ops

    card = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    capability = ops().cuda_capability(index) / 10
    return Machine(
        device=card.name,
        capability=f"{capability}, {card.multi_processor_count} processors",
        driver=str(ops().cuda_driver()),
        cuda=str(torch.version.cuda),
        exl3=f"{__version__} {exl3_ext.cuda_digest()}",
    )


def tune_model(model: Model, budget_s: float = LOAD_SECONDS) -> int:
    """Take the fastest known kernels for a loaded model on CUDA, and measure what is not known.

    Returns:
        How many choices are left for the next time.
    """
    parts = {segment.part: segment.device for segment in model.segments}
    left = sum(_tune_part(model, part, parts[part], budget_s / len(parts)) for part in parts)
    torch.cuda.empty_cache()
    return left


def _tune_part(model: Model, part: int, device: torch.device, budget_s: float) -> int:
    from ..ops.graph import GraphTimer

    tunables = linear_tunables(model, part, GraphTimer(device))
    return tune(machine_of(device), tunables, budget_s)
