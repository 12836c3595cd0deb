"""Bad input: one clear line, a status that is not 0, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_conversion import GOLDEN, convert, tiny_tensors, write_source

from exl3.conversion import convert_model
from exl3.conversion.arguments import ARGUMENTS, STORED, given_values, merge_resumed, with_defaults
from exl3.conversion.convert_model import main, parser, prepare
from exl3.errors import SettingsError
from exl3_ext import ExtensionMissing


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused conversion prints."""
    assert convert(argv) != 0
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    assert "Traceback" not in captured.err and not captured.out
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-b", "0.5"], "from 1 to 8, got 0.5"),
        (["-b", "9"], "from 1 to 8, got 9"),
        (["-b", "nan"], "from 1 to 8, got nan"),
        (["-b", "many"], "invalid float value: 'many'"),
        (["-hb", "0"], "head_bits: expected a whole number from 1 to 8, or 16"),
        (["-hb", "9"], "got 9"),
        (["-hb", "2.5"], "invalid int value: '2.5'"),
        (["-mb", "0"], "mtp_bits"),
        (["-cr", "0"], "cal_rows: expected 1 or more"),
        (["-cc", "1"], "cal_cols: expected 2 or more"),
        (["-ss", "-5"], "-ss --shard_size: expected 0 or more, got -5"),
        (["-cpi", "-1"], "-cpi --checkpoint_interval: expected 0 or more, got -1"),
        (["--max_module", "-1"], "max_module: expected 0 or more, got -1"),
        (["-o", "/proc/nowhere/out"], "--out_dir /proc/nowhere/out: cannot write in /proc"),
        (["-w", "/proc/nowhere/work"], "--work_dir /proc/nowhere/work: cannot write in /proc"),
        (["-cb", "mul2"], "invalid choice: 'mul2'"),
        (["--out_scales", "maybe"], "invalid choice: 'maybe'"),
        (["-d", "99"], "no device 99"),
        (["-d", "0", "1"], "one device"),
        (["-d", "x"], "invalid device_name"),
        (["-d", "0", "-dr", "1", "2"], "2 ratios for 1 devices"),
        (["-cd", "/nowhere.txt"], "/nowhere.txt: no such file"),
        (["-i", "/nowhere"], "/nowhere"),
        (["--bit", "4"], "unrecognized arguments: --bit"),
        (["-r", "--restart"], "exclude each other"),
        (["--cal_dataset", "a/b"], "exclude each other"),
    ],
)
def test_bad_values(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    assert words in refused([*arguments, *flags], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["-i", "-o", "-w", "-b"])
def test_missing(arguments: list[str], capsys: pytest.CaptureFixture[str], missing: str) -> None:
    at = arguments.index(missing)
    message = refused(arguments[:at] + arguments[at + 2 :], capsys)
    assert missing in message and "required" in message


def _broken(tmp_path: Path, kind: str) -> Path:
    source = write_source(tmp_path / "broken", tiny_tensors())
    shard = source / "model.safetensors"
    if kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1000])
    elif kind == "header":
        shard.write_bytes(b"\xff" * 100 + shard.read_bytes()[100:])
    elif kind == "no_config":
        (source / "config.json").unlink()
    elif kind == "no_tokenizer":
        (source / "tokenizer.json").unlink()
    elif kind == "architecture":
        config = json.loads((source / "config.json").read_text())
        config["architectures"] = ["NobodyKnowsThis"]
        (source / "config.json").write_text(json.dumps(config))
    elif kind == "tensor":
        tensors = tiny_tensors()
        del tensors["model.layers.1.mlp.up_proj.weight"]
        shutil.rmtree(source)
        write_source(source, tensors)
    elif kind == "not_finite":
        tensors = tiny_tensors()
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        shutil.rmtree(source)
        write_source(source, tensors)
    return source


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "model.safetensors"),
        ("header", "model.safetensors"),
        ("no_config", "config.json"),
        ("no_tokenizer", "tokenizer.json"),
        ("architecture", "NobodyKnowsThis"),
        ("tensor", "model.layers.1.mlp.up_proj"),
        ("not_finite", "model.layers.0.mlp.up_proj"),
    ],
)
@pytest.mark.usefixtures("fast_encoder")
def test_damaged_source(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    words: str,
) -> None:
    source = _broken(tmp_path, kind)
    assert convert([*arguments, "-i", str(source)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and words in error
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "work").exists() == (kind == "not_finite")  # all else is seen at once


def test_bad_setting_starts_no_job(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bad() -> None:
        raise SettingsError("EXL3_CPU_MAX_ISA: expected one of generic, avx2, got 'foo'")

    monkeypatch.setattr(convert_model, "ops", bad)
    assert "EXL3_CPU_MAX_ISA" in refused(arguments, capsys)
    assert not (tmp_path / "work").exists()


def test_missing_library_is_one_line(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise ExtensionMissing("_cpu.so does not exist: run `make build`")

    monkeypatch.setattr(convert_model, "ops", missing)
    assert "make build" in refused(arguments, capsys)
    assert not (tmp_path / "work").exists()


def test_interrupted_before_the_start(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_model, "open_model", interrupt)
    assert convert(arguments) == 130
    assert capsys.readouterr().err.strip() == "interrupted; nothing was started"


def test_already_quantised(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "is an EXL3 model already" in refused([*arguments, "-i", str(GOLDEN)], capsys)


def test_places(arguments: list[str], source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must differ" in refused([*arguments, "-o", str(source)], capsys)
    assert "must differ" in refused([*arguments, "-w", str(source)], capsys)
    assert "is a file" in refused([*arguments, "-o", str(source / "LICENSE")], capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_write_permission(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    assert "Permission denied" in refused(arguments, capsys)
    assert not (tmp_path / "work").exists()


def test_foreign_tensors_in_output(
    arguments: list[str], tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    shutil.copyfile(source / "model.safetensors", tmp_path / "out" / "other.safetensors")
    assert convert(arguments) == 1
    assert "other.safetensors" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.usefixtures("fast_encoder")
def test_python_entry(arguments: list[str], tmp_path: Path) -> None:
    in_args, job, ok, error = prepare(parser.parse_args(arguments))
    assert ok and error is None and job is not None
    assert in_args["bits"] == 2.5 and in_args["shard_size"] == 8192
    assert main(in_args, job)
    assert (tmp_path / "out" / "config.json").exists()
    _, job, ok, error = prepare(parser.parse_args(arguments))
    assert not ok and job is None and error is not None and "holds a job" in error


def test_defaults() -> None:
    values = with_defaults(
        given_values(parser.parse_args(["-i", "a", "-o", "b", "-w", "c", "-b", "4"]))
    )
    expected = {
        "bits": 4.0, "head_bits": 6, "mtp_bits": 4, "hq": False, "cal_rows": 250, "cal_cols": 2048,
        "codebook": "mul1", "out_scales": "always", "shard_size": 8192,
        "checkpoint_interval": 120, "last_checkpoint_index": -1, "sensitivity": True,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert set(STORED) < set(values) and "resume" not in STORED


def test_every_flag_has_both_forms() -> None:
    flags = {flag for a in ARGUMENTS for flag in a.flags}
    for pair in (
        "-i --in_dir", "-o --out_dir", "-w --work_dir", "-b --bits", "-hb --head_bits",
        "-mb --mtp_bits", "-hq --hq", "-cr --cal_rows", "-cc --cal_cols", "-cb --codebook",
        "--out_scales", "-ss --shard_size", "-cpi --checkpoint_interval",
        "-lcpi --last_checkpoint_index", "-d --devices", "-dr --device_ratios", "-r --resume",
        "--override_anyway", "-v --verbose", "-img --image_dump", "--max_module",
        "-pm --parallel_mode",
    ):  # fmt: skip
        assert flags.issuperset(pair.split())


def test_resumed_job_keeps_what_is_not_given() -> None:
    stored = {"bits": 3.0, "codebook": "mcg", "hq": True, "shard_size": 100}
    merged = merge_resumed({"work_dir": "w", "shard_size": 5}, stored)
    assert (merged["bits"], merged["codebook"], merged["hq"]) == (3.0, "mcg", True)
    assert merged["shard_size"] == 5 and merged["head_bits"] == 6
    assert merged["sensitivity"] is False  # as a job that knew nothing of it began
    assert merge_resumed({"work_dir": "w"}, {"sensitivity": True})["sensitivity"] is True
