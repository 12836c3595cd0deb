"""Reading configurations: tolerant of form, strict about meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CONFIGS, FAMILIES, GOLDEN, Nothing

from exl3 import Config, Model
from exl3.errors import ConfigError, UnsupportedError
from exl3.loader.base import ModelSource
from exl3.model.arch import ARCHITECTURES
from exl3.model.arch_spec import evaluate
from exl3.model.layer_map import parse_layer_map

MISSING = object()


def config_of(family: str = "llama", **changes: Any) -> Config:
    fields = {**json.loads((CONFIGS / f"{family}.json").read_text()), **changes}
    fields = {key: value for key, value in fields.items() if value is not MISSING}
    return Config(ModelSource(fields, Nothing(), "there", "there/config.json", "there"))


def test_attributes() -> None:
    config = Config.from_directory(str(GOLDEN / "tiny_llama_exl3"))
    assert config.architecture == config.arch_string == "LlamaForCausalLM"
    assert config.model_classes == {"text": Model}
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (256, 640, 512)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 64)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, None)
    assert config.eos_token_id_list == [1] and config.max_position_embeddings == 2048
    assert config.vision is None and config.image_token_id is None
    assert config.infer_params.moe_cpu_offload == 0
    assert Path(config.config_filename).name == "config.json"


@pytest.mark.parametrize("family", FAMILIES)
def test_fixture_configs_build(family: str) -> None:
    model = Model.from_config(config_of(family))
    assert len(model.modules) == 6 and not model.loaded


def test_forms_of_the_same_value() -> None:
    odd = config_of(hidden_size=96.0, head_dim=None, rms_norm_eps=1, num_key_value_heads=None)
    assert odd.hidden_size == 96 and isinstance(odd.hidden_size, int)
    assert odd.head_dim == 24 and odd.num_kv_heads == 4 and odd.rms_norm_eps == 1.0
    assert config_of(head_dim=MISSING).head_dim == 24
    assert config_of(tie_word_embeddings=MISSING).tie_word_embeddings is False
    assert config_of(eos_token_id=[7, None, 9]).eos_token_id_list == [7, 9]
    assert config_of(eos_token_id=None).eos_token_id is None
    old = config_of(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    new = config_of(
        rope_theta=MISSING,
        rope_parameters={"rope_type": "linear", "rope_theta": 500000, "factor": 2.0},
    )
    assert old.rope_settings == new.rope_settings
    assert config_of(max_position_embeddings=MISSING).max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"hidden_act": "swiglu"}, "swiglu"),
        ({"hidden_size": MISSING}, "hidden_size"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 96.5}, "hidden_size"),
        ({"hidden_size": -96}, "hidden_size"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"sliding_window": 64}, "sliding window"),
        ({"rope_scaling": {"rope_type": "banana", "factor": 2.0}}, "banana"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"architectures": []}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "architectures"),
        ({"architectures": MISSING}, "architectures"),
        ({"architectures": ["NopeForCausalLM"]}, "NopeForCausalLM"),
    ],
    ids=str,
)
def test_errors_name_file_and_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Model.from_config(config_of(**changes))
    assert "config.json" in str(caught.value)


def test_mistral_refuses_bias_and_llama_takes_it() -> None:
    with pytest.raises(ConfigError, match="attention_bias"):
        config_of("mistral", attention_bias=True)
    assert config_of("llama", attention_bias=True).flags["attention_bias"]


def test_unknown_key_can_be_named_harmless() -> None:
    fields = json.loads((CONFIGS / "llama.json").read_text())
    source = ModelSource({**fields, "my_note": 3}, Nothing(), "x", "x/config.json", "x")
    assert Config(source, ignore_keys=("my_note",)).hidden_size == 96


@pytest.mark.parametrize("nested", [False, True])
def test_foreign_quantisation_is_refused(nested: bool) -> None:
    quant = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    changes = {"text_config": quant} if nested else quant
    with pytest.raises((UnsupportedError, ConfigError)):
        config_of(**changes)


def test_windows() -> None:
    assert config_of("mistral").layer_windows == [16, 16, 16]
    assert config_of("mistral", sliding_window=None).layer_windows == [0, 0, 0]
    assert config_of("mistral", sliding_window=MISSING).layer_windows == [4096] * 3
    assert config_of("qwen2").layer_windows == [0, 16, 16]
    assert config_of("qwen2", use_sliding_window=False).layer_windows == [0, 0, 0]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of("qwen2", layer_types=types).layer_windows == [16, 0, 16]
    with pytest.raises(ConfigError, match="layer_types"):
        config_of("qwen2", layer_types=types[:2])
    with pytest.raises(ConfigError, match="layer_types"):
        config_of("qwen2", layer_types=["linear_attention"] * 3)


def test_read_cfg_and_assert_cfg() -> None:
    config = config_of(hidden_dropout=0.0)
    assert config.read_cfg(int, ["nope", "vocab_size"]) == 300
    assert config.read_cfg(float, "vocab_size") == 300.0
    assert config.read_cfg(str, "text->nope", "x") == "x"
    with pytest.raises(TypeError, match="vocab_size"):
        config.read_cfg(str, "vocab_size")
    with pytest.raises(ValueError, match="nope"):
        config.read_cfg(str, "nope")
    config.assert_cfg(int, "vocab_size", 300)
    config.assert_cfg(int, "nope", 1, optional=True)
    with pytest.raises(ConfigError, match="vocab_size"):
        config.assert_cfg(int, "vocab_size", 301)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0..2,1..3", [0, 1, 2, 1, 2, 3]),
        ("..", [0, 1, 2, 3]),
        ("2..", [2, 3]),
        ("..1", [0, 1]),
        ("3..1", [3, 2, 1]),
        ("2, 2", [2, 2]),
        ([3, 0], [3, 0]),
    ],
    ids=str,
)
def test_layer_map(text: Any, layers: list[int]) -> None:
    assert parse_layer_map(text, 4) == layers


@pytest.mark.parametrize("text", ["", "4", "a..b", "1-2", "0..9", [], [-1]], ids=str)
def test_bad_layer_map(text: Any) -> None:
    with pytest.raises(ConfigError, match="layer_map"):
        parse_layer_map(text, 4)


def test_size_expressions() -> None:
    assert evaluate("q_heads*head_dim + 2", {"q_heads": 3, "head_dim": 8}) == 26
    for bad in ("q_heads**2", "__import__('os')", "unknown"):
        with pytest.raises(ConfigError):
            evaluate(bad, {"q_heads": 3})


def test_specs_are_complete() -> None:
    for arch in ARCHITECTURES.values():
        for proj in (*arch.attention.projections, *arch.mlp.projections):
            assert proj.split in ("n", "k") and proj.share
            assert not isinstance(proj.bias, str) or proj.bias in arch.flags


@pytest.mark.parametrize("family", FAMILIES)
def test_default_chat_prompt(family: str) -> None:
    model = Model.from_config(config_of(family))
    text = model.default_chat_prompt("{system} Hi", "Be brief")
    assert "{system} Hi" in text and "Be brief" in text
    assert "Be brief" not in model.default_chat_prompt("Hi")
