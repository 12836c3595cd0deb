"""The time left: what it is estimated from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_conversion import convert

from exl3.conversion import progress, stages
from exl3.conversion.progress import Progress


class Clock:
    """Seconds that only a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def make(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Progress]:
    return Clock(monkeypatch), Progress(Console(file=io.StringIO()))


def test_time_left_follows_this_runs_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shown = make(monkeypatch)
    shown.start(100, done=40)
    assert shown.seconds_left() is None
    clock.now += 10
    shown.advance(20)
    assert shown.seconds_left() == pytest.approx(20)


def test_a_pass_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shown = make(monkeypatch)
    shown.start(100)
    clock.now += 500
    shown.count_from_here()
    clock.now += 10
    shown.advance(50)
    assert shown.seconds_left() == pytest.approx(10)


@pytest.mark.usefixtures("fast_encoder")
def test_a_conversion_counts_after_its_pass(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(stages, "measure_sensitivity", lambda *_: seen.append("pass"))
    monkeypatch.setattr(Progress, "count_from_here", lambda _: seen.append("count"))
    assert convert([*arguments, "--max_module", "0"]) == 0
    assert seen == ["pass", "count"]
