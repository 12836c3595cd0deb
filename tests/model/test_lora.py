"""Adapters: against merged weights, per sequence, unloaded, and in files that must be refused."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import ALL, PeftAdapter, merge
from tiny_models import Tiny, random_ids

from exl3 import Cache, Model
from exl3.errors import ConfigError, FormatError, ShapeError, UnsupportedError
from exl3.model.lora import LoRA
from exl3.modules import Linear, low_rank
from exl3.modules.low_rank import Adapters, LowRank, add_low_rank_
from exl3.settings import settings

EXACT = {"rtol": 1e-4, "atol": 1e-4}
Q0 = "model.layers.0.self_attn.q_proj"


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected.isfinite()
    assert torch.equal(finite, actual.isfinite())
    torch.testing.assert_close(actual[finite], expected[finite], **EXACT)


def far(a: torch.Tensor, b: torch.Tensor) -> bool:
    finite = a.isfinite()
    return float((a - b)[finite].abs().max()) > 0.05


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equals_merged_weights(family: str, tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    model, ids = tiny(family).load(), random_ids(2, 20)
    base = model.forward(ids)
    adapter = PeftAdapter(model, (*ALL, "lm_head"))
    lora = LoRA.from_directory(model, adapter.save(tmp_path, "first"))
    assert (lora.name, lora.lora_r, lora.lora_alpha, lora.lora_scaling) == ("first", 4, 8, 1.0)
    assert lora.target_modules == [*ALL, "lm_head"] and lora.skipped == ()
    merged = tiny(family).load()
    merge(merged, adapter)
    close(model.forward(ids), merged.forward(ids))
    assert far(model.forward(ids), base)
    tail = {"last_tokens_only": 3}
    close(model.forward(ids, tail), merged.forward(ids, tail))
    lora.unload()
    lora.unload()
    assert torch.equal(model.forward(ids), base) and not lora.loaded


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 3}])
def test_scales_and_sum(options: dict[str, Any], tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    model, merged, ids = tiny("llama").load(), tiny("llama").load(), random_ids(1, 9)
    one = PeftAdapter(model, ("q_proj", "down_proj"), rank=3, seed=1, **options)
    two = PeftAdapter(model, ("q_proj", "up_proj"), rank=9, seed=2, **options)
    first = LoRA.from_directory(model, one.save(tmp_path, "one"))
    second = LoRA.from_directory(model, two.save(tmp_path, "two"), lora_scaling=0.5)
    merge(merged, one)
    close(model.forward(ids, {"loras": [first]}), merged.forward(ids))
    two.config["lora_alpha"] *= 0.5
    merge(merged, two)
    close(model.forward(ids), merged.forward(ids))
    close(model.forward(ids, {"loras": [second, first]}), merged.forward(ids))


def test_rank_and_alpha_per_module(tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    model, merged, ids = tiny("llama").load(), tiny("llama").load(), random_ids(1, 9)
    small = PeftAdapter(model, ("q_proj",), rank=2)
    other = PeftAdapter(model, ("up_proj",), rank=5)
    other.config["lora_alpha"] = 7
    merge(merged, small, other)
    tensors = {**small.tensors(), **other.tensors()}
    small.config |= {"rank_pattern": {"up_proj": 5}, "alpha_pattern": {r".*\.up_proj": 7}}
    LoRA.from_directory(model, small.save(tmp_path, tensors=tensors))
    close(model.forward(ids), merged.forward(ids))


@pytest.mark.parametrize("form", ["named", "half", "bin", "short_prefix"])
def test_forms_of_files(form: str, tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    model, merged, ids = tiny("llama").load(), tiny("llama").load(), random_ids(1, 9)
    adapter = PeftAdapter(model, ("v_proj",))
    dtype = torch.bfloat16 if form == "half" else torch.float32
    adapter.pairs = {
        k: (a.to(dtype).float(), b.to(dtype).float()) for k, (a, b) in adapter.pairs.items()
    }
    merge(merged, adapter)
    tensors = adapter.tensors(".default" if form == "named" else "", dtype)
    if form == "short_prefix":
        tensors = {key.removeprefix("base_model.model."): t for key, t in tensors.items()}
    directory = adapter.save(tmp_path, tensors=tensors)
    if form == "bin":
        (directory / "adapter_model.safetensors").unlink()
        torch.save(tensors, directory / "adapter_model.bin")
    LoRA.from_directory(model, directory)
    close(model.forward(ids), merged.forward(ids))


# Quantised layers


def quantised_reference(model: Model, adapter: PeftAdapter, ids: torch.Tensor) -> torch.Tensor:
    """The model decoded to plain weights, with the adapter merged, on the slow path."""
    layers = [layer for layer in model if isinstance(layer, Linear)]
    kept = [layer.weight for layer in layers]
    for layer in layers:
        layer.plain = layer.weight_dense().t().contiguous()
        layer.weight = None
    merge(model, adapter)
    out = model.forward(ids, {"loras": []})
    for layer, weight in zip(layers, kept, strict=True):
        layer.weight, layer.plain = weight, None
    return out


def test_on_quantised_layers(golden_model: Model, tmp_path: Path) -> None:
    model, ids = golden_model, random_ids(2, 20, 512)
    adapter = PeftAdapter(model, (*ALL, "lm_head"))
    base = model.forward(ids, {"reconstruct": True})
    LoRA.from_directory(model, adapter.save(tmp_path))
    expected = quantised_reference(model, adapter, ids)
    close(model.forward(ids, {"reconstruct": True}), expected)
    noise = (model.forward(ids) - expected).std()
    change = (base - expected).std()
    assert noise < 0.05 * expected.std() and change > 4 * noise


def test_layers_repeated_by_a_map(tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    options = {"layer_map": "0..1,0..1"}
    model, merged = tiny("llama").load(**options), tiny("llama").load(**options)
    adapter, ids = PeftAdapter(model), random_ids(1, 9)
    LoRA.from_directory(model, adapter.save(tmp_path))
    merge(merged, adapter)
    close(model.forward(ids), merged.forward(ids))


# Per sequence, on a cache, and next to recorded steps


def cached(model: Model, cache: Cache, ids: torch.Tensor, loras: Any) -> torch.Tensor:
    """Rows prefilled one by one but for three tokens, then steps of all; (bsz, 3, V_pad)."""
    params = {"attn_mode": "flash_attn", "cache": cache}
    if loras is not None:
        params["loras"] = loras
    start, rows = ids.shape[1] - 3, range(ids.shape[0])
    per_row = bool(loras) and isinstance(loras[0], list)
    for row in rows:
        own = {**params, "loras": loras[row]} if per_row else params
        model.prefill(ids[row : row + 1, :start], {**own, **place([row], start=0)})
    return torch.cat(
        [
            model.forward(ids[:, i : i + 1], {**params, **place(list(rows), start=i)})
            for i in range(start, ids.shape[1])
        ],
        1,
    )


def place(rows: list[int], start: int) -> dict[str, torch.Tensor]:
    """Sequence i in page i, `start` tokens stored."""
    return {
        "block_table": torch.tensor(rows, dtype=torch.int32)[:, None],
        "cache_seqlens": torch.full((len(rows),), start, dtype=torch.int32),
    }


def test_mixed_batch_equals_single(golden_model: Model, tmp_path: Path) -> None:
    model, ids = golden_model, random_ids(5, 12, 512)
    cache = Cache(model, 5 * 256)
    base = cached(model, cache, ids, None)
    a, b = (
        LoRA.from_directory(model, PeftAdapter(model, seed=i).save(tmp_path, f"{i}"))
        for i in range(2)
    )
    mix = [[a], [], [b], [a, b], [a]]
    together = cached(model, cache, ids, mix)
    for row, loras in enumerate(mix):
        alone = cached(model, cache, ids[row : row + 1], [loras])
        assert torch.equal(together[row : row + 1], alone)
        whole = model.forward(ids[row : row + 1], {"loras": loras})[:, -3:]
        assert float((alone - whole)[..., :512].std() / whole[..., :512].std()) < 0.06
        assert far(alone, base[row : row + 1]) is bool(loras)
    assert torch.equal(cached(model, cache, ids, []), base)  # recorded steps, as before
    with pytest.raises(ConfigError, match="2 lists, expected one per sequence: 5"):
        model.forward(ids, {"loras": [[a], [b]]})


def test_steps_between_loading_and_unloading(golden_model: Model, tmp_path: Path) -> None:
    """Recorded steps are right before, while and after an adapter is loaded."""
    model, ids = golden_model, random_ids(2, 8, 512)
    cache = Cache(model, 512)
    base = cached(model, cache, ids, None)
    lora = LoRA.from_directory(model, PeftAdapter(model).save(tmp_path))
    changed = cached(model, cache, ids, None)
    assert far(changed, base)
    assert torch.equal(cached(model, cache, ids, None), changed)
    assert torch.equal(cached(model, cache, ids, []), base)
    lora.unload()
    assert torch.equal(cached(model, cache, ids, None), base)
    with pytest.raises(ConfigError, match="not loaded"):
        model.forward(ids, {"loras": [lora]})
    lora = LoRA.from_directory(model, PeftAdapter(model).save(tmp_path))
    model.unload()
    assert not lora.loaded and not model.adapters
    model.load()
    assert torch.equal(cached(model, cache, ids, None), base)


def without_graph(model: Model, *args: Any) -> torch.Tensor:
    model._graphs._refused = True
    out = cached(model, *args)
    model._graphs._refused = False
    return out


def recorded(model: Model, cache: Cache) -> set[tuple[int, int]]:
    """Rows and number of adapters of each recorded step."""
    return {(rows, len(loras)) for rows, loras in model._graphs._steps.get(cache, {})}


def test_recorded_steps_with_adapters(golden_model: Model, tmp_path: Path) -> None:
    """Equal to op by op, for every mixture; few recordings serve many mixtures."""
    model, ids = golden_model, random_ids(3, 10, 512)
    recording, plain = Cache(model, 768), Cache(model, 768)
    a, b, c, d = (
        LoRA.from_directory(model, PeftAdapter(model, seed=i).save(tmp_path, f"{i}"))
        for i in range(4)
    )
    for mix in (
        [[a], [a], [a]],
        [[], [a], [b]],
        [[b], [], [a, b]],
        [[a, b, c], [], [d]],
        [[d], [c], [b, a]],
        [[], [], []],
    ):
        got = cached(model, recording, ids, mix)
        assert torch.equal(got, without_graph(model, plain, ids, mix))
    assert recorded(model, recording) == {(3, 1), (3, 2), (3, 4), (3, 0)}
    d.unload()
    assert recorded(model, recording) == {(3, 1), (3, 2), (3, 0)}
    for mix in ([[a], [a], [a]], [[a, b, c], [], [b]]):
        got = cached(model, recording, ids, mix)
        assert torch.equal(got, without_graph(model, plain, ids, mix))


def test_recorded_steps_with_a_plain_head(golden_model: Model, tmp_path: Path) -> None:
    """The head's adapter runs after the replay, on the rows that it belongs to."""
    model, ids = golden_model, random_ids(3, 10, 512)
    head = model.head
    head.plain, head.weight = head.weight_dense().t().contiguous(), None
    lora = LoRA.from_directory(
        model, PeftAdapter(model, ("q_proj", "lm_head"), size=0.3).save(tmp_path)
    )
    mix = [[lora], [], [lora]]
    recording, plain = Cache(model, 768), Cache(model, 768)
    got = cached(model, recording, ids, mix)
    assert torch.equal(got, without_graph(model, plain, ids, mix))
    assert recorded(model, recording) == {(3, 1)}
    assert far(got[0], cached(model, plain, ids, [])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_by_products_of_torch(dtype: torch.dtype, mixed: bool) -> None:
    """What other devices than the CPU run, against the op of the CPU."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 48), torch.randn(5, 90)
    layers = {
        "a": LowRank(torch.randn(4, 48) / 7, torch.randn(4, 30)),
        "b": LowRank(torch.randn(3, 48) / 7, torch.randn(3, 40)),
    }
    mask = torch.tensor([[1.0], [0], [1], [1], [0]]) if mixed else torch.ones(5, 1)
    adapters = Adapters((layers,), mask, (not mixed,))
    keys = [("a", 0), ("c", 30), ("b", 50)]
    want = add_low_rank_(y.clone(), x, keys, adapters)
    got = y.to(dtype)
    for key, start in keys:
        if key in layers:
            part = LowRank(layers[key].a.to(dtype), layers[key].b.to(dtype))
            target = got[:, start : start + part.b.shape[1]]
            low_rank._add_(target, x.to(dtype), part, mask if mixed else None)
    tolerance = 1e-5 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
    wide = y.clone()  # a head's output is float32 where the adapter is not
    part = LowRank(layers["a"].a.to(dtype), layers["a"].b.to(dtype))
    low_rank._add_(wide[:, :30], x, part, None)
    torch.testing.assert_close(
        wide[:, :30],
        y[:, :30] + x @ layers["a"].a.T @ layers["a"].b,
        rtol=tolerance,
        atol=tolerance,
    )


def test_unloaded_weights_are_freed(golden_model: Model, tmp_path: Path) -> None:
    model, ids = golden_model, random_ids(1, 5, 512)
    cache = Cache(model, 256)
    lora = LoRA.from_directory(model, PeftAdapter(model).save(tmp_path))
    cached(model, cache, ids, [lora])
    alive = weakref.ref(lora.adapter)
    lora.unload()
    gc.collect()
    assert alive() is None


def test_equal_contents_have_equal_keys(golden_model: Model, tmp_path: Path) -> None:
    """Keys outlive a process: they depend on the weights and the scale, not on objects."""
    directory = PeftAdapter(golden_model).save(tmp_path)
    digests = [
        LoRA.from_directory(golden_model, directory, scale).adapter.digest for scale in (1, 1, 0.5)
    ]
    assert digests[0] == digests[1] != digests[2]


# Refusals


def edit(config: dict[str, Any]) -> Callable[[PeftAdapter, dict[str, Any]], None]:
    return lambda adapter, tensors: adapter.config.update(config)


def change(part: str, function: Any) -> Callable[[PeftAdapter, dict[str, Any]], None]:
    def apply(adapter: PeftAdapter, tensors: dict[str, Any]) -> None:
        key = f"base_model.model.{Q0}.{part}"
        tensor = tensors.pop(key, None)
        if function is not None:
            tensors[key] = function(tensor).contiguous()

    return apply


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        (edit({"use_dora": True}), UnsupportedError, ["use_dora", "DoRA"]),
        (edit({"bias": "all"}), UnsupportedError, ["bias", "'all'"]),
        (edit({"lora_bias": True}), UnsupportedError, ["lora_bias"]),
        (edit({"modules_to_save": ["lm_head"]}), UnsupportedError, ["modules_to_save"]),
        (edit({"init_lora_weights": "pissa"}), UnsupportedError, ["pissa"]),
        (edit({"peft_type": "IA3"}), UnsupportedError, ["IA3"]),
        (edit({"fan_in_fan_out": True}), ConfigError, ["fan_in_fan_out"]),
        (edit({"r": 0}), ConfigError, ["r is 0", "whole"]),
        (edit({"lora_alpha": "8"}), ConfigError, ["lora_alpha"]),
        (edit({"rank_pattern": {"(": 4}}), ConfigError, ["rank_pattern", "'('"]),
        (edit({"r": 8}), ShapeError, [Q0, "rank 4", "says 8"]),
        (change("lora_A.weight", lambda t: t[:, :-130]), ShapeError, [Q0, "126", "256"]),
        (change("lora_B.weight", lambda t: t.repeat(2, 1)), ShapeError, [Q0, "512", "256"]),
        (change("lora_B.weight", lambda t: t[:, :3]), ShapeError, [Q0, "rank 4", "and 3"]),
        (change("lora_B.weight", None), FormatError, [Q0, "lora_A but not lora_B"]),
        (change("lora_A.weight", lambda t: t * torch.nan), FormatError, [Q0, "finite"]),
        (change("lora_A.weight", lambda t: t.int()), FormatError, [Q0, "int32"]),
        (change("lora_magnitude_vector", lambda _: torch.ones(4)), UnsupportedError, [Q0]),
        (change("lora_B.bias", lambda _: torch.ones(4)), UnsupportedError, ["lora_B.bias"]),
    ],
)
def test_refused(
    broken: Any, error: type[Exception], words: list[str], golden_model: Model, tmp_path: Path
) -> None:
    adapter = PeftAdapter(golden_model, ("q_proj",))
    tensors = adapter.tensors()
    broken(adapter, tensors)
    with pytest.raises(error) as caught:
        LoRA.from_directory(golden_model, adapter.save(tmp_path, tensors=tensors))
    for word in words:
        assert word in str(caught.value)
    assert not golden_model.adapters


def test_what_the_model_has_no_place_for(
    golden_model: Model,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = PeftAdapter(golden_model, ("q_proj",))
    tensors = adapter.tensors()
    for half in "AB":
        tensors[f"base_model.model.model.layers.0.mlp.router.lora_{half}.weight"] = torch.ones(4, 4)
    tensors["base_model.model.model.embed_tokens.weight"] = torch.ones(4, 4)
    directory = adapter.save(tmp_path, tensors=tensors)
    lora = LoRA.from_directory(golden_model, directory)
    assert len(lora.skipped) == 2 and "mlp.router" in caplog.text and "embed_tokens" in caplog.text
    lora.unload()
    with monkeypatch.context() as patch:
        patch.setenv("EXL3_STRICT", "1")
        settings.cache_clear()
        with pytest.raises(ConfigError, match=r"mlp\.router"):
            LoRA.from_directory(golden_model, directory)
    settings.cache_clear()
    nothing = {key: t for key, t in tensors.items() if "router" in key}
    with pytest.raises(ConfigError, match="another model"):
        LoRA.from_directory(golden_model, adapter.save(tmp_path, "b", nothing))


def test_missing_and_damaged_files(golden_model: Model, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="adapter_config"):
        LoRA.from_directory(golden_model, tmp_path)
    directory = PeftAdapter(golden_model).save(tmp_path)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(FormatError):
        LoRA.from_directory(golden_model, directory)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model"):
        LoRA.from_directory(golden_model, directory)
    (directory / "adapter_model.bin").write_bytes(b"\x80\x02garbage")
    with pytest.raises(FormatError, match="adapter_model"):
        LoRA.from_directory(golden_model, directory)
    torch.save({"a": Path("x")}, directory / "adapter_model.bin")
    with pytest.raises(FormatError):
        LoRA.from_directory(golden_model, directory)
    (directory / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises((FormatError, ConfigError)):
        LoRA.from_directory(golden_model, directory)
    golden_model.unload()
    with pytest.raises(ConfigError, match="load"):
        LoRA.from_directory(golden_model, directory)


def test_chosen_adapters_are_checked(golden_model: Model, tmp_path: Path) -> None:
    ids = random_ids(1, 3, 512)
    lora = LoRA.from_directory(golden_model, PeftAdapter(golden_model).save(tmp_path))
    for wanted, words in [
        ([lora, lora], "twice"),
        ([object()], "adapter"),
        (["adapter"], "adapter"),
    ]:
        with pytest.raises(ConfigError, match=words):
            golden_model.forward(ids, {"loras": wanted})
