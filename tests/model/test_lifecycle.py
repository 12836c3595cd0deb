"""Loading, progress, unloading and what goes wrong."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import GOLDEN, random_ids, write_random_exl3

from exl3 import Cache, Config, Model, Tokenizer
from exl3.errors import ConfigError, FormatError, UnsupportedError

TINY = str(GOLDEN / "tiny_llama_exl3")


def new_model() -> Model:
    return Model.from_config(Config.from_directory(TINY))


def test_progress_events() -> None:
    model, calls = new_model(), []
    events = list(model.load_gen(callback=lambda done, total: calls.append((done, total))))
    total = len(model.modules)
    assert events == calls == [(done, total) for done in range(total)] + [(total, total)]
    model.unload()
    assert [*model.load_gen(device="cpu")] == events
    assert model.loaded and str(model.output_device) == "cpu"


def test_steps_on_changing_threads() -> None:
    """Servers run each step of the generator on another thread."""
    model = new_model()
    steps = model.load_gen(reserve_per_device=[0.1], max_batch_size=4, max_chunk_size=512)
    for _ in range(len(model.modules) + 1):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(next, steps).result()
    assert model.loaded
    assert model.forward(torch.tensor([[1]])).shape == (1, 1, 512)


def test_abandoned_load_leaves_nothing() -> None:
    model = new_model()
    steps = model.load_gen()
    next(steps), next(steps)
    steps.close()
    assert not model.loaded and not any(m.loaded for m in model.modules)

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.load(callback=stop)
    assert not any(m.loaded for m in model.modules)


@pytest.mark.parametrize("device", ["foo", "cuda:x", "cpu:cpu", 1.5, [0]])
def test_a_device_that_is_none(device) -> None:
    with pytest.raises(ConfigError, match="expected a name such as 'cpu'"):
        new_model().load(device)


@pytest.mark.parametrize("wrong", [TINY, Path(TINY), None, {}])
def test_a_config_is_asked_for(wrong) -> None:
    for make in (Model.from_config, Tokenizer.from_config, Tokenizer):
        with pytest.raises(ConfigError, match=r"expected a Config: Config.from_directory"):
            make(wrong)


def test_load_unload_load() -> None:
    model, ids = new_model(), random_ids(1, 9, 512)
    cache = Cache(model, 512)
    assert cache.get_all_tensors() == []
    logits = []
    for _ in range(3):
        model.load()
        assert len(cache.get_all_tensors()) == 6
        params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, 512)}
        model.prefill(ids[:, :8], params)
        logits.append(model.forward(ids[:, 8:], {**params, "past_len": 8}))
        model.unload()
        model.unload()
        assert cache.get_all_tensors() == [] and model.output_device is None
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_unload_returns_memory(tmp_path: Path) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    }
    write_random_exl3(tmp_path, fields)
    model = Model.from_config(Config.from_directory(str(tmp_path)))
    cache, after = Cache(model, 4096), []
    size = sum(m.stored_bytes(model.config.stc) for m in model.modules)
    for _ in range(4):
        model.load()
        params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, 4096)}
        ids = random_ids(1, 64, 8192)
        model.prefill(ids, params)
        model.forward(ids[:, :1], {**params, "past_len": 64})
        model.unload()
        gc.collect()
        after.append(resident_bytes())
    assert after[-1] - after[0] < size / 4, after


def test_arguments() -> None:
    model = new_model()
    for device in ("cuda", "cuda:1", torch.device("meta")):
        with pytest.raises(UnsupportedError, match="cpu"):
            model.load(device=device)
    with pytest.raises(UnsupportedError, match="tensor_p"):
        model.load(tensor_p=True)
    with pytest.raises(ConfigError, match="exclude"):
        model.load(reserve_per_device=[], use_per_device=[])
    with pytest.raises(ConfigError, match="device"):
        model.load("cpu", None, 0.5)
    with pytest.raises(ValueError, match="tp_backend"):
        model.load(tp_backend="mpi")
    with pytest.raises(TypeError):
        model.load(devise="cpu")
    reserve = [0.5]
    model.load(reserve_per_device=reserve)
    assert reserve == [0.5]
    with pytest.raises(ConfigError, match="vision"):
        Model.from_config(model.config, component="vision")
    with pytest.raises(ConfigError, match="unknown"):
        Model.from_config(model.config, swa_full=True, bananas=1)


def test_params_errors() -> None:
    model, ids = new_model(), torch.tensor([[1, 2]])
    model.load()
    cache, other = Cache(model, 512), Cache(new_model(), 512)
    base = {"attn_mode": "flash_attn", "cache": cache}
    for params, words in [
        ({"attn_mode": "sdpa"}, "attn_mode"),
        ({"cache": cache}, "cache"),
        ({"attn_mode": "flash_attn"}, "cache"),
        (base, "batch_shape"),
        ({**base, "batch_shape": (2, 256)}, "batch_shape"),
        ({**base, "batch_shape": (1, 255)}, "batch_shape"),
        ({**base, "batch_shape": (1, 1024)}, "batch_shape"),
        ({**base, "batch_shape": (1, 256), "past_len": 255}, "ends at 257"),
        ({**base, "block_table": torch.zeros(1, 1).int()}, "cache_seqlens"),
        ({**base, "cache": other, "batch_shape": (1, 256)}, "attached"),
        ({"position_ids": torch.zeros(1, 3)}, "position_ids"),
        ({"atn_mode": "flash_attn"}, "atn_mode"),
    ]:
        with pytest.raises(ConfigError, match=words):
            model.forward(ids, params)
    with pytest.raises(ConfigError, match="flash_attn"):
        model.prefill(ids, {})


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Config.from_directory(str(tmp_path / "absent"))
    with pytest.raises(ConfigError):
        Config.from_directory(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises((ConfigError, FormatError)):
        Config.from_directory(str(tmp_path))
    with pytest.raises(ConfigError, match="load_method"):
        Config.from_directory(TINY, load_method="fast")


@pytest.mark.parametrize("cached", [False, True])
def test_long_sequence_warns_once(cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    model.load()
    model.config.max_position_embeddings = 8
    cache, ids = Cache(model, 256), random_ids(1, 9, 512)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, 256)}
    for i in range(9) if cached else range(0):
        assert not caplog.text
        model.forward(ids[:, i : i + 1], {**params, "past_len": i})
    for _ in range(2):
        model.forward(ids) if not cached else model.forward(ids, params)
    assert caplog.text.count("made for 8") == 1


def test_find_module_and_iteration() -> None:
    model = new_model()
    keys = [module.key for module in model]
    assert keys[0] == "model.embed_tokens" and keys[-1] == "lm_head"
    assert len(keys) == 1 + 3 * 12 + 2
    assert model.find_module("model.layers.1.mlp.up_proj").key.endswith("1.mlp.up_proj")
    with pytest.raises(ConfigError, match="nope"):
        model.find_module("nope")
    assert len(model.get_cache_layers()) == 3 and model.get_recurrent_layers() == []
