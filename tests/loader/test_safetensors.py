"""Collections of safetensors files: good ones, odd ones and hostile ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from exl3.errors import ConfigError, Exl3Error, FormatError, StorageError
from exl3.loader import (
    SafetensorsCollection,
    VariantSafetensorsCollection,
    load_tensors,
    open_source,
)
from exl3.loader.dtypes import DTYPES

ONE_FOLDER = HealthCheck.function_scoped_fixture
Limit = Callable[[int, int], AbstractContextManager[None]]
GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_golden_files_equal_the_library() -> None:
    for path in [*GOLDEN.glob("*.safetensors"), GOLDEN / "tiny_llama_exl3"]:
        ours = SafetensorsCollection(path)
        theirs = load_file(path if path.is_file() else path / "model.safetensors")
        assert ours.keys() == sorted(theirs)
        for key, tensor in theirs.items():
            got = ours.get(key)
            assert ours.info(key).shape == tuple(tensor.shape) == tuple(got.shape)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
        ours.close()


@pytest.mark.parametrize("method", [None, "mt_fread", "python"])
def test_large_tensor_and_conversion(tmp_path: Path, method: str | None) -> None:
    tensor = torch.arange(9_000_001, dtype=torch.int32).remainder(1000).to(torch.bfloat16)
    save_file({"pad": torch.ones(3), "x": tensor}, tmp_path / "a.safetensors")
    stc = SafetensorsCollection(tmp_path, method)
    assert torch.equal(stc.get("x"), tensor)
    assert torch.equal(stc.get("x", dtype=torch.float32), tensor.float())
    assert stc.metrics.tensors == 2
    assert stc.metrics.n_bytes == 2 * 18_000_002
    stc.close()
    assert torch.equal(stc.get("pad"), torch.ones(3))


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((3_000_000,), i, dtype=torch.int32) for i in range(4)}
    save_file(tensors, tmp_path / "a.safetensors")
    stc = SafetensorsCollection(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(stc.get, [f"t{i % 4}" for i in range(16)]))
    assert all(torch.equal(t, tensors[f"t{i % 4}"]) for i, t in enumerate(read))
    assert stc.metrics.tensors == 16


def test_metrics_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "a.safetensors")
    stc = SafetensorsCollection(tmp_path)
    stc.get("x")
    stc.metrics.print()
    assert "read 1 tensors" in capsys.readouterr().out


def test_every_dtype_and_zero_sizes(tmp_path: Path) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, dtype in DTYPES.items():
        end = position + 2 * dtype.itemsize
        header[name] = entry(position, end, [2], name)
        header[f"empty.{name}"] = entry(end, end, [0, 7], name)
        position = end
    header["scalar"] = entry(position, position + 4, [], "F32")
    raw_file(tmp_path / "a.safetensors", header, bytes(position + 4))
    stc = SafetensorsCollection(tmp_path)
    for name, dtype in DTYPES.items():
        assert stc.get(name).dtype == stc.get(f"empty.{name}").dtype == dtype
        assert stc.get(f"empty.{name}").shape == (0, 7)
    assert stc.get("scalar").shape == ()


ONE_BYTE = json.dumps(entry(0, 1, [1])).encode()
HOSTILE = {
    "header length beyond the file": (entry(0, 4, [4]), b"abcd", 10**6),
    "giant header length": (entry(0, 4, [4]), b"abcd", 2**63),
    "zero header length": (entry(0, 4, [4]), b"abcd", 0),
    "not JSON": (b'{"x": ', b"", None),
    "not UTF-8": (b'{"\xff": 1}', b"", None),
    "deep JSON": (b"[" * 100_000, b"", None),
    "huge number": (b'{"x": ' + b"9" * 10_000 + b"}", b"", None),
    "an array": ([1, 2], b"", None),
    "entry not an object": ({"x": 3}, b"", None),
    "metadata not text": ({"__metadata__": {"a": 1}}, b"", None),
    "unknown dtype": ({"x": entry(0, 4, [4], "Q4")}, b"abcd", None),
    "dtype not text": ({"x": {**entry(0, 4, [4]), "dtype": []}}, b"abcd", None),
    "negative shape": ({"x": entry(0, 4, [-2, -2])}, b"abcd", None),
    "fractional shape": ({"x": entry(0, 4, [4.0])}, b"abcd", None),
    "boolean shape": ({"x": entry(0, 1, [True])}, b"a", None),
    "overflowing shape": ({"x": entry(0, 4, [2**32, 2**32, 2**32])}, b"abcd", None),
    "negative offset": ({"x": entry(-4, 0, [4])}, b"abcd", None),
    "reversed offsets": ({"x": entry(4, 0, [4])}, b"abcd", None),
    "one offset": ({"x": {**entry(0, 4, [4]), "data_offsets": [0]}}, b"abcd", None),
    "beyond the end": ({"x": entry(0, 8, [8])}, b"abcd", None),
    "size against shape": ({"x": entry(0, 4, [3])}, b"abcd", None),
    "overlap": ({"x": entry(0, 4, [4]), "y": entry(2, 6, [4])}, b"abcdef", None),
    "gap": ({"x": entry(0, 2, [2]), "y": entry(3, 4, [1])}, b"abcd", None),
    "left-over bytes": ({"x": entry(0, 2, [2])}, b"abcd", None),
    "zero-size tensor outside": ({"x": entry(9, 9, [0])}, b"", None),
    "key twice": (b'{"x": %s, "x": %s}' % (ONE_BYTE, ONE_BYTE), b"a", None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(tmp_path: Path, name: str) -> None:
    header, data, length = HOSTILE[name]
    raw_file(tmp_path / "bad.safetensors", header, data, length=length)
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        SafetensorsCollection(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 40, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"x": torch.arange(100)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"cut\.safetensors"):
        SafetensorsCollection(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bytes_never_read_wild(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever byte of the header is changed: a clear error, or tensors of the file's own size."""
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(10), "y": torch.ones(3, 2)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 180))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        tensors = load_tensors(path)
    except FormatError:
        return
    assert sum(t.numel() * t.itemsize for t in tensors.values()) <= len(content)


