"""EXL3 directories: golden logits, mixed and odd files, and recorded decode steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, FAMILIES, GOLDEN, random_ids, write_random_exl3

import exl3.model.decode as decode
from exl3 import Cache, Config, Model
from exl3.errors import ConfigError, FormatError, ShapeError
from exl3.modules import Linear

EXACT = 1e-4  # float32 sums in another order
ROUNDED = 0.05  # 8-bit activations at 3 to 4 bits: relative to the standard deviation of the logits


def load(directory: Path, **options: Any) -> Model:
    model = Model.from_config(Config.from_directory(str(directory), **options))
    model.load()
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    valid = expected.isfinite()
    assert torch.equal(valid, actual.isfinite())
    return float((actual - expected)[valid].std() / expected[valid].std())


@pytest.fixture(scope="module")
def golden_logits() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "tiny_llama_exl3.logits.safetensors")


def test_golden_logits(golden_model: Model, golden_logits: dict[str, torch.Tensor]) -> None:
    ids, expected = golden_logits["input_ids"], golden_logits["logits"]
    exact = golden_model.forward(ids, {"reconstruct": True})[0]
    torch.testing.assert_close(exact, expected, rtol=EXACT, atol=EXACT)
    assert relative_error(golden_model.forward(ids)[0], expected) < ROUNDED


def test_storage_before_loading() -> None:
    model = Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))
    bpw, head_bpw, bits = model.get_storage_info()
    assert bpw == pytest.approx(3.58, abs=0.01) and head_bpw == pytest.approx(6.09, abs=0.01)
    assert bits == 8190656
    assert "[3x]" in model.get_layout_tree(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_fused_and_by_the_reference(family: str, tmp_path: Path) -> None:
    fields = json.loads((CONFIGS / f"{family}.json").read_text())
    write_random_exl3(tmp_path, fields)
    model, ids = load(tmp_path), random_ids(2, 24)
    assert all(m.quantized for m in model if isinstance(m, Linear))
    exact = model.forward(ids, {"reconstruct": True})
    assert exact.shape == (2, 24, 384) and (exact[..., 300:] == -torch.inf).all()
    assert relative_error(model.forward(ids), exact) < ROUNDED
    cache = Cache(model, 512)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    steps = [model.forward(ids[:, i : i + 1], {**params, "past_len": i}) for i in range(24)]
    assert relative_error(torch.cat(steps, 1), exact) < ROUNDED


def test_capture_runs_unfused(golden_model: Model) -> None:
    seen: dict[str, torch.Tensor] = {}
    linears = [m for m in golden_model if isinstance(m, Linear)]
    for layer in linears:
        layer.capture = lambda x, key=layer.key: seen.__setitem__(key, x)  # type: ignore[misc]
    ids = random_ids(1, 9, 512)
    observed = golden_model.forward(ids)
    assert set(seen) == {layer.key for layer in linears}
    for layer in linears:
        assert seen[layer.key].shape == (9, layer.in_features)
        layer.capture = None
    assert relative_error(golden_model.forward(ids), observed) < ROUNDED


def test_share_groups(golden_model: Model) -> None:
    groups: dict[str, list[str]] = {}
    for layer in golden_model:
        if isinstance(layer, Linear) and ".0." in layer.key:
            groups.setdefault(layer.share, []).append(layer.key.rpartition(".")[2])
    assert sorted(groups.values()) == [
        ["down_proj"],
        ["gate_proj", "up_proj"],
        ["o_proj"],
        ["q_proj", "k_proj", "v_proj"],
    ]


class Edited:
    """A copy of the golden directory whose tensors a test changes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        origin = GOLDEN / "tiny_llama_exl3"
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_bytes((origin / name).read_bytes())
        self.tensors = load_file(origin / "model.safetensors")

    def save(self) -> Path:
        save_file(self.tensors, self.directory / "model.safetensors")
        return self.directory


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Edited]:
    yield Edited(tmp_path)


def test_mixed_plain_and_old_signs(edited: Edited, golden_model: Model) -> None:
    """Some layers plain, one with packed signs: the same function as the original."""
    ids = random_ids(1, 7, 512)
    layer = golden_model.find_module("model.layers.1.mlp.up_proj")
    assert isinstance(layer, Linear)
    for name in ("trellis", "suh", "svh", "mul1"):
        del edited.tensors[f"{layer.key}.{name}"]
    edited.tensors[f"{layer.key}.weight"] = layer.weight_dense().t().contiguous()
    key = "model.layers.0.mlp.down_proj"
    suh = edited.tensors.pop(f"{key}.suh")
    words = (suh < 0).reshape(-1, 16).to(torch.int32) << torch.arange(16, dtype=torch.int32)
    edited.tensors[f"{key}.su"] = words.sum(1).to(torch.int16)
    down = golden_model.find_module(key)
    assert isinstance(down, Linear) and down.weight is not None
    down.weight.suh.copy_(torch.where(suh < 0, -1.0, 1.0))
    mixed = load(edited.save())
    expected = golden_model.forward(ids, {"reconstruct": True})
    torch.testing.assert_close(
        mixed.forward(ids, {"reconstruct": True}), expected, rtol=EXACT, atol=EXACT
    )
    assert relative_error(mixed.forward(ids), expected) < ROUNDED


