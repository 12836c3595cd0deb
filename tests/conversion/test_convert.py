"""Whole conversions of a tiny model: what is written, and that it is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_conversion import GOLDEN, convert, digests, tiny_tensors, write_source

from exl3.evaluation import all_logits, kl_divergence
from exl3.loader import load_tensors
from exl3.model import Config, Model
from exl3.modules import Batch, Embedding


def load(folder: Path) -> Model:
    model = Model.from_config(Config.from_directory(str(folder)))
    model.load()
    return model


@pytest.fixture(scope="module")
def converted(source: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model at 4 bits with a 6-bit head, by the real encoder."""
    folder = tmp_path_factory.mktemp("converted")
    places = ["-i", str(source), "-o", str(folder / "out"), "-w", str(folder / "work")]
    rest = ["-b", "4", "-cr", "8", "-cc", "64", "-cd", str(text_file)]
    assert convert([*places, *rest]) == 0
    return folder / "out"


def test_logits_stay_near(source: Path, converted: Path) -> None:
    ids = torch.randint(512, (1, 96), generator=torch.Generator().manual_seed(0))
    plain, quantised = load(source), load(converted)
    divergence = kl_divergence(quantised, plain, ids)
    assert 0 < divergence.mean < 0.1
    exact = all_logits(plain, ids)[0][..., :512]
    error = all_logits(quantised, ids)[0][..., :512] - exact
    assert float(error.square().sum() / exact.square().sum()) < 0.03


def test_files(source: Path, converted: Path) -> None:
    """Same structure as a directory that another engine wrote."""
    names = set(digests(converted))
    assert names == {
        "config.json", "quantization_config.json", "conversion_report.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE",
    }  # fmt: skip
    config = json.loads((converted / "config.json").read_text())
    golden = json.loads((GOLDEN / "config.json").read_text())
    ours, theirs = config.pop("quantization_config"), golden["quantization_config"]
    assert list(ours) == list(theirs)
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}
    assert ours["bits"] == 4.0 and ours["calibration"] == {"rows": 8, "cols": 64}
    assert config == json.loads((source / "config.json").read_text())


def test_tensor_storage(converted: Path) -> None:
    ours, theirs = (
        json.loads((folder / "quantization_config.json").read_text())
        for folder in (converted, GOLDEN)
    )
    assert list(ours) == list(theirs)
    storage = ours["tensor_storage"]
    expected = [key for key in theirs["tensor_storage"] if not key.startswith("model.layers.2")]
    assert set(storage) == set(expected)
    tensors = load_file(converted / "model.safetensors")
    listed = {}
    for key, entry in storage.items():
        golden = theirs["tensor_storage"][key]
        assert list(entry) == list(golden)
        assert list(entry["stored_tensors"]) == list(golden["stored_tensors"])
        assert entry.get("mul1_multiplier") == golden.get("mul1_multiplier")
        listed |= entry["stored_tensors"]
    assert set(listed) == set(tensors)
    for name, tensor in tensors.items():
        entry = listed[name]
        assert entry["shape"] == list(tensor.shape) and entry["dtype"] == str(tensor.dtype)
        assert entry["n_bytes"] == tensor.nbytes


def test_report(source: Path, converted: Path) -> None:
    report = json.loads((converted / "conversion_report.json").read_text())
    assert report["source_fingerprint"] == Config.from_directory(str(source)).source.fingerprint()
    assert report["calibration"]["source"].startswith("files: ")
    assert report["options"]["seed"] == 0 and report["bad_rows"] == []
    modules = {m["module"]: m for m in report["modules"]}
    assert list(modules) == ["model.layers.0", "model.layers.1", "lm_head"]
    for module in modules.values():
        assert 0 < module["output_error"] < 0.05
        for layer in module["layers"]:
            assert layer["bits"] == (6 if layer["key"] == "lm_head" else 4)
            assert 0 < layer["proxy_error"] < layer["weight_error"] * 1.5 < 0.02


def test_tied_head_becomes_its_own(converted: Path, source: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    assert tensors["lm_head.trellis"].shape == (8, 32, 96)
    plain = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["model.embed_tokens.weight"], plain)


