"""Measuring versions of a model and putting the best of them together."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_conversion import convert, tiny_tensors, write_source

from exl3 import Config, Model, evaluation
from exl3.conversion import measure_model, optimize_model
from exl3.conversion.choose import choose
from exl3.conversion.measurement import Candidate, Group, GroupResult, Measurement, linear_groups
from exl3.errors import ConfigError
from exl3.loader import SafetensorsCollection
from exl3.modules import Linear


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model and two conversions of it."""
    root = tmp_path_factory.mktemp("family")
    text = root / "text.txt"
    text.write_text(" ".join(f"word {i} of {i * i % 97} and more;" for i in range(300)))
    out = {"source": write_source(root / "source", tiny_tensors()), "text": text}
    for bits in ("1", "3"):
        out[bits] = root / bits
        places = ["-i", str(out["source"]), "-o", str(out[bits]), "-w", str(root / f"work{bits}")]
        options = ["-hb", bits, "-cr", "6", "-cc", "48", "-cd", str(text)]
        assert convert([*places, "-b", bits, *options]) == 0
    return out


def measure(family: dict[str, Path], out: Path, *more: str) -> int:
    versions = [str(family[bits]) for bits in ("1", "3")]
    places = ["-i", *versions, "-r", str(family["source"]), "-o", str(out)]
    size = ["-cr", "4", "-cc", "64", "-cd", str(family["text"])]
    return measure_model.run([*places, *size, *more])


