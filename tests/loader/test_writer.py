"""Writing: layout, determinism, atomicity."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from exl3.errors import ConfigError, FormatError, ShapeError, StorageError
from exl3.loader import (
    SafetensorsCollection,
    TensorSpec,
    load_tensors,
    save_tensors,
    write_sharded,
)
from exl3.loader.dtypes import DTYPES
from exl3.loader.writer import plan_shards
from exl3.util.file import (
    atomic_file,
    atomic_write,
    disk_lru_cache,
    disk_lru_cache_clear,
    read_json,
    write_json,
)

ROOT = Path(__file__).parents[2]
ONE_FOLDER = HealthCheck.function_scoped_fixture
Limit = Callable[[int, int], AbstractContextManager[None]]


def model(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{i}": torch.randn(500, 500, generator=generator).to(torch.float16)
        for i in range(count)
    }


def specs(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec.of(key, tensor) for key, tensor in tensors.items()]


def test_one_file_equals_the_library(tmp_path: Path) -> None:
    tensors = {**model(2), "flag": torch.tensor(3, dtype=torch.int32), "none": torch.empty(0, 4)}
    (path,) = write_sharded(tmp_path, specs(tensors), tensors.__getitem__, shard_mb=0)
    assert path.name == "model.safetensors"
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    for read in (load_file(path), load_tensors(path)):
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[key], value) for key, value in tensors.items())
    assert SafetensorsCollection(tmp_path).metadata("model.safetensors") == {"format": "pt"}


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    tensors["slice"] = torch.arange(12.0).view(3, 4).t()
    save_tensors(tmp_path / "a.safetensors", tensors, {"note": "ä"})
    read = load_tensors(tmp_path / "a.safetensors")
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
    assert torch.equal(read["slice"], tensors["slice"])
    stc = SafetensorsCollection(tmp_path)
    assert stc.metadata("a.safetensors")["note"] == "ä"
    with pytest.raises(ShapeError, match="complex128"):
        save_tensors(tmp_path / "b.safetensors", {"x": torch.zeros(1, dtype=torch.complex128)})


def test_shards_and_index(tmp_path: Path) -> None:
    tensors = model()
    paths = write_sharded(tmp_path, specs(tensors), tensors.__getitem__, shard_mb=1)
    assert [p.name for p in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert index["metadata"] == {"total_size": 5 * 500_000}
    assert index["weight_map"]["layer.4"] == paths[2].name
    assert max(p.stat().st_size for p in paths) < 1_010_000
    stc = SafetensorsCollection(tmp_path)
    assert all(torch.equal(stc.get(key), value) for key, value in tensors.items())
    # A second write with other sizes leaves no shard or index of the first behind, nor what a
    # killed write left.
    (tmp_path / ".model-00001-of-00009.safetensors.ab12.tmp").write_text("half")
    write_sharded(tmp_path, specs(tensors), tensors.__getitem__, shard_mb=0)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_same_bytes_every_time(tmp_path: Path) -> None:
    tensors = model()
    for name in "ab":
        write_sharded(tmp_path / name, specs(tensors), tensors.__getitem__, shard_mb=1)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 3_000_000), max_size=12), shard_mb=st.integers(0, 4))
def test_plan(sizes: list[int], shard_mb: int) -> None:
    planned = [TensorSpec(f"t{i}", (n,), torch.uint8) for i, n in enumerate(sizes)]
    shards = plan_shards(planned, shard_mb)
    assert [s for shard in shards for s in shard] == planned
    if not shard_mb:
        assert len(shards) == 1
    for shard in shards:
        assert not shard_mb or len(shard) <= 1 or sum(s.n_bytes for s in shard) <= shard_mb * 10**6


def test_bad_plans(tmp_path: Path) -> None:
    spec = TensorSpec("x", (2,), torch.float32)
    with pytest.raises(ConfigError, match="shard size"):
        plan_shards([spec], -1)
    with pytest.raises(ConfigError, match="planned twice: x"):
        plan_shards([spec, spec], 0)
    with pytest.raises(ShapeError, match="planned as"):
        write_sharded(tmp_path, [spec], lambda _: torch.zeros(3))
    assert not list(tmp_path.iterdir())


def test_full_disk_leaves_nothing(tmp_path: Path, limit: Limit) -> None:
    target = tmp_path / "state.safetensors"
    save_tensors(target, {"x": torch.ones(4)})
    before = target.read_bytes()
    with (
        limit(resource.RLIMIT_FSIZE, 100_000),
        pytest.raises(StorageError, match=r"state\.safetensors.*'layer\.0'") as caught,
    ):
        save_tensors(target, model())
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    assert target.read_bytes() == before
    with limit(resource.RLIMIT_FSIZE, 10), pytest.raises(StorageError, match=r"a\.json"):
        write_json(tmp_path / "a.json", {"x": "y" * 100})
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_interrupt_leaves_the_old_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "f", "old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "f") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_kill_leaves_the_old_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "f", "old")
    code = (
        "import sys, time\n"
        "from exl3.util.file import atomic_file\n"
        "with atomic_file(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); print('written', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "f")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert (tmp_path / "f").read_text() == "old"


def test_unwritable_folder_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/below\.json"):
        write_json(tmp_path / "file" / "below.json", {})


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": [1], "a": "é"})
    assert read_json(path) == {"b": [1], "a": "é"}
    for text in ("[1]", "{", "{" * 100_000, "\x80"):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"a\.json"):
            read_json(path)
    with pytest.raises(StorageError, match=r"absent\.json"):
        read_json(tmp_path / "absent.json")


def test_disk_lru_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "main.py"), raising=False)
    calls: list[int] = []

    @disk_lru_cache("squares")
    def square(x: int, *, shift: int = 0) -> int:
        calls.append(x)
        return x * x + shift

    assert [square(3), square(3), square(3, shift=1), square(4)] == [9, 9, 10, 16]
    assert calls == [3, 3, 4]
    disk_lru_cache_clear("squares", 3)
    assert square(3) == 9
    assert calls == [3, 3, 4, 3]
    (entry, *_) = sorted((tmp_path / "__disk_lru_cache__" / "squares").iterdir())
    assert json.loads(entry.read_text())["result"] in (9, 10, 16)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=6, max_size=6),
)
def test_round_trip(tmp_path: Path, shapes: list[list[int]], dtypes: list[str]) -> None:
    tensors = {
        f"t.{i}": torch.randint(0, 2, shape).to(DTYPES[name])
        for i, (shape, name) in enumerate(zip(shapes, dtypes, strict=False))
    }
    save_tensors(tmp_path / "a.safetensors", tensors)
    read = load_tensors(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key].shape == tensor.shape
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
