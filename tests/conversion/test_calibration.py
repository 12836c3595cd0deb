"""Calibration tokens: exactly as many as asked for, the same every time."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny_conversion import VOCAB

from exl3.conversion import calibration, corpus, self_text
from exl3.conversion.calibration import CalibrationPlan, make_calibration
from exl3.conversion.corpus import user_texts
from exl3.errors import ConfigError, FormatError
from exl3.model import Config
from exl3.tokenizer import Tokenizer


@pytest.fixture
def config(source: Path) -> Config:
    return Config.from_directory(str(source))


def test_default_mix(config: Config) -> None:
    plan = CalibrationPlan(24, 32, seed=5)
    first, second = make_calibration(config, plan), make_calibration(config, plan)
    ids = first.input_ids
    assert ids.shape == (24, 32) and ids.dtype == torch.int64
    assert int(ids.min()) >= 0 and int(ids.max()) < VOCAB
    assert torch.equal(ids, second.input_ids) and first.record == second.record
    assert "6 sampled" in first.record["source"] and "1 random" in first.record["source"]
    other = make_calibration(config, CalibrationPlan(24, 32, seed=6))
    assert other.record["ids_sha256"] != first.record["ids_sha256"]
    assert len({tuple(row) for row in ids.tolist()}) >= 18  # only the model may repeat itself


def test_large_models_do_not_sample(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl3.conversion.self_text.MAX_WEIGHTS", 10)
    record = make_calibration(config, CalibrationPlan(8, 16)).record
    assert "sampled" not in record["source"]


def test_openings_go_side_by_side(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row begins with its opening, whatever the others have."""
    monkeypatch.setattr(self_text, "openings", lambda _: [[1], [5, 6, 7]])
    text = self_text.sample_text(config, Tokenizer(config), seed=0, tokens=12)
    half = self_text.BATCH // 2
    assert text.shape == (2 * half, 12)
    assert bool((text[:half, 0] == 1).all())
    assert torch.equal(text[half:, :3], torch.tensor([5, 6, 7]).expand(half, 3))
    assert int(text.min()) >= 0 and int(text.max()) < VOCAB


def test_short_text_wraps(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a few words")
    ids = make_calibration(config, CalibrationPlan(3, 200, cal_data=str(file))).input_ids
    assert ids.shape == (3, 200)
    assert len(ids.unique()) <= 12


@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (1, 500), (7, 3), (40, 64)])
def test_exact_size(config: Config, text_file: Path, rows: int, cols: int) -> None:
    plan = CalibrationPlan(rows, cols, cal_data=str(text_file))
    assert make_calibration(config, plan).input_ids.shape == (rows, cols)


def test_directory_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    (tmp_path / ".hidden").write_text("never")
    lines = [json.dumps({"text": "third"}), "", json.dumps({"content": "fourth"})]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    assert user_texts(str(tmp_path)) == ["first", "second", "third", "fourth"]


def test_bad_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        user_texts(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="no text found"):
        user_texts(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(FormatError, match=r"x.bin: not UTF-8"):
        user_texts(str(tmp_path))
    (tmp_path / "x.bin").unlink()
    (tmp_path / "y.jsonl").write_text('{"text": "fine"}\n{"other": 1}\n')
    with pytest.raises(FormatError, match=r"y.jsonl, line 2: expected an object with text"):
        user_texts(str(tmp_path))


def test_public_data_set(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`huggingface_hub` is replaced: no network here."""
    files = {"data/train-0.jsonl": '{"words": "some text of the set"}\n' * 50, "README.md": "no"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    hub = types.ModuleType("huggingface_hub")
    api = types.SimpleNamespace(list_repo_files=lambda repo, repo_type: list(files))
    hub.HfApi = lambda: api  # type: ignore[attr-defined]
    hub.hf_hub_download = lambda repo, name, repo_type: str(tmp_path / name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    plan = CalibrationPlan(2, 30, cal_dataset="someone/texts:train/words")
    result = make_calibration(config, plan)
    assert result.input_ids.shape == (2, 30)
    assert result.record["source"] == "data set: someone/texts:train/words"
    with pytest.raises(ConfigError, match=r"no \.txt, \.jsonl or .parquet file with 'test'"):
        corpus.dataset_texts("someone/texts:test", 100)
    api.list_repo_files = None
    with pytest.raises(ConfigError, match="cannot fetch"):
        corpus.dataset_texts("someone/texts", 100)


def test_texts_of_every_installation() -> None:
    assert len(corpus.prose(0, 20_000)) >= 20_000
    assert "def " in corpus.source_code(0, 20_000)
    assert corpus.prose(0, 5_000) == corpus.prose(0, 5_000) != corpus.prose(1, 5_000)
    assert sum(calibration._SHARES.values()) < 1