@pytest.fixture(scope="module")
def measured(family: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("measured") / "m.json"
    assert measure(family, file, "-l", "2") == 0
    return file


def load(directory: Path) -> Model:
    config = Config.from_directory(str(directory))
    config.infer_params.plain_dtype = torch.float32
    model = Model.from_config(config)
    model.load()
    return model


@pytest.mark.parametrize(("level", "count"), [(0, 3), (1, 5), (2, 9), (3, 15)])
def test_levels(family: dict[str, Path], level: int, count: int) -> None:
    model = Model.from_config(Config.from_directory(str(family["source"])))
    groups = linear_groups(model, level)
    assert len(groups) == count and [g.is_head for g in groups].count(True) == 1
    keys = [key for group in groups for key in group.keys]
    assert sorted(keys) == sorted(m.key for m in model if isinstance(m, Linear))


def test_one_group_is_measured_as_if_it_were_in_the_model(
    family: dict[str, Path], measured: Path, tmp_path: Path
) -> None:
    """Against files in which just that group is exchanged."""
    values = json.loads(measured.read_text())
    ids = torch.arange(256).reshape(4, 64) % 500
    reference = load(family["source"])
    config = Config.from_directory(str(family["3"]))
    found = {r.group.name: r for r in Measurement(reference, [config], ids, 0).run(2, len)}
    kept = {r.group.name: r for r in Measurement(reference, [config], ids, 1 << 30).run(2, len)}
    assert list(found) == [g["name"] for g in values["groups"]]
    group = next(r for r in found.values() if "attn_in" in r.group.name)
    for result in (group, found["lm_head"]):
        model = load(family["source"])
        for layer in model:
            if isinstance(layer, Linear) and layer.key in result.group.keys:
                layer.unload()
                layer.load(config.stc)
        flat = ids.reshape(1, -1)
        kl = evaluation.kl_divergence(model, reference, flat, chunk=64)
        # `kl_divergence` reads the same rows, each by itself.
        assert result.candidates[0].kl == pytest.approx(kl.mean, rel=0.02)
        other = kept[result.group.name].candidates[0]
        assert other.kl == pytest.approx(result.candidates[0].kl, rel=0.02)
    again = {r.group.name: r for r in Measurement(reference, [config], ids, 0).run(2, len)}
    assert again == found  # the reference is as it was


def test_more_bits_cost_less_quality(measured: Path) -> None:
    total = torch.zeros(2)
    for group in json.loads(measured.read_text())["groups"]:
        assert [c["bits"] / group["numel"] for c in group["candidates"]] == [1, 3]
        kl = torch.tensor([c["kl"] for c in group["candidates"]])
        assert (kl > 0).all()
        total += kl
    assert total[0] > 4 * total[1]


@pytest.mark.parametrize("bits", [1.0, 1.6, 2.4, 3.0])
def test_the_model_is_put_together(
    bits: float, family: dict[str, Path], measured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mixed"
    assert optimize_model.run(["-m", str(measured), "-o", str(out), "-b", str(bits)]) == 0
    config = Config.from_directory(str(out))
    model = load(out)
    body = [m for m in model if isinstance(m, Linear) and not m.is_head]
    bits_of = {m.key: config.stc.info(f"{m.key}.trellis").shape[-1] // 16 for m in body}
    spent = sum(bits_of[m.key] * m.weights_numel() for m in body)
    average = spent / sum(m.weights_numel() for m in body)
    assert average <= bits and average > bits - 0.7
    assert config.config_dict["quantization_config"]["bits"] == round(average, 2)
    assert config.config_dict["quantization_config"]["head_bits"] == 3
    if bits in (1.0, 3.0):
        one, other = SafetensorsCollection(out), SafetensorsCollection(family[str(int(bits))])
        for key in one.keys():  # noqa: SIM118
            if not key.startswith("lm_head"):
                assert torch.equal(one.get(key), other.get(key))
    else:
        assert len(set(bits_of.values())) > 1
    storage = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    assert storage["lm_head"]["bits_per_weight"] == 3
    assert (out / "LICENSE").is_file() and not list(out.glob("*.bin"))
    with_text = Config.from_directory(str(family["source"]))
    assert model.forward(torch.tensor([[5, 6, 7]])).shape[-1] == with_text.vocab_size


def test_versions_that_moved_are_known_by_their_contents(
    family: dict[str, Path], measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = [shutil.copytree(family[bits], tmp_path / f"m{bits}") for bits in ("3", "1")]
    command = ["-m", str(measured), "-b", "2", "-o"]
    assert optimize_model.run([*command, str(tmp_path / "a")]) == 0
    assert optimize_model.run([*command, str(tmp_path / "b"), "-i", *map(str, moved)]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
    few = [str(moved[0]), str(moved[0])]
    assert optimize_model.run([*command, str(tmp_path / "c"), "-i", *few]) == 1
    assert "not as it was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["-l", "4"], "--level"),
        (["-cc", "1"], "--cal_cols"),
        (["-d", "1"], "--device"),
        (["-ms", "-1"], "--max_sys_memory"),
        (["-o", "nowhere/x.json"], "nowhere"),
        (["-r", "nowhere"], "nowhere"),
        (["-i", "one"], "two or more"),
        (["-q"], "-q"),
    ],
)
def test_measure_refuses(
    family: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    words: str,
) -> None:
    assert measure(family, tmp_path / "x.json", *change) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "x.json").exists()


def test_other_models_are_refused(
    family: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(family["source"], tmp_path / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "hidden_size": 256}))
    assert measure(family, tmp_path / "x.json", "-r", str(other)) == 1
    assert "hidden_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda v: v.update(format="x"), "format"),
        (lambda v: v.pop("groups"), "damaged"),
        (lambda v: v["groups"].pop(), "other layers"),
        (lambda v: v["groups"][0]["candidates"].clear(), "damaged"),
        (lambda v: v["groups"][0]["candidates"][0].update(bits=1), "measurement says 1"),
    ],
)
def test_damaged_measurements(
    edit, words: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(measured.read_text())
    edit(values)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(values))
    assert optimize_model.run(["-m", str(file), "-o", str(tmp_path / "o"), "-b", "1.0"]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ") and not (tmp_path / "o").exists()


def group(numel: int, *candidates: tuple[float, float], head: bool = False) -> GroupResult:
    return GroupResult(
        Group("g", 1, ("k",), head),
        numel,
        tuple(Candidate(i, int(bits * numel), kl) for i, (bits, kl) in enumerate(candidates)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_choice_against_all_choices(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)

    def draw() -> float:
        return float(torch.rand(1, generator=source))

    results = []
    for _ in range(7):
        scale = draw() ** 3 + 0.01
        kl = [scale * (0.6 + 0.8 * draw()) * 4.0**-bits for bits in (2, 3, 4)]
        results.append(group(100 + int(900 * draw()), *zip((2, 3, 4), kl, strict=True)))
    numel = sum(r.numel for r in results)
    for bits in (2.0, 2.4, 3.1, 3.7, 4.0):
        chosen = choose(results, bits)
        assert sum(c.bits for c in chosen) <= bits * numel + 1e-6
        best = min(
            sum(c.kl for c in combination)
            for combination in itertools.product(*(r.candidates for r in results))
            if sum(c.bits for c in combination) <= bits * numel + 1e-6
        )
        largest = max(r.candidates[0].kl for r in results)
        assert sum(c.kl for c in chosen) <= best + 0.5 * largest
    with pytest.raises(ConfigError, match=r"2\.000"):
        choose(results, 1.9)


def test_choice_ignores_what_is_worse_for_more_bits() -> None:
    results = [group(100, (2, 0.1), (3, 0.2), (4, 0.05)), group(10, (2, 9.0), (8, 1.0), head=True)]
    assert [c.version for c in choose(results, 3.5)] == [0, 1]
    assert [c.version for c in choose(results, 4.0)] == [2, 1]