@pytest.mark.usefixtures("fast_encoder")
class TestOptions:
    """Options of the pipeline, with a stand-in for the encoder."""

    def test_same_command_same_bytes(self, arguments: list[str], tmp_path: Path) -> None:
        assert convert(arguments) == 0
        first = digests(tmp_path / "out")
        assert convert([*arguments, "--restart"]) == 0
        assert digests(tmp_path / "out") == first

    def test_head_left_alone(self, arguments: list[str], tmp_path: Path) -> None:
        assert convert([*arguments, "-hb", "16"]) == 0
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert not [name for name in tensors if name.startswith("lm_head")]
        load(tmp_path / "out")

    @pytest.mark.parametrize("codebook", ["mcg", "3inst"])
    def test_codebook(self, arguments: list[str], tmp_path: Path, codebook: str) -> None:
        assert convert([*arguments, "-cb", codebook]) == 0
        names = load_file(tmp_path / "out" / "model.safetensors")
        assert ("lm_head.mcg" in names) == (codebook == "mcg")
        assert "lm_head.mul1" not in names
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["quantization_config"]["codebook"] == codebook

    @pytest.mark.parametrize(("bits", "expected"), [("1.0", {1}), ("2.5", {2, 3}), ("8", {8})])
    def test_bits(
        self, arguments: list[str], tmp_path: Path, bits: str, expected: set[int]
    ) -> None:
        assert convert([*arguments, "-b", bits]) == 0
        storage = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
        rates = {
            key: entry["bits_per_weight"]
            for key, entry in storage["tensor_storage"].items()
            if "bits_per_weight" in entry
        }
        assert rates.pop("lm_head") == 3
        assert set(rates.values()) == expected
        assert float(bits) - 0.5 < storage["bits"] <= float(bits)

    def test_shards(self, arguments: list[str], tmp_path: Path) -> None:
        """A shard of 1 MB never fills here, so it is one file; 0 asks for one file."""
        assert convert([*arguments, "-ss", "0"]) == 0
        one = digests(tmp_path / "out")["model.safetensors"]
        assert convert(["-w", str(tmp_path / "work"), "-r", "-ss", "1"]) == 0
        assert digests(tmp_path / "out")["model.safetensors"] == one

    def test_stop_after_a_module(self, arguments: list[str], tmp_path: Path) -> None:
        assert convert([*arguments, "--max_module", "1"]) == 0
        assert not (tmp_path / "out").exists()
        job = json.loads((tmp_path / "work" / "ckpt" / "job.json").read_text())
        assert job["next_module_idx"] == 2
        assert convert(["-w", str(tmp_path / "work"), "-r"]) == 0
        first = digests(tmp_path / "out")
        assert convert([*arguments, "--restart"]) == 0
        assert digests(tmp_path / "out") == first

    def test_images(self, arguments: list[str], tmp_path: Path) -> None:
        assert convert([*arguments, "-img"]) == 0
        images = sorted((tmp_path / "work" / "images").glob("*.png"))
        assert len(images) == 15
        assert images[0].read_bytes().startswith(b"\x89PNG")

    def test_own_head(self, arguments: list[str], tmp_path: Path) -> None:
        tensors = tiny_tensors(tied=False)
        tensors["vision.patch.weight"] = torch.ones(3, dtype=torch.float32)
        source = write_source(tmp_path / "untied", tensors)
        assert convert([*arguments, "-i", str(source)]) == 0
        written = load_tensors(tmp_path / "out" / "model.safetensors")
        assert "lm_head.weight" not in written and "lm_head.trellis" in written
        assert written["vision.patch.weight"].dtype == torch.float16  # copied: no module has it

    def test_overflowing_row_is_left_out(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rare = _overflowing_token(arguments, tmp_path, monkeypatch)
        assert convert([*arguments, "--restart", "-cr", "12"]) == 0
        report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
        assert [e["module"] for e in report["bad_rows"]] == ["model.embed_tokens"]
        ids = load_tensors(tmp_path / "work" / "ckpt" / "original_input_ids.safetensors")
        (row,) = (ids["input_ids"] == rare).any(1).nonzero()[:, 0].tolist()
        assert report["bad_rows"][0]["row"] == row
        for module in report["modules"]:
            assert all(layer["feedback"] for layer in module["layers"])

    def test_too_many_overflowing_rows(
        self,
        arguments: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        _overflowing_token(arguments, tmp_path, monkeypatch)
        assert convert([*arguments, "--restart", "-cr", "6"]) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert "1 of 6 calibration rows are no longer finite" in message
        assert not (tmp_path / "out").exists()


def _overflowing_token(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Make a token that occurs in one calibration row of 12 or of 6 embed as infinite."""
    assert convert([*arguments, "-cr", "12", "--max_module", "0"]) == 0
    file = tmp_path / "work" / "ckpt" / "original_input_ids.safetensors"
    ids = load_tensors(file)["input_ids"]
    rare = next(t for t in ids[0].tolist() if not (ids[1:] == t).any())
    plain = Embedding.forward

    def forward(self: Embedding, x: torch.Tensor, batch: Batch | None = None) -> torch.Tensor:
        y = plain(self, x, batch).clone()
        y[x == rare] = float("inf")
        return y

    monkeypatch.setattr(Embedding, "forward", forward)
    return rare
