"""Rows in equal shares for all multiprocessors: every rate, shares that cut units anywhere, launch
after launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from linear_cases import random_weight

from exl3.ops.codebook import Codebook
from exl3.ops.graph import capture
from exl3.ops.linear import LinearWeight, Norm, linear, linear_add_, linear_reference
from exl3.ops.linear_route import LinearProblem, Route, clear_routes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LIMIT = 1.5e-3
SHAPES = [
    (128, (128,), False),
    (384, (256, 128), False),
    (1152, (384, 384), True),
    (4096, (4096, 1024, 1024), False),
    (14336, (640,), False),
    (2048, (5632, 5632), True),
]


@pytest.fixture(autouse=True)
def built_in() -> Iterator[None]:
    yield
    clear_routes()


def even_routes(
    weights: list[LinearWeight], gated: bool, device: torch.device, rows: int = 1
) -> list[Route]:
    """Those of some rows, or skip."""
    problem = LinearProblem.of(weights, gated=gated)
    assert problem is not None
    routes = [r for r in problem.routes(device.index, rows) if r.path == "even"]
    if not routes:
        pytest.skip("no even product on this GPU")
    return routes


def take(weights: list[LinearWeight], gated: bool, device: torch.device, route: Route) -> None:
    problem = LinearProblem.of(weights, gated=gated)
    assert problem is not None
    problem.take(device.index, (1, 32), route)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("k", "sizes", "gated"), SHAPES)
def test_matches_reference(
    k: int,
    sizes: tuple[int, ...],
    gated: bool,
    bits: int,
    codebook: Codebook,
    device: torch.device,
) -> None:
    weights = [
        random_weight(k, n, bits, codebook, bias=True, seed=i, device="cuda")
        for i, n in enumerate(sizes)
    ]
    activation = "silu" if gated else None
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        x = (3 * torch.randn(1, k, device="cuda")).to(dtype)
        norm = Norm(1 + 0.3 * torch.randn(k, device="cuda"), 1e-5) if gated or bits % 2 else None
        want = linear_reference(x, weights, norm=norm, activation=activation)
        limit = 6e-3 if dtype == torch.bfloat16 else LIMIT
        for route in even_routes(weights, gated, device):
            take(weights, gated, device, route)
            got = linear(x, weights, norm=norm, activation=activation)
            assert torch.equal(linear(x, weights, norm=norm, activation=activation), got)
            error = (got.double() - want).norm() / want.norm()
            assert error < limit, (route, dtype)


@pytest.mark.parametrize("codebook", [Codebook.MUL1, Codebook.MCG])
@pytest.mark.parametrize("bits", [1, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("k", "sizes", "gated"), [(1000, (384, 128), False), (2048, (1408, 1408), True)]
)
def test_several_rows(
    k: int,
    sizes: tuple[int, ...],
    gated: bool,
    bits: int,
    codebook: Codebook,
    device: torch.device,
) -> None:
    """Each number of fragments, and more rows than one launch has; k that is padded."""
    weights = [
        random_weight(k, n, bits, codebook, bias=True, seed=i, device="cuda")
        for i, n in enumerate(sizes)
    ]
    activation = "silu" if gated else None
    norm = Norm(1 + 0.3 * torch.randn(k, device="cuda"), 1e-5)
    inputs = (3 * torch.randn(32, k, device="cuda")).half()
    wanted = linear_reference(inputs, weights, norm=norm, activation=activation)
    for m in (2, 3, 4, 5, 8, 9, 16, 17, 32):
        x, want = inputs[:m], wanted[:m]
        for route in even_routes(weights, gated, device, m):
            take(weights, gated, device, route)
            got = linear(x, weights, norm=norm, activation=activation)
            assert torch.equal(linear(x, weights, norm=norm, activation=activation), got)
            error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
            assert error.max() < LIMIT, (m, route)


def test_what_it_has_no_instance_for_runs_another_way(device: torch.device) -> None:
    """Sizes that are padded, and rows that are no multiple of 16 bytes apart from the start."""
    padded = [random_weight(1152, 130, 4, device="cuda")]
    even_routes([random_weight(1152, 256, 4, device="cuda")], False, device)
    take(padded, False, device, Route("even"))
    x = torch.randn(1, 1152 + 1, device="cuda").half()[:, 1:]
    want = linear_reference(x, padded)
    assert (linear(x, padded).double() - want).norm() < LIMIT * want.norm()
    whole = [random_weight(1152, 256, 4, device="cuda")]
    take(whole, False, device, Route("even"))
    want = linear_reference(x, whole)
    assert (linear(x, whole).double() - want).norm() < LIMIT * want.norm()


def test_infinity_and_zeros(device: torch.device) -> None:
    weights = [random_weight(1152, 256, 4, device="cuda")]
    routes = even_routes(weights, False, device)
    take(weights, False, device, routes[0])
    x = torch.zeros(1, 1152, device="cuda").half()
    assert torch.equal(linear(x, weights), torch.zeros(1, 256, device="cuda").half())
    x[0, 7] = torch.inf
    assert not linear(x, weights).isfinite().any()
    x[0, 7] = torch.nan
    assert linear(x, weights).isnan().all()


def test_launches_that_share_multiprocessors(device: torch.device) -> None:
    """As a decoder's: with a norm and without in turns, a thousand launches in one graph, each of
    which reads what the one before wrote."""
    up = [random_weight(1024, 2048, 4, seed=i, device="cuda") for i in range(2)]
    down = [random_weight(2048, 1024, 4, seed=9, device="cuda")]
    norm = Norm(torch.ones(1024, device="cuda"), 1e-5)
    even_routes(up, True, device)
    start = torch.randn(1, 1024, device="cuda")

    def run(steps: int) -> torch.Tensor:
        hidden = start.clone()
        for _ in range(steps):
            middle = linear(hidden, up, norm=norm, activation="silu")
            linear_add_(hidden, middle, down)
        return hidden

    want = run(3)
    take(up, True, device, Route("even", 1))
    take(down, False, device, Route("even", 1))
    graph = capture(lambda: run(500), device)
    got = graph.replay().clone()
    for _ in range(20):
        assert torch.equal(graph.replay(), got)
    assert torch.equal(run(500), got) and got.isfinite().all()
    assert (run(3) - want).norm() < 0.01 * want.norm()
