"""Layer splits over devices: the plan, and equality with the model on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import PeftAdapter
from split_models import HOST, Borders, load_split, spread, stand_ins
from tiny_models import GOLDEN, random_ids, write_random_exl3

from exl3 import Cache, CacheLayer_fp16, CacheLayer_quant, Config, Model
from exl3.cache.page_io import PageIO
from exl3.errors import OutOfMemory
from exl3.model.decode import DecodeGraphs
from exl3.model.load_options import LoadArguments
from exl3.model.lora import LoRA
from exl3.model.packing import WeightPacker
from exl3.model.placement import units_of
from exl3.model.split import GIB, Room, Unit, fill, place
from exl3.modules import Linear

LAYERS = 7
FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("split")
    write_random_exl3(root, FIELDS)
    return root


def new_model(directory: Path, **options: Any) -> Model:
    return Model.from_config(Config.from_directory(str(directory), **options))


# The plan


def units(*sizes: int, working: int = 10) -> list[Unit]:
    return [Unit(f"u{i}", (i,), size, working) for i, size in enumerate(sizes)]


def rooms(*sizes: int) -> list[Room]:
    return [Room(torch.device("cuda", i), size, 2 * size) for i, size in enumerate(sizes)]


def sizes(plan: Any) -> list[tuple[int | None, list[str]]]:
    return [(part.device.index, [unit.name for unit in part.units]) for part in plan.parts]


def test_devices_are_filled_one_after_another() -> None:
    plan = fill(units(30, 30, 30, 30), rooms(75, 75), 5)
    assert sizes(plan) == [(0, ["u0", "u1"]), (1, ["u2", "u3"])]
    assert [part.needed for part in plan.parts] == [75, 75]  # to the byte
    assert plan.part_of() == [0, 0, 1, 1]
    # Each device needs its own overhead and room to work in; the last byte decides.
    with pytest.raises(OutOfMemory):
        fill(units(30, 30, 30, 30), rooms(75, 74), 5)
    # A device without room for the next module is passed over, also between others.
    plan = fill(units(40, 30, 20), rooms(20, 60, 0, 70), 5)
    assert sizes(plan) == [(1, ["u0"]), (3, ["u1", "u2"])]
    # Units share the room to work in: the largest counts.
    mixed = [Unit("a", (0,), 10, 50), Unit("b", (1,), 10, 20)]
    assert fill(mixed, rooms(70), 0).parts[0].needed == 70


def test_one_device_is_preferred_unless_sizes_are_given() -> None:
    assert sizes(place(units(30, 30), rooms(50, 80), 0, in_order=False)) == [(1, ["u0", "u1"])]
    assert sizes(place(units(30, 30), rooms(50, 80), 0, in_order=True)) == [
        (0, ["u0"]),
        (1, ["u1"]),
    ]


def test_what_does_not_fit_is_told_in_numbers() -> None:
    many = [Unit(f"layer {i}", (i,), GIB, GIB // 2) for i in range(5)]
    offered = [
        Room(torch.device("cuda:0"), 5 * GIB // 2, 3 * GIB),
        Room(torch.device("cuda:1"), GIB, 4 * GIB),
    ]
    with pytest.raises(OutOfMemory) as found:
        fill(many, offered, 0)
    text = str(found.value)
    assert "needs 5.50 GiB" in text
    assert "cuda:0 2.50 GiB of 3.00 GiB free, takes layer 0 to layer 1, 2.50 GiB" in text
    assert "cuda:1 1.00 GiB of 4.00 GiB free." in text
    assert "left for layer 2 to layer 4, 3.50 GiB, of which layer 2 needs 1.50 GiB" in text
    with pytest.raises(OutOfMemory, match="usable are: no device"):
        fill(many, [], 0)


def test_units_of_a_model(directory: Path) -> None:
    model = new_model(directory)
    bare = units_of(model, LoadArguments())
    assert [unit.modules for unit in bare] == [(i,) for i in range(LAYERS + 1)] + [
        (LAYERS + 1, LAYERS + 2)
    ]
    caches = [Cache(model, 512), Cache(model, 256, CacheLayer_quant, k_bits=4, v_bits=3)]
    full = units_of(model, LoadArguments())
    layer = sum(cache.storage_size() for cache in caches) // LAYERS
    for before, after in zip(bare, full, strict=True):
        assert after.resident - before.resident == (layer if "layers" in before.name else 0)
    # Repeats share the weights of a layer, and bring caches of their own.
    mapped = new_model(directory, layer_map="0..3,2..6")
    cache = Cache(mapped, 512)
    repeated = {unit.name: unit for unit in units_of(mapped, LoadArguments())}
    assert repeated["model.layers.2"].modules == (3, 5) and len(repeated) == LAYERS + 2
    share = repeated["model.layers.2"].resident - repeated["model.layers.1"].resident
    assert share == cache.layers[0].storage_size()


# Equality with one device


def use(model: Model, cache: Cache, extra: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Logits of every kind of pass, of two sequences."""
    ids = random_ids(2, 30)
    extra = extra or {}
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256), **extra}
    found = [model.forward(ids, extra), model.forward(ids[:1, :9], {**extra, "reconstruct": True})]
    model.prefill(ids[:, :20], params)
    found.append(model.forward(ids[:, 20:25], {**params, "past_len": 20, "last_tokens_only": 2}))
    found += [model.forward(ids[:, i : i + 1], {**params, "past_len": i}) for i in range(25, 30)]
    return found


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("count", range(1, 9))
def test_equal_to_one_device(directory: Path, count: int) -> None:
    whole = new_model(directory)
    whole.load(device="cpu")
    split = load_split(new_model(directory), stand_ins(count))
    assert len(split.segments) == count
    assert split.active_devices == stand_ins(count)
    assert split.output_device == stand_ins(count)[-1]
    caches = [Cache(model, 512) for model in (whole, split)]
    assert same(use(split, caches[1]), use(whole, caches[0]))
    assert not split._graphs._refused and len(split._graphs._steps[caches[1]]) == 1
    for ours, theirs in zip(*(cache.get_all_tensors() for cache in caches), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("devices", [[torch.device("cpu")] * 3, stand_ins(5)])
def test_equal_with_repeats_quantised_cache_and_plain_head(
    directory: Path, devices: list[torch.device]
) -> None:
    found = []
    for cut in (devices[:1], devices):
        model = load_split(new_model(directory, layer_map="0..5,1..6,3"), cut)
        head = model.head
        head.plain, head.weight = head.weight_dense().t().contiguous(), None
        cache = Cache(model, 512, CacheLayer_quant, k_bits=5, v_bits=4)
        found.append(use(model, cache))
        # A layer map goes back to devices that it has left.
        assert len(model.segments) > 2 * (len(cut) - 1)
        assert not model._graphs._refused
    assert same(*found)


@pytest.mark.parametrize("chosen", ["all", "one of two", "none"])
def test_equal_with_adapters(directory: Path, tmp_path: Path, chosen: str) -> None:
    found = []
    for count in (1, 4):
        model = load_split(new_model(directory), stand_ins(count))
        lora = LoRA.from_directory(model, PeftAdapter(model).save(tmp_path, f"{count}"))
        extra = {"all": {}, "one of two": {"loras": [[lora], []]}, "none": {"loras": []}}[chosen]
        cache = Cache(model, 512)
        params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256), **extra}
        ids = random_ids(2, 12)
        found.append(
            [model.forward(ids, extra)]
            + [model.forward(ids[:, i : i + 1], {**params, "past_len": i}) for i in range(4)]
        )
    assert same(*found)


