"""Measured kernel choices: measuring with made-up times, and the files they are kept in."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3 import tuning
from exl3.settings import settings
from exl3.tuning import ChoiceFile, Machine, Measured, Tunable, Values, main, measure, tune
from exl3.util.file import file_lock

MACHINE = Machine("Made-Up Card 9000", "9.0", "13000", "13.0", "0.1.0 abcd")
FAST: Values = {"path": "small", "cluster": 4}
SLOW: Values = {"path": "decoded", "cluster": 0}


class Fake(Tunable):
    """Ways with given times; notes what is asked of it."""

    def __init__(self, name: str, times: dict[str, float], ways: list[Values] | None = None):
        self.name, self._times = name, times
        self._ways = ways if ways is not None else [{}, FAST, SLOW]
        self.measured: list[Values] = []
        self.taken: list[Values] = []

    def ways(self) -> list[Values]:
        return self._ways

    def seconds(self, values: Values) -> float:
        self.measured.append(values)
        return self._times[str(values.get("path", "built_in"))]

    def take(self, values: Values) -> None:
        self.taken.append(values)


TIMES = {"built_in": 10e-6, "small": 8e-6, "decoded": 12e-6}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    chosen = replace(settings(), cache_dir=tmp_path)
    monkeypatch.setattr(tuning, "settings", lambda: chosen)
    monkeypatch.setattr(tuning, "_unsaved", {})
    yield tmp_path / "tuning"


def test_the_fastest_way_is_taken() -> None:
    found = measure([Fake("a", TIMES)], 1.0)
    assert found == {"a": Measured(FAST, 8e-6, 10e-6)}


def test_a_gain_within_the_noise_is_none() -> None:
    found = measure([Fake("a", {**TIMES, "small": 9.8e-6})], 1.0)
    assert found["a"] == Measured({}, 10e-6, 10e-6)


def test_a_slow_start_is_not_held_against_the_built_in_way() -> None:
    class Waking(Fake):
        def seconds(self, values: Values) -> float:
            slow = not self.measured
            return super().seconds(values) + (2e-6 if slow else 0)

    assert measure([Waking("a", {**TIMES, "small": 11e-6})], 1.0)["a"].values == {}


def test_what_other_work_disturbs_is_not_kept() -> None:
    class Busy(Fake):
        def seconds(self, values: Values) -> float:
            busy = len(self.measured) % 4 < 2  # the other work ends in the middle
            return super().seconds(values) * (3 if busy else 1)

    disturbed, quiet = Busy("a", TIMES), Fake("b", TIMES)
    assert list(measure([disturbed, quiet], 1.0)) == ["b"]
    assert len(disturbed.measured) == 8  # a second chance
    assert tune(MACHINE, [disturbed]) == 1 and not disturbed.taken


def test_measuring_ends_with_the_time() -> None:
    now = [0.0]

    class Timed(Fake):
        def seconds(self, values: Values) -> float:
            now[0] += 0.25
            return super().seconds(values)

    several = [Timed(name, TIMES) for name in "abcd"]
    found = measure(several, 1.5, clock=lambda: now[0])
    assert list(found) == ["a", "b"] and not several[2].measured


def test_a_later_process_takes_the_same_without_measuring(folder: Path) -> None:
    first = [Fake("a", TIMES), Fake("b", {**TIMES, "decoded": 1e-6})]
    assert tune(MACHINE, first) == 0
    assert [fake.taken for fake in first] == [[FAST], [SLOW]]
    # Other times now: what was found stays.
    later = [Fake("b", TIMES), Fake("a", {**TIMES, "small": 1.0}), Fake("c", TIMES)]
    assert tune(MACHINE, later) == 0
    assert [fake.taken for fake in later] == [[SLOW], [FAST], [FAST]]
    assert not later[0].measured and not later[1].measured and later[2].measured
    assert [path.name for path in folder.glob("*.json")] == ["made_up_card_9000.json"]


@pytest.mark.parametrize("field", ["capability", "driver", "cuda", "exl3"])
def test_another_driver_or_build_measures_anew(field: str) -> None:
    tune(MACHINE, [Fake("a", TIMES)])
    other = Fake("a", {**TIMES, "small": 1.0, "decoded": 1e-6})
    tune(replace(MACHINE, **{field: "other"}), [other])
    assert other.measured and other.taken == [SLOW]
    again = Fake("a", TIMES)  # the first is still known
    tune(MACHINE, [again])
    assert not again.measured and again.taken == [FAST]


def test_old_machines_go(folder: Path) -> None:
    for version in range(9):
        tune(replace(MACHINE, driver=str(version)), [Fake("a", TIMES)])
    content = json.loads((folder / "made_up_card_9000.json").read_text())
    assert [section["machine"]["driver"] for section in content["machines"]] == list("8765")


def test_out_of_time_is_told_and_caught_up() -> None:
    tune(MACHINE, [Fake("a", TIMES)], budget_s=1.0)
    pair = [Fake("a", TIMES), Fake("b", TIMES)]
    assert tune(MACHINE, pair, budget_s=0.0) == 1
    assert pair[0].taken == [FAST] and pair[1].taken == []
    assert tune(MACHINE, pair) == 0 and pair[1].taken == [FAST]


BROKEN: list[Any] = [
    b"{",
    b"",
    b"\xff\xfe",
    b"[]",
    b'{"format": 2, "machines": []}',
    b'{"format": 1, "machines": 5}',
    b'{"format": 1, "machines": [{"machine": {}, "choices": {}}]}',
    {"values": {"path": ["small"]}, "microseconds": 1, "built_in_microseconds": 1},
    {"values": {}, "microseconds": "fast", "built_in_microseconds": 1},
    {"values": None, "microseconds": 1, "built_in_microseconds": 1},
]


@pytest.mark.parametrize("content", BROKEN)
def test_damage_is_told_and_measured_anew(
    folder: Path, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tune(MACHINE, [Fake("a", TIMES)])
    path = folder / "made_up_card_9000.json"
    if isinstance(content, dict):
        whole = json.loads(path.read_text())
        whole["machines"][0]["choices"]["a"] = content
        content = json.dumps(whole).encode()
    path.write_bytes(content)
    fake = Fake("a", TIMES)
    tune(MACHINE, [fake])
    assert fake.measured and fake.taken == [FAST]
    assert "made_up_card_9000.json" in caplog.text
    assert caplog.text.count("measured again") == 1
    again = Fake("a", TIMES)
    tune(MACHINE, [again])
    assert not again.measured


def test_a_way_that_does_not_exist_is_measured_anew(folder: Path) -> None:
    """An edited file, or kernels that have changed: nothing is passed on unchecked."""
    tune(MACHINE, [Fake("a", TIMES)])
    path = folder / "made_up_card_9000.json"
    path.write_text(path.read_text().replace('"cluster": 4', '"cluster": 77'))
    fake = Fake("a", TIMES)
    tune(MACHINE, [fake])
    assert fake.measured and fake.taken == [FAST]


def test_without_a_folder_choices_live_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    chosen = replace(settings(), cache_dir=tmp_path / "file" / "below")
    monkeypatch.setattr(tuning, "settings", lambda: chosen)
    for name in "aabb":
        fake = Fake(name, TIMES)
        assert tune(MACHINE, [fake]) == 0 and fake.taken == [FAST]
    assert not fake.measured  # the second of its name
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "not kept" in warnings[0].getMessage()


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_two_processes_do_not_measure_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_WAIT_SECONDS", 0.1)
    lock = folder / "made_up_card_9000.lock"
    with file_lock(lock, 0.0) as held:
        assert held
        fake = Fake("a", TIMES)
        assert tune(MACHINE, [fake]) == 1
        assert not fake.measured and not fake.taken  # built in, rather than wrong times
    assert tune(MACHINE, [fake]) == 0 and fake.taken == [FAST]


def _tune_in_a_process(cache: Path, name: str, start: Any) -> None:
    class Slow(Fake):
        def seconds(self, values: Values) -> float:
            with (cache / "measured").open("a") as file:
                file.write(f"{name}\n")
            return super().seconds(values)

    chosen = replace(settings(), cache_dir=cache)
    tuning.settings = lambda: chosen  # type: ignore[assignment]
    start.wait()
    tune(MACHINE, [Slow("shared", TIMES), Slow(name, TIMES)])


@pytest.mark.skipif(os.name != "posix", reason="processes are forked")
def test_processes_share_what_they_find(tmp_path: Path, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Event()
    names = [f"only {i}" for i in range(4)]
    processes = [
        context.Process(target=_tune_in_a_process, args=(tmp_path, name, start)) for name in names
    ]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    known = ChoiceFile(MACHINE).read()
    assert set(known) == {"shared", *names}
    calls = (tmp_path / "measured").read_text().split("\n")[:-1]
    assert len(calls) == 4 * (len(names) + 1)  # "shared" by one of them


def test_command_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main([]) == 0
    assert "nothing is kept" in capsys.readouterr().out
    tune(MACHINE, [Fake("linear k=128 n=256 bits=4 mul1 rows=1..1", TIMES)])
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "Made-Up Card 9000" in shown and "k=128 n=256" in shown
    assert "small 4" in shown and "8.0 us" in shown and "1.25 x" in shown
    assert main(["--clear"]) == 0
    assert "1 files removed" in capsys.readouterr().out and not list(folder.glob("*.json"))
    (folder / "x.json").write_text("{")
    assert main([]) == 1
    assert "x.json" in capsys.readouterr().err
    assert main(["--clear"]) == 0


def test_measuring_needs_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("exl3_ext.has_cuda", lambda: False)
    assert main(["--measure", str(tmp_path)]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
