"""Which kernel choices a model asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_models import load_split, stand_ins
from test_split import FIELDS, new_model
from tiny_models import write_random_exl3

from exl3.model import tune as tune_module
from exl3.model.tune import LinearTunable, linear_tunables
from exl3.ops.codebook import Codebook
from exl3.ops.linear_route import ROW_RANGES, LinearProblem, Route


class Clock:
    """Runs nothing; notes how often it is asked."""

    device = torch.device("cuda", 3)

    def __init__(self) -> None:
        self.asked = 0

    def seconds(self, function: Callable[[], object]) -> float:
        self.asked += 1
        return 1.0


@pytest.fixture
def directory(tmp_path: Any) -> Any:
    write_random_exl3(tmp_path, FIELDS)
    return tmp_path


def names(tunables: Any, rows: str) -> list[str]:
    return [t.name for t in tunables if t.name.endswith(f" rows={rows}")]


def test_every_group_of_a_step_has_its_choices(directory: Any) -> None:
    model = new_model(directory)
    model.load(device="cpu")
    tunables = linear_tunables(model, 0, Clock())
    # All layers share these: 96 is padded to 128, 160 to 256, 300 to 384.
    assert names(tunables, "1..1") == [
        "linear k=128 n=128+128+128 bits=4 mul1 rows=1..1",
        "linear k=128 n=128 bits=4 mul1 rows=1..1",
        "linear k=128 n=256+256 bits=4 mul1 gated rows=1..1",
        "linear k=256 n=128 bits=4 mul1 rows=1..1",
        "linear k=128 n=384 bits=4 mul1 rows=1..1",
    ]
    assert len(tunables) == 5 * len(ROW_RANGES)
    assert all(t.name.endswith("1..1") for t in tunables[:5])
    first, last = tunables[0], tunables[4]
    assert isinstance(first, LinearTunable) and isinstance(last, LinearTunable)
    assert len(first.groups) == 7 and first.dtype == torch.float16
    assert len(last.groups) == 1 and last.dtype == torch.float32  # the head's input


def test_unlike_layers_are_measured_one_by_one(directory: Any) -> None:
    model = new_model(directory)
    model.load(device="cpu")
    v_proj, up = model.blocks[2].attention.v_proj, model.blocks[4].mlp.up_proj
    other = model.blocks[5].mlp.down_proj
    assert v_proj.weight is not None and other.weight is not None
    six = torch.zeros(8, 8, 16 * 6, dtype=torch.int16)
    from dataclasses import replace

    v_proj.weight = replace(v_proj.weight, planes=six)
    up.plain, up.weight = up.weight_dense().t().contiguous(), None
    other.plain, other.weight = other.weight_dense().t().contiguous(), None
    tunables = linear_tunables(model, 0, Clock())
    found = {t.name: t for t in tunables if isinstance(t, LinearTunable)}
    assert "linear k=128 n=128 bits=6 mul1 rows=1..1" in found
    one = found["linear k=128 n=128 bits=4 mul1 rows=1..1"]
    assert len(one.groups) == 7 + 2  # o_proj of each, q_proj and k_proj of the third
    assert len(found["linear k=128 n=256 bits=4 mul1 rows=1..1"].groups) == 1  # gate alone
    assert len(found["linear k=256 n=128 bits=4 mul1 rows=1..1"].groups) == 6


def test_parts_of_a_split_are_tuned_apart(directory: Any) -> None:
    model = load_split(new_model(directory), stand_ins(3))
    counts = []
    for part in range(3):
        tunables = linear_tunables(model, part, Clock())
        assert isinstance(tunables[0], LinearTunable)
        counts.append((len(tunables[0].groups), len(names(tunables, "2..2"))))
    assert counts == [(2, 4), (3, 4), (2, 5)]  # the head is in the last


def test_routes_are_set_while_measuring_and_taken_back(
    directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, tuple[int, int], Route]] = []
    offered = [Route("built_in"), Route("small", 2), Route("decoded")]
    monkeypatch.setattr(LinearProblem, "routes", lambda self, index, rows: offered)
    monkeypatch.setattr(LinearProblem, "take", lambda self, *given: taken.append(given))
    model = new_model(directory)
    model.load(device="cpu")
    clock = Clock()
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # there is no device 3
    tunable = linear_tunables(model, 0, clock)[-1]
    ways = tunable.ways()
    assert ways == [{}, {"path": "small", "cluster": 2}, {"path": "decoded", "cluster": 0}]
    tunable.seconds(ways[1])
    tunable.take(ways[2])
    assert clock.asked == 1
    assert taken == [
        (3, (129, 256), Route("small", 2)),
        (3, (129, 256), Route("built_in")),
        (3, (129, 256), Route("decoded")),
    ]


def test_problem_of_weights(directory: Any) -> None:
    model = new_model(directory)
    model.load(device="cpu")
    mlp = model.blocks[0].mlp
    weights = [layer.weight for layer in (mlp.gate_proj, mlp.up_proj) if layer.weight]
    problem = LinearProblem.of(weights, gated=True)
    assert problem == LinearProblem(128, 4, Codebook.MUL1, True, (256, 256))


@pytest.mark.parametrize("wrong", ["zeros", "one row", "nan"])
def test_a_way_with_other_results_is_not_taken(
    wrong: str, directory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    route = Route("built_in")

    def take(self: LinearProblem, index: int, rows: tuple[int, int], chosen: Route) -> None:
        nonlocal route
        route = chosen

    run = tune_module._Group.run

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = run(self, x.float()).clone()
        if route.path == "decoded":
            if wrong == "zeros":
                y.zero_()
            elif wrong == "one row":
                y[-1] += 0.1 * y[-1].norm() / y.shape[1] ** 0.5
            else:
                y[0, 3] = float("nan")
        return y * (1 + 1e-4) if route.path == "small" else y

    monkeypatch.setattr(LinearProblem, "routes", lambda self, index, rows: [Route("built_in")])
    monkeypatch.setattr(LinearProblem, "take", take)
    monkeypatch.setattr(tune_module._Group, "run", broken)
    model = new_model(directory)
    model.load(device="cpu")
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    tunable = next(t for t in linear_tunables(model, 0, Clock()) if t.rows[1] > 4)
    assert tunable.seconds({"path": "small", "cluster": 2}) < 1
    assert not caplog.text
    assert math.isinf(tunable.seconds({"path": "decoded", "cluster": 0}))
    assert "gives other results" in caplog.text and route == Route("built_in")
