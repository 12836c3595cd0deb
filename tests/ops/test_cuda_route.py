"""Choosing between the kernels of the linear layer on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from linear_cases import random_weight

from exl3.errors import ConfigError
from exl3.ops.codebook import Codebook
from exl3.ops.graph import GraphTimer
from exl3.ops.linear import LinearWeight, linear, linear_reference
from exl3.ops.linear_route import BUILT_IN, LinearProblem, Route, clear_routes
from exl3.ops.registry import ops

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LIMIT = 1.5e-3


@pytest.fixture(autouse=True)
def built_in() -> Iterator[None]:
    yield
    clear_routes()


def problem_of(weights: list[LinearWeight], gated: bool = False) -> LinearProblem:
    problem = LinearProblem.of(weights, gated=gated)
    assert problem is not None
    return problem


@pytest.mark.parametrize("codebook", [Codebook.MUL1, Codebook.MCG])
@pytest.mark.parametrize("m", [1, 3, 16, 24, 40, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_every_route_is_right(
    codebook: Codebook, m: int, gated: bool, device: torch.device
) -> None:
    weights = [random_weight(1024, 384, 4, codebook, seed=i, device="cuda") for i in range(2)]
    problem = problem_of(weights, gated)
    x = torch.randn(m, 1024, device="cuda").half()
    activation = "silu" if gated else None
    want = linear_reference(x, weights, activation=activation)
    routes = problem.routes(device.index, m)
    assert routes[0] == BUILT_IN and len(routes) == len(set(routes))
    assert (Route("decoded") in routes) == (m >= 16)
    if ops().cuda_capability(device.index) >= 80:  # before, shared memory has no room for all
        assert any(route.path == "small" for route in routes) == (m <= 64)
    results = []
    for route in routes:
        problem.take(device.index, (m, m), route)
        got = linear(x, weights, activation=activation)
        assert torch.equal(linear(x, weights, activation=activation), got)
        error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < LIMIT, route
        results.append(got)
    problem.take(device.index, (m, m), BUILT_IN)
    assert torch.equal(linear(x, weights, activation=activation), results[0])


@pytest.mark.parametrize("bits", [1, 4, 5, 8])
@pytest.mark.parametrize(
    ("k", "sizes", "gated"),
    [
        (128, (128,), False),
        (384, (256, 128), False),
        (1152, (384, 384), True),
        (14336, (640,), False),
    ],
)
def test_direct_product_by_any_number_of_parts(
    k: int, sizes: tuple[int, ...], gated: bool, bits: int, device: torch.device
) -> None:
    """Both sides of each number of rows that a thread block may have."""
    weights = [
        random_weight(k, n, bits, bias=True, seed=i, device="cuda") for i, n in enumerate(sizes)
    ]
    problem = problem_of(weights, gated)
    activation = "silu" if gated else None
    inputs = torch.randn(130, k, device="cuda").half()
    want = linear_reference(inputs, weights, activation=activation)
    for m in (9, 16, 17, 32, 33, 64, 65, 128, 130):
        routes = [r for r in problem.routes(device.index, m) if r.path == "direct"]
        if not routes:
            pytest.skip("no direct product on this GPU")
        for route in routes:
            problem.take(device.index, (m, m), route)
            got = linear(inputs[:m], weights, activation=activation)
            assert torch.equal(linear(inputs[:m], weights, activation=activation), got)
            error = (got.double() - want[:m]).norm(dim=-1) / want[:m].norm(dim=-1)
            assert error.max() < LIMIT, (m, route)


def test_a_route_is_taken_for_its_problem_and_rows_alone(device: torch.device) -> None:
    """Decoding the weights gives other last bits than the small-batch kernel."""
    weight = random_weight(2048, 512, 4, device="cuda")
    other = random_weight(2048, 640, 4, device="cuda")
    x = torch.randn(24, 2048, device="cuda").half()

    def bits() -> list[torch.Tensor]:
        return [linear(x[:17], [weight]), linear(x[:24], [weight]), linear(x[:24], [other])]

    before = bits()
    problem_of([weight]).take(device.index, (18, 32), Route("decoded"))
    changed = bits()
    assert [torch.equal(a, b) for a, b in zip(before, changed, strict=True)] == [True, False, True]
    clear_routes()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))


def test_wrong_routes_are_refused(device: torch.device) -> None:
    problem = problem_of([random_weight(256, 128, 4, device="cuda")])
    with pytest.raises(ConfigError, match="path is 'fast'"):
        problem.take(device.index, (1, 1), Route("fast"))
    for rows, cluster, message in (((0, 1), 1, "rows are 0"), ((1, 1), 9, "cluster is 9")):
        with pytest.raises(RuntimeError, match=message):
            problem.take(device.index, rows, Route("small", cluster))


def test_times_are_times(device: torch.device) -> None:
    weight = random_weight(2048, 2048, 4, device="cuda")
    x = torch.randn(1, 2048, device="cuda").half()
    timer = GraphTimer(device)
    once = timer.seconds(lambda: [linear(x, [weight]) for _ in range(4)])
    many = timer.seconds(lambda: [linear(x, [weight]) for _ in range(64)])
    assert 0 < once < many < 0.1
