"""EXL3 directories loaded by Transformers, against exl3's own model."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3 import Config, Model
from exl3.errors import ConfigError, FormatError, UnsupportedError
from exl3.integration.transformers import patch_transformers
from exl3.modules import Linear
from tests.model.tiny_models import CONFIGS, GOLDEN, random_ids, write_random_exl3

transformers = pytest.importorskip("transformers")

TINY = GOLDEN / "tiny_llama_exl3"
DEVICE_MAPS = [None, "cpu", "auto"]


@pytest.fixture(autouse=True)
def patched() -> None:
    patch_transformers()
    patch_transformers()


def load(directory: Path, **options: Any) -> Any:
    options.setdefault("dtype", torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options)


def own(directory: Path) -> Model:
    model = Model.from_config(Config.from_directory(str(directory)))
    model.load()
    return model


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    width = actual.shape[-1]
    error = (actual.float() - expected[..., :width]).std() / expected[..., :width].std()
    assert error < 0.02, error  # 8-bit activations round the same values elsewhere


def random_model(root: Path, family: str, **changes: Any) -> Path:
    fields = {**json.loads((CONFIGS / f"{family}.json").read_text()), **changes}
    write_random_exl3(root, {**fields, "quantization_config": {"quant_method": "exl3"}})
    return root


@pytest.mark.parametrize("device_map", DEVICE_MAPS)
def test_logits(device_map: str | None) -> None:
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        pytest.skip("Transformers needs accelerate for a device_map")
    model, ids = load(TINY, device_map=device_map), random_ids(2, 24, 512)
    quantised = [m for m in own(TINY) if isinstance(m, Linear)]
    assert sum(type(m).__name__ == "Exl3Linear" for m in model.modules()) == len(quantised)
    close(model(ids).logits, own(TINY).forward(ids))  # also without torch.no_grad
    model.to("cpu")
    model.bfloat16()
    half = model(ids).logits
    assert half.dtype == torch.bfloat16
    error = (half.float() - own(TINY).forward(ids)).std()
    assert error < 0.1
    assert model.lm_head.packed().suh.dtype == torch.float16


def test_the_dtype_of_the_directory() -> None:
    model, ids = transformers.AutoModelForCausalLM.from_pretrained(str(TINY)), random_ids(1, 9, 512)
    assert model.dtype == torch.float16
    expected = own(TINY).forward(ids)
    logits = model(ids).logits
    assert logits.dtype == torch.float16
    close(logits, expected)


def test_generates_the_same_tokens() -> None:
    model, reference, ids = load(TINY), own(TINY), random_ids(1, 6, 512)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    logits = reference.forward(out[:, :-1])[0, 5:]
    chosen = logits.gather(1, out[0, 6:, None])[:, 0]
    assert out.shape == (1, 12) and (logits.max(-1).values - chosen).max() < 0.05


@pytest.mark.parametrize("family", ["llama_bias_tied", "qwen2", "qwen3"])
def test_biases_and_a_tied_head(family: str, tmp_path: Path) -> None:
    directory, ids = random_model(tmp_path, family, tie_word_embeddings=True), random_ids(1, 12)
    model = load(directory)
    assert type(model.lm_head).__name__ == "Exl3Linear"
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    close(model(ids).logits, own(directory).forward(ids))


def test_some_layers_plain(tmp_path: Path) -> None:
    """A head that was left as it is, tied or not, and one plain layer."""
    shutil.copytree(TINY, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    model = own(TINY)
    for key in ("model.layers.1.mlp.up_proj", "lm_head"):
        layer = model.find_module(key)
        assert isinstance(layer, Linear)
        weight = layer.weight_dense().t().contiguous()
        for name in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{key}.{name}"]
        tensors[f"{key}.weight"] = weight
    save_file(tensors, file, metadata={"format": "pt"})
    ids = random_ids(1, 12, 512)
    loaded = load(tmp_path / "m")
    assert type(loaded.lm_head) is torch.nn.Linear
    close(loaded(ids).logits, model.forward(ids))


def test_base_model_without_a_head() -> None:
    model = transformers.AutoModel.from_pretrained(str(TINY), dtype=torch.float32)
    ids = random_ids(1, 5, 512)
    close(load(TINY).lm_head(model(ids).last_hidden_state), own(TINY).forward(ids))


def test_fused_layers_are_refused_by_name(tmp_path: Path) -> None:
    directory = random_model(tmp_path, "llama")
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedError) as caught:
        load(directory)
    for word in ("Phi3ForCausalLM", "q_proj", "gate_proj", "qkv_proj"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        ("model.layers.0.mlp.up_proj.", {}, ["up_proj", "neither"]),
        (".nothing", {"model.layers.0.mlp.up_proj.bias": torch.ones(640)}, ["up_proj", "a bias"]),
        (
            "model.layers.0.mlp.up_proj.trellis",
            {"model.layers.0.mlp.up_proj.trellis": torch.zeros(16, 8, 48, dtype=torch.int16)},
            ["up_proj", "(16, 8, 48)", "(16, 40)"],
        ),
    ],
)
def test_files_that_do_not_fit(drop: str, add: dict, words: list[str], tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = {k: t for k, t in load_file(file).items() if not k.startswith(drop)}
    save_file({**tensors, **add}, file, metadata={"format": "pt"})
    with pytest.raises(FormatError) as caught:
        load(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


def test_only_local_directories() -> None:
    quantizer = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING["exl3"]
    config = transformers.AutoConfig.from_pretrained(str(TINY))
    made = quantizer(SimpleNamespace(quant_method="exl3"))
    made.update_attn_implementation(config)
    config.name_or_path = "someone/a-model"
    with pytest.raises(ConfigError, match="someone/a-model"):
        made.update_attn_implementation(config)
    with pytest.raises(ConfigError, match="local directory"):
        made.preprocess_model(
            SimpleNamespace(config=config, tp_plan={}, ep_plan={}, modules=list, named_modules=list)
        )
    with pytest.raises(UnsupportedError, match="disk"):
        made.validate_environment(device_map={"": "disk"})


def test_inference_only(tmp_path: Path) -> None:
    model = load(TINY)
    assert not any(p.requires_grad for p in model.parameters())
    embeds = model.get_input_embeddings()(random_ids(1, 4, 512)).requires_grad_()
    with pytest.raises(UnsupportedError, match="no_grad"):
        model(inputs_embeds=embeds)
    with torch.no_grad():
        model(inputs_embeds=embeds)
    assert not model.hf_quantizer.is_trainable
    with pytest.raises(ValueError, match="exl3"):
        model.save_pretrained(tmp_path)


def test_state_dict_after_use() -> None:
    """The tensors of the file, also after the layer took them apart."""
    model = load(TINY)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model(random_ids(1, 3, 512))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
