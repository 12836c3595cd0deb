"""A conversion that is killed at any moment and resumed writes the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_conversion import convert, digests, tiny_tensors, write_source

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for the end of the process: nothing that comes after it happens."""


class Faults:
    """Counts the steps by which a conversion changes the disk; acts at one of them."""

    STEPS = ("replace", "fsync", "mkdir", "unlink", "rmdir", "open")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.limit: int | None = None
        self.action: Callable[[str], None] = lambda path: None
        self.dead = False
        for name in self.STEPS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return original(*args, **kwargs)
            if self.dead:  # clean-up code of a process that no longer exists
                raise Killed
            self.count += 1
            if self.count == self.limit:
                self.action(str(args[0]))
            return original(*args, **kwargs)

        return step

    def kill_at(self, step: int) -> None:
        def die(path: str) -> None:
            self.dead = True
            raise Killed

        self.count, self.limit, self.action, self.dead = 0, step, die, False

    def fail_at(self, step: int, number: int) -> None:
        def fail(path: str) -> None:
            raise OSError(number, os.strerror(number), path)

        self.count, self.limit, self.action, self.dead = 0, step, fail, False

    def off(self) -> None:
        self.count, self.limit, self.dead = 0, None, False


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, fast_encoder: None) -> Faults:
    return Faults(monkeypatch)


def _with_places(arguments: list[str], folder: Path) -> list[str]:
    places = {"-o": str(folder / "out"), "-w": str(folder / "work")}
    pairs = zip(["", *arguments], arguments, strict=False)
    return [places.get(flag, value) for flag, value in pairs]


def _go_on(argv: list[str], work: Path) -> int:
    """Resume, or start again if the job had not been set up when it was killed."""
    if (work / "args.json").exists():
        return convert(["-w", str(work), "-r"])
    return convert([*argv, "--restart"])


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step(
    arguments: list[str], tmp_path: Path, faults: Faults, stride: int
) -> None:
    argv = [*arguments, "-cpi", "0"]
    faults.off()
    assert convert(_with_places(argv, tmp_path / "whole")) == 0
    steps, expected = faults.count, digests(tmp_path / "whole" / "out")
    assert steps > 100
    for step in range(1, steps + 1, stride):
        folder = tmp_path / str(step)
        faults.kill_at(step)
        with pytest.raises(Killed):
            convert(_with_places(argv, folder))
        faults.off()
        assert _go_on(_with_places(argv, folder), folder / "work") == 0
        assert digests(folder / "out") == expected, f"killed at step {step} of {steps}"


def test_killed_again_and_again(arguments: list[str], tmp_path: Path, faults: Faults) -> None:
    """Each run gets a few steps further."""
    argv = [*arguments, "-cpi", "0"]
    faults.off()
    assert convert(_with_places(argv, tmp_path / "whole")) == 0
    expected = digests(tmp_path / "whole" / "out")
    rng = random.Random(0)
    for _ in range(60):
        faults.kill_at(rng.randrange(12, 45))
        try:
            assert _go_on(argv, tmp_path / "work") == 0
            break
        except Killed:
            continue
    faults.off()
    assert _go_on(argv, tmp_path / "work") == 0
    assert digests(tmp_path / "out") == expected