@pytest.mark.parametrize("layer_map", [None, "0..4,2..6"])
@pytest.mark.parametrize("adapters", [False, True])
def test_nothing_crosses_a_border_but_by_a_move(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer_map: str | None,
    adapters: bool,
) -> None:
    """Every op of every pass reads tensors of one device, as real devices demand."""
    monkeypatch.setattr(DecodeGraphs, "_wanted", staticmethod(lambda _device: False))
    monkeypatch.setattr(WeightPacker, "flush", lambda self: None)  # makes buffers on the host
    devices = stand_ins(3)
    model = new_model(directory, layer_map=layer_map)
    with Borders() as borders:
        load_split(model, devices)
        cache = Cache(model, 512)
        part_of = spread(model, devices).part_of()
        for module, part in zip(model.modules, part_of, strict=True):
            for layer in module:
                if isinstance(layer, Linear) and layer.weight is not None:
                    assert borders.place(layer.weight.planes) == part, layer.key
        blocks = [part for m, part in zip(model.modules, part_of, strict=True) if m in model.blocks]
        for instance, part in enumerate(blocks):
            assert all(borders.place(t) == part for t in cache.layers[instance].get_tensors())
        if adapters:
            LoRA.from_directory(model, PeftAdapter(model).save(tmp_path))
        borders.moves.clear()
        results = use(model, cache)
        assert all(borders.place(result) == 2 for result in results)
    # Between devices only hidden states move, once for each border.
    moved = [move for move in borders.moves if move[0] != HOST and move[0] != move[1]]
    assert all(len(shape) == 2 and shape[1] == 96 for *_, shape in moved)
    crossings = len(model.segments) - 1
    passes = len(results) + 1  # a prefill gives no logits
    assert len(moved) == crossings * passes