def test_file_changed_after_indexing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(10)}, path)
    stc = SafetensorsCollection(tmp_path)
    os.truncate(path, 100)
    with pytest.raises(FormatError, match="changed"):
        stc.get("x")


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_index_that_omits_tensors(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1), "y": torch.ones(2)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"x": "a.safetensors"})
    assert SafetensorsCollection(tmp_path).keys() == ["x", "y"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"x": "absent.safetensors"}, r"absent\.safetensors"),
        ({"z": "a.safetensors"}, "'z' should be in"),
        ({"x": 3}, "weight_map"),
        (["x"], "weight_map"),
    ],
)
def test_lying_index(tmp_path: Path, weight_map: Any, words: str) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(FormatError, match=words):
        SafetensorsCollection(tmp_path)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(FormatError, match=r"both a\.safetensors and b\.safetensors"):
        SafetensorsCollection(tmp_path)
    write_index(tmp_path, {"x": "b.safetensors"})
    assert SafetensorsCollection(tmp_path).get("x").item() == 0


def test_300_shards_under_64_open_files(tmp_path: Path, limit: Limit) -> None:
    for i in range(300):
        save_file({f"t{i:03}": torch.full((4,), i)}, tmp_path / f"s{i:03}.safetensors")
    with limit(resource.RLIMIT_NOFILE, 64):
        stc = SafetensorsCollection(tmp_path)
        assert len(stc.keys()) == 300
        assert all(stc.get(f"t{i:03}")[0] == i for i in range(300))


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        SafetensorsCollection(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        SafetensorsCollection(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="to safetensors first"):
        SafetensorsCollection(tmp_path)
    save_file({"model.a.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="mt_fread"):
        SafetensorsCollection(tmp_path, "fast")
    stc = SafetensorsCollection(tmp_path)
    with pytest.raises(ConfigError, match=r"similar names there: model\.a\.weight"):
        stc.get("a.weight")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(StorageError, match="cannot read"):
        stc.get("model.a.weight")


def test_list_keeps_to_the_module(tmp_path: Path) -> None:
    names = ["l.1.w", "l.1.b", "l.10.w", "l.1"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "a.safetensors")
    stc = SafetensorsCollection(tmp_path)
    assert stc.list("l.1") == ["l.1", "l.1.b", "l.1.w"]
    assert stc.list("") == sorted(names)
    assert stc.has("l.10.w")
    assert not stc.has("l.2")


def test_name_fixes(tmp_path: Path) -> None:
    save_file({"language_model.model.x": torch.ones(1)}, tmp_path / "a.safetensors")
    stc = SafetensorsCollection(tmp_path, tensor_name_fixes={"language_model.": ""})
    assert stc.keys() == ["model.x"]
    assert stc.get("model.x").item() == 1


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        tensor = torch.full((20_000,), 1.0)
        tensor[-1] = value
        save_file({"x": tensor}, tmp_path / name / "m.safetensors")
    prints = [SafetensorsCollection(tmp_path / name).fingerprint() for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_variants_latest_wins_and_layers_do_not_mix(tmp_path: Path) -> None:
    files = {
        "main": {"l.0.q.trellis": 0, "l.0.q.mul1": 0, "l.0.k.trellis": 0, "norm": 0},
        "one": {"l.0.q.trellis": 1, "l.0.q.mcg": 1, "l.0.k.trellis": 1},
        "two": {"l.0.k.trellis": 2, "norm": 2},
    }
    stcs = {}
    for name, values in files.items():
        (tmp_path / name).mkdir()
        tensors = {key: torch.full((1,), value) for key, value in values.items()}
        save_file(tensors, tmp_path / name / "m.safetensors")
        stcs[name] = SafetensorsCollection(tmp_path / name)
    both = VariantSafetensorsCollection(stcs["main"])
    both.add_stc(["l.*"], stcs["one"])
    both.add_stc("*.k.*", stcs["two"])
    assert {key: both.get(key).item() for key in both.keys()} == {  # noqa: SIM118
        "l.0.k.trellis": 2, "l.0.q.mcg": 1, "l.0.q.trellis": 1, "norm": 0,
    }  # fmt: skip
    assert both.metrics.tensors == 4
    assert not both.has("l.0.q.mul1")
    with pytest.raises(ConfigError):
        both.info("l.0.q.mul1")


def test_open_source(tmp_path: Path) -> None:
    source = open_source(GOLDEN / "tiny_llama_exl3")
    assert source.config_dict["architectures"] == ["LlamaForCausalLM"]
    names = [file.name for file in source.files()]
    assert names == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert len(source.fingerprint()) == 64
    with pytest.raises(ConfigError, match="no such directory"):
        open_source(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Exl3Error, match="no \\*"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="expected a model directory"):
        open_source(tmp_path / "config.json")