QKEY = "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (f"{QKEY}.trellis", None, ["q_proj.trellis", "q_proj.weight"]),
        (f"{QKEY}.suh", None, ["q_proj.suh", "256"]),
        (f"{QKEY}.svh", lambda t: t[:128], ["q_proj.svh", "(128,)", "(256,)"]),
        (f"{QKEY}.svh", lambda t: t.float(), ["q_proj.svh", "float32", "float16"]),
        (f"{QKEY}.trellis", lambda t: t[:, :8], ["q_proj.trellis", "(16, 8, 64)", "(16, 16)"]),
        (f"{QKEY}.trellis", lambda t: t[..., :60], ["q_proj.trellis", "60"]),
        (f"{QKEY}.trellis", lambda t: t.int(), ["q_proj.trellis", "int32", "int16"]),
        (f"{QKEY}.mul1", lambda t: t + 1, ["q_proj.mul1", "0x83dcd12d"]),
        (f"{QKEY}.mcg", lambda t: torch.tensor(1), ["q_proj", "both"]),
        (f"{QKEY}.bias", lambda t: torch.zeros(256), ["q_proj.bias", "no bias"]),
        ("model.norm.weight", None, ["model.norm.weight", "(256,)"]),
        ("model.norm.weight", lambda t: t[:-1], ["model.norm.weight", "(255,)", "(256,)"]),
        ("model.embed_tokens.weight", lambda t: t[:-1], ["embed_tokens", "511", "512"]),
        ("model.embed_tokens.weight", lambda t: t.int(), ["embed_tokens", "int32"]),
    ],
    ids=str,
)
def test_bad_tensors_are_named(edited: Edited, name: str, change: Any, words: list[str]) -> None:
    old = edited.tensors.pop(name, None)
    if change is not None:
        edited.tensors[name] = change(old).contiguous()
    model = Model.from_config(Config.from_directory(str(edited.save())))
    with pytest.raises(FormatError) as caught:
        model.load()
    for word in words:
        assert word in str(caught.value)
    assert not model.loaded and not any(m.loaded for m in model if isinstance(m, Linear))


def test_bad_input(golden_model: Model) -> None:
    with pytest.raises(ShapeError, match="512"):
        golden_model.forward(torch.tensor([[512]]))
    with pytest.raises(ShapeError, match="-1"):
        golden_model.forward(torch.tensor([[-1]]))
    with pytest.raises(ShapeError, match="input_ids"):
        golden_model.forward(torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="loaded"):
        golden_model.unload()
        golden_model.forward(torch.tensor([[1]]))


# Recorded decode steps