def test_pages_are_copied_layer_by_layer(directory: Path) -> None:
    model = load_split(new_model(directory), stand_ins(3))
    first, second = Cache(model, 512), Cache(model, 768)
    assert [layer.device for layer in first.layers] == [
        segment.device for segment in model.segments for _ in segment.blocks
    ]
    use(model, first)
    first.copy_page(second, 0, 2, 256)
    io = PageIO([second])
    buffer = io.buffers(1)[0]
    io.save(2, buffer)
    io.load(buffer, 1)
    for ours, theirs in zip(first.get_all_tensors(), second.get_all_tensors(), strict=True):
        assert torch.equal(ours[0], theirs[2]) and torch.equal(ours[0], theirs[1])


def test_load_again_after_unloading(directory: Path) -> None:
    model = new_model(directory)
    cache = Cache(model, 512)
    found = []
    for count in (3, 1, 4):
        load_split(model, stand_ins(count))
        found.append(use(model, cache))
        model.unload()
        assert model.segments == () and model.active_devices == []
        assert cache.get_all_tensors() == [] and not any(m.loaded for m in model.modules)
    assert same(found[0], found[1]) and same(found[0], found[2])


# Through the public interface, with made-up devices


def test_the_plan_that_a_load_makes(
    directory: Path, made_up_devices: Callable[[list[int]], None], caplog: pytest.LogCaptureFixture
) -> None:
    from exl3.model.placement import OVERHEAD_BYTES, make_plan

    model = new_model(directory)
    cache = Cache(model, 4096, CacheLayer_fp16)
    needs = units_of(model, LoadArguments())
    least = OVERHEAD_BYTES + needs[0].working
    three = least + sum(unit.resident for unit in needs[:3])
    made_up_devices([2 * GIB, 4 * GIB])
    assert sizes(make_plan(model, LoadArguments()))[0][0] == 0  # room for all of it
    made_up_devices([GIB, 4 * GIB])
    assert [index for index, _ in sizes(make_plan(model, LoadArguments()))] == [1]
    made_up_devices([4 * GIB, 4 * GIB])
    wanted = [three / GIB, 3]
    given = make_plan(model, LoadArguments(use_per_device=wanted))
    assert [index for index, _ in sizes(given)] == [0, 1] and len(given.parts[0].units) == 3
    assert wanted == [three / GIB, 3]
    # What must stay free is arithmetic, too: here no device takes all of it.
    rest = least + needs[-1].working - needs[0].working + sum(u.resident for u in needs[3:])
    made_up_devices([three, rest, 4 * GIB])
    kept = make_plan(model, LoadArguments(reserve_per_device=[0, 0, -1]))
    with pytest.raises(OutOfMemory, match=r"usable are: cuda:0 0\.\d\d GiB[^;]*No device"):
        make_plan(model, LoadArguments(reserve_per_device=[0, -1, -1]))
    assert [index for index, _ in sizes(kept)] == [0, 1]
    assert cache.get_all_tensors() == [] and not any(module.loaded for module in model.modules)


def test_the_golden_model_in_two_parts() -> None:
    whole = new_model(GOLDEN / "tiny_llama_exl3")
    whole.load(device="cpu")
    split = load_split(new_model(GOLDEN / "tiny_llama_exl3"), stand_ins(2))
    assert same(use(split, Cache(split, 512)), use(whole, Cache(whole, 512)))