def test_full_disk(
    arguments: list[str], tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that names a file; the job resumes."""
    argv = [*arguments, "-cpi", "0"]
    faults.off()
    assert convert(_with_places(argv, tmp_path / "whole")) == 0
    steps, expected = faults.count, digests(tmp_path / "whole" / "out")
    for step in range(2, steps, 17):
        folder = tmp_path / str(step)
        faults.fail_at(step, errno.ENOSPC)
        capsys.readouterr()
        status = convert(_with_places(argv, folder))
        lines = capsys.readouterr().err.strip().splitlines()
        faults.off()
        if status:  # a failing unlink or directory fsync may be harmless
            assert lines[-1].startswith("error: ") and str(folder) in lines[-1]
            assert "No space left" in lines[-1]
            assert _go_on(_with_places(argv, folder), folder / "work") == 0
        assert digests(folder / "out") == expected


def test_sigkill(arguments: list[str], tmp_path: Path) -> None:
    """The real program, killed by the system at random moments."""
    argv = [*arguments, "-cpi", "0", "-b", "2", "-hb", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251

    def start(args: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "convert.py"), *args]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)

    begun = time.monotonic()
    whole = start(_with_places(argv, tmp_path / "whole"))
    assert whole.communicate()[1] and whole.returncode == 0
    duration = time.monotonic() - begun
    rng = random.Random(1)
    for trial in range(2):
        folder = tmp_path / str(trial)
        args = _with_places(argv, folder)
        kills = 0
        while True:
            process = start(args)
            try:
                process.wait(duration * rng.uniform(0.4, 1.1) if kills < 2 else 10 * duration + 60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, process.stderr and process.stderr.read()
            started = (folder / "work" / "args.json").exists()
            args = ["-w", str(folder / "work"), "-r"] if started else [*args, "--restart"]
        assert digests(folder / "out") == digests(tmp_path / "whole" / "out")


@pytest.mark.usefixtures("fast_encoder")
class TestChanges:
    """What may and may not differ between start and resume."""

    @pytest.fixture
    def stopped(self, arguments: list[str], tmp_path: Path) -> list[str]:
        assert convert([*arguments, "--max_module", "1"]) == 0
        return ["-w", str(tmp_path / "work"), "-r"]

    @pytest.mark.parametrize(
        ("flags", "name", "old"),
        [
            (["-b", "3.0"], "bits", "2.5"),
            (["-hb", "5"], "head_bits", "3"),
            (["-cr", "7"], "cal_rows", "6"),
            (["-cb", "mcg"], "codebook", "mul1"),
            (["--out_scales", "never"], "out_scales", "always"),
            (["-hq"], "hq", "False"),
            (["--seed", "4"], "seed", "0"),
        ],
    )
    def test_fixed(
        self,
        stopped: list[str],
        capsys: pytest.CaptureFixture[str],
        flags: list[str],
        name: str,
        old: str,
    ) -> None:
        assert convert([*stopped, *flags]) == 1
        message = capsys.readouterr().err
        assert f"--{name}" in message and f"with {old}," in message
        assert f"now {flags[-1] if len(flags) > 1 else True} " in message
        assert convert([*stopped, *flags[:1], old] if len(flags) > 1 else stopped) == 0

    def test_fixed_can_be_overridden(self, stopped: list[str], tmp_path: Path) -> None:
        assert convert([*stopped, "-hb", "5", "--override_anyway"]) == 0
        report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
        assert report["options"]["head_bits"] == 5

    def test_output_may_move(self, stopped: list[str], tmp_path: Path) -> None:
        assert convert([*stopped, "-o", str(tmp_path / "other"), "-ss", "1"]) == 0
        assert (tmp_path / "other" / "config.json").exists()
        assert not (tmp_path / "out").exists()

    def test_other_source(
        self, stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = write_source(tmp_path / "other_model", tiny_tensors(seed=1))
        before = json.loads((tmp_path / "work" / "args.json").read_text())["source_fingerprint"]
        assert convert([*stopped, "-i", str(other)]) == 1
        message = capsys.readouterr().err
        assert "changed since this job was started" in message and before in message

    def test_source_changed_by_hand(
        self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_source(tmp_path / "mine", tiny_tensors())
        argv = [*arguments, "-i", str(source)]
        assert convert([*argv, "--max_module", "1"]) == 0
        resume = ["-w", str(tmp_path / "work"), "-r"]
        tensors = tiny_tensors()
        tensors["model.norm.weight"] += 1
        shutil.rmtree(source)
        write_source(source, tensors)
        assert convert(resume) == 1
        message = capsys.readouterr().err
        assert f"source {source} changed since this job was started" in message
        assert "--restart" in message and not (tmp_path / "out").exists()
        del tensors["model.norm.weight"]
        shutil.rmtree(source)
        assert convert(resume) == 1
        assert str(source) in capsys.readouterr().err

    def test_same_source_elsewhere(self, stopped: list[str], source: Path, tmp_path: Path) -> None:
        moved = tmp_path / "moved"
        os.symlink(source, moved)
        assert convert([*stopped, "-i", str(moved)]) == 0

    def test_used_work_directory(
        self, stopped: list[str], arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert convert(arguments) == 1
        assert "holds a job already" in capsys.readouterr().err
        assert convert(stopped) == 0

    def test_finished_job_writes_again(self, stopped: list[str], tmp_path: Path) -> None:
        assert convert(stopped) == 0
        first = digests(tmp_path / "out")
        (tmp_path / "out" / "model.safetensors").unlink()
        assert convert(stopped) == 0
        assert digests(tmp_path / "out") == first

    def test_nothing_to_resume(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert convert(["-w", str(tmp_path / "empty"), "-r"]) == 1
        assert "no conversion to resume" in capsys.readouterr().err