def step_params(cache: Cache, table: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    return {
        "attn_mode": "flash_attn",
        "cache": cache,
        "block_table": torch.tensor(table, dtype=torch.int32),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }


def without_graph(monkeypatch: pytest.MonkeyPatch, model: Model, *args: Any) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(model._graphs, "_refused", True)
        return model.forward(*args)


def count_graphs(model: Model, cache: Cache) -> int:
    return len(model._graphs._steps.get(cache, {}))


def test_recorded_step_equals_eager(golden_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = golden_model, 11
    recorded, eager = Cache(model, 256 * 24), Cache(model, 256 * 24)
    ids = random_ids(rows, 40, 512)
    tables = [[2 * row + 1, 2 * row] for row in range(rows)]
    lengths = [3 + row for row in range(rows)]
    for cache in (recorded, eager):
        for row in range(rows):
            params = step_params(cache, [tables[row]], [0])
            model.prefill(ids[row : row + 1, : lengths[row]], params)
    # Batches that grow, shrink and differ in order reuse buffers with stale rows.
    for step, order in enumerate(([0], [3, 1, 2], list(range(11)), [5, 0], [10], [2, 1, 0, 9])):
        now = [lengths[row] for row in order]
        tokens = torch.stack([ids[row, lengths[row] + 1] for row in order])[:, None]
        table = [tables[row] for row in order]
        a = model.forward(tokens, step_params(recorded, table, now))
        b = without_graph(monkeypatch, model, tokens, step_params(eager, table, now))
        assert torch.equal(a, b), f"step {step}"
        for row in order:
            lengths[row] += 1
    assert count_graphs(model, recorded) == 5 and count_graphs(model, eager) == 0
    for a, b in zip(recorded.get_all_tensors(), eager.get_all_tensors(), strict=True):
        assert torch.equal(a, b)


def test_recorded_steps_share_memory(golden_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many sizes take about what the largest takes, whichever comes first."""
    model, most = golden_model, 24
    ids = random_ids(most, 1, 512)

    def run(sizes: Sequence[int]) -> int:
        model._graphs.clear()
        cache = Cache(model, 256 * most)
        for n in sizes:
            params = step_params(cache, [[row] for row in range(n)], [0] * n)
            got = model.forward(ids[:n], params)
            assert torch.equal(got, without_graph(monkeypatch, model, ids[:n], params)), n
        assert model._graphs._arena.tensor is not None
        return model._graphs._arena.tensor.nbytes

    largest = run([most])
    assert run(range(1, most + 1)) == run(range(most, 0, -1)) == largest
    assert run([3, most, 3, most, 5]) == largest


def test_recorded_result_is_the_callers(golden_model: Model) -> None:
    cache = Cache(golden_model, 256)
    first = golden_model.forward(torch.tensor([[5]]), step_params(cache, [[0]], [0]))
    kept = first.clone()
    golden_model.forward(torch.tensor([[9]]), step_params(cache, [[0]], [1]))
    assert torch.equal(first, kept)


def test_recorded_step_ignores_poison(golden_model: Model) -> None:
    cache = Cache(golden_model, 1024)
    clean = [
        golden_model.forward(torch.tensor([[i]]), step_params(cache, [[2]], [i])) for i in range(4)
    ]
    for tensor in cache.get_all_tensors():
        tensor.fill_(float("nan"))
    for i in range(4):
        params = step_params(cache, [[1, -7, 2**30]], [i])
        assert torch.equal(golden_model.forward(torch.tensor([[i]]), params), clean[i])


def test_recorded_step_errors_are_those_of_eager(golden_model: Model) -> None:
    cache = Cache(golden_model, 512)
    good = step_params(cache, [[0]], [0])
    golden_model.forward(torch.tensor([[5]]), good)
    for bad_id in (-1, 512):
        with pytest.raises(ShapeError, match=str(bad_id)):
            golden_model.forward(torch.tensor([[bad_id]]), good)
    for table, lengths in (([[2]], [0]), ([[-1]], [0]), ([[0]], [256])):
        with pytest.raises(ConfigError, match="page"):
            golden_model.forward(torch.tensor([[5]]), step_params(cache, table, lengths))
    assert count_graphs(golden_model, cache) == 1


def test_recordings_go_with_cache_weights_and_model(golden_model: Model) -> None:
    model, ids = golden_model, torch.tensor([[5]])
    first, second = Cache(model, 256), Cache(model, 256)
    for cache in (first, second):
        model.forward(ids, step_params(cache, [[0]], [0]))
        assert count_graphs(model, cache) == 1
    first.detach_from_model()
    assert count_graphs(model, first) == 0 and count_graphs(model, second) == 1
    head = model.head
    head.capture = lambda x: None
    model.forward(ids, step_params(second, [[0]], [0]))
    assert count_graphs(model, second) == 0
    head.capture = None
    model.forward(ids, step_params(second, [[0]], [0]))
    assert count_graphs(model, second) == 1
    model.unload()
    assert count_graphs(model, second) == 0


def test_refused_recording_falls_back(
    golden_model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(
        type(golden_model.blocks[0]),
        "forward",
        lambda self, x, batch: self.mlp.forward(
            self.attention.forward(x, batch, self.attention_norm) + 0.0, batch, self.mlp_norm
        ),
    )
    cache = Cache(golden_model, 256)
    for i in range(3):
        y = golden_model.forward(torch.tensor([[5]]), step_params(cache, [[0]], [i]))
        assert y.isfinite().all()
    assert caplog.text.count("op by op") == 1


def test_plain_head_runs_after_the_replay(
    edited: Edited, golden_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = golden_model.head
    for name in ("trellis", "suh", "svh", "mul1"):
        del edited.tensors[f"lm_head.{name}"]
    edited.tensors["lm_head.weight"] = head.weight_dense().t().contiguous()
    model = load(edited.save())
    caches = [Cache(model, 256), Cache(model, 256)]
    for i in range(3):
        ids, place = torch.tensor([[7 + i]]), ([[0]], [i])
        a = model.forward(ids, step_params(caches[0], *place))
        b = without_graph(monkeypatch, model, ids, step_params(caches[1], *place))
        assert torch.equal(a, b)
    assert count_graphs(model, caches[0]) == 1


def test_plain_layer_is_reported(
    edited: Edited, golden_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    layer = golden_model.find_module(QKEY)
    assert isinstance(layer, Linear)
    for name in ("trellis", "suh", "svh", "mul1"):
        del edited.tensors[f"{QKEY}.{name}"]
    edited.tensors[f"{QKEY}.weight"] = layer.weight_dense().t().contiguous()
    model = load(edited.save())
    cache = Cache(model, 256)
    for i in range(3):
        model.forward(torch.tensor([[7]]), step_params(cache, [[0]], [i]))
    assert count_graphs(model, cache) == 0
    assert caplog.text.count(f"{QKEY} is not quantised") == 1


@pytest.mark.parametrize("rows", range(1, 130))
def test_buckets(rows: int) -> None:
    size = decode.bucket_size(rows)
    assert rows <= size <= max(rows, rows * 9 // 8 + 1) and decode.bucket_size(size) == size
