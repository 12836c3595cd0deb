"""GGUF files: against Transformers, every tensor type, and hostile ones."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    TEXT,
    Vocabulary,
    byte_level,
    interleave,
    sentencepiece,
    write_gguf,
)
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exl3 import settings as exl3_settings
from exl3.errors import ConfigError, Exl3Error, FormatError, UnsupportedError
from exl3.loader import open_source
from exl3.loader.fetch import fetch_demo_model
from exl3.loader.gguf import GgufTensors
from exl3.loader.gguf.config import llama3_factors
from exl3.loader.gguf.names import hugging_face_name
from exl3.loader.gguf.source import _rebuilt_folder
from exl3.tokenizer import Tokenizer

SAMPLES = [
    *TEXT[:3], "", " ", "  lead", "x=1  42 3.14", "<s>hi</s>", "a<tool>b <tool> <|im_start|>c",
    "don't DON'T we'Ll", "ÅngströmÉcole\n\n\n  \tx\r\n y", "日本語テキスト　全角",
    "\u200b\u0301a\U0001f600",
]  # fmt: skip
ONE_FOLDER = HealthCheck.function_scoped_fixture


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EXL3_CACHE_DIR", str(folder))
    exl3_settings.settings.cache_clear()
    yield folder
    monkeypatch.undo()
    exl3_settings.settings.cache_clear()


def tokenizer_of(source: Any) -> Tokenizer:
    ids = {f"{r}_token_id": source.config_dict.get(f"{r}_token_id") for r in ("bos", "eos", "pad")}
    return Tokenizer(SimpleNamespace(directory=source.directory, eos_token_id_list=[], **ids))


VOCABULARIES = {
    "smollm": lambda: byte_level("smollm", add_bos_token=False),
    "no pre": lambda: byte_level(None),
    "llama-bpe": lambda: byte_level("llama-bpe", add_bos_token=True),
    "qwen2": lambda: byte_level("qwen2", add_bos_token=False),
    "tekken": lambda: byte_level("tekken", add_bos_token=True, add_eos_token=True),
    "spm": sentencepiece,
    "spm without bos": lambda: sentencepiece(add_bos_token=False),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokenizer_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", VOCABULARIES[name]())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = tokenizer_of(open_source(tmp_path))
    for text in SAMPLES:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text).tolist() == [ids], text
        with_ends = theirs(text).input_ids
        if not text.startswith("<s>") and not text.endswith("</s>"):
            assert ours.encode(text, encode_special_tokens=True).tolist() == [with_ends], text
        for special in (False, True):
            decoded = theirs.decode(ids, skip_special_tokens=not special)
            assert ours.decode(torch.tensor(ids, dtype=torch.long), special) == decoded
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    chat = [{"role": "user", "content": "hi <tool>"}]
    rendered = theirs.apply_chat_template(chat, tokenize=False)
    assert ours.hf_render_chat_template(chat, False) == rendered


@pytest.mark.parametrize(
    ("arch", "vocabulary"), [("llama", sentencepiece), ("qwen2", byte_level), ("qwen3", byte_level)]
)
def test_config_agrees_with_transformers(tmp_path: Path, arch: str, vocabulary: Any) -> None:
    def alter(writer: GGUFWriter) -> None:
        writer.add_key_length(128 if arch == "qwen3" else HEAD_DIM)  # Qwen3's default there

    write_gguf(tmp_path / "m.gguf", vocabulary(), arch=arch, alter=alter)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    source = open_source(tmp_path / "m.gguf")
    ours = AutoConfig.from_pretrained(source.directory).to_dict()
    named = {"_name_or_path", "_model_name_or_path", "architectures", "dtype"}
    assert {k: v for k, v in ours.items() if k not in named} == {
        k: v for k, v in theirs.items() if k not in named
    }
    assert ours["architectures"][0].lower() == f"{arch}forcausallm"


def hugging_face_model(arch: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random tensors under Hugging Face names, and as llama.cpp stores them."""
    torch.manual_seed(0)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (50, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (q, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, q),
            f"blk.{i}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{p}.bias": (q if p == "q" else kv,) for p in "qkv"}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    plain = {name: torch.randn(shape) for name, shape in shapes.items()}
    stored = dict(plain)
    if arch == "llama":
        for name in plain:
            if ".attn_q." in name or ".attn_k." in name:
                stored[name] = interleave(plain[name], HEADS if "_q." in name else KV_HEADS)
    return {hugging_face_name(name): tensor for name, tensor in plain.items()}, stored


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_in_hugging_face_layout(tmp_path: Path, arch: str) -> None:
    expected, stored = hugging_face_model(arch)
    vocabulary = byte_level()
    key_length = lambda writer: writer.add_key_length(HEAD_DIM)  # noqa: E731
    write_gguf(tmp_path / "m.gguf", vocabulary, arch=arch, tensors=stored, alter=key_length)
    source = open_source(tmp_path)
    assert set(source.stc.keys()) == set(expected)
    for key, tensor in expected.items():
        info = source.stc.info(key)
        assert (info.shape, info.dtype) == (tuple(tensor.shape), torch.float32)
        assert torch.equal(source.stc.get(key), tensor), key
    assert source.stc.get("model.norm.weight", dtype=torch.float16).dtype == torch.float16
    config = AutoConfig.from_pretrained(source.directory)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    assert set(state) == {*expected, "lm_head.weight"}  # tied


KINDS = [k for k in GGMLQuantizationType if k in gguf.GGML_QUANT_SIZES]


@pytest.mark.filterwarnings("ignore:.*encountered in")  # random bits make infinite scales
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_tensor_type(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (3, 512 // per_block * block_bytes), np.uint8)
    write_gguf(
        tmp_path / "m.gguf",
        byte_level(),
        alter=lambda writer: writer.add_tensor("output.weight", data, raw_dtype=kind),
    )
    try:
        expected = gguf.quants.dequantize(data, kind)
    except NotImplementedError:
        with pytest.raises(UnsupportedError, match=rf"'output\.weight' is {kind.name}"):
            open_source(tmp_path)
        return
    got = open_source(tmp_path).stc.get("lm_head.weight")
    assert got.shape == (3, 512)
    assert np.array_equal(got.float().numpy(), expected.astype(np.float32), equal_nan=True)


def test_tied_or_not(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", byte_level())
    assert open_source(tmp_path).config_dict["tie_word_embeddings"]
    tensors = {"output.weight": torch.ones(2, HIDDEN)}
    write_gguf(tmp_path / "m.gguf", byte_level(), tensors=tensors)
    assert not open_source(tmp_path).config_dict["tie_word_embeddings"]


def test_mistral(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf", byte_level(), alter=lambda writer: writer.add_sliding_window(4096)
    )
    config = open_source(tmp_path).config_dict
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 4096


def test_rope_scaling(tmp_path: Path) -> None:
    factors = torch.tensor(llama3_factors(50_000.0, HEAD_DIM, 32.0))
    write_gguf(tmp_path / "m.gguf", byte_level(), tensors={"rope_freqs.weight": factors})
    source = open_source(tmp_path)
    assert source.stc.keys() == []
    scaling = source.config_dict["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    # The factors are those of Transformers' own scaling.
    config = AutoConfig.from_pretrained(source.directory)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 50_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert torch.allclose(plain / scaled, factors, rtol=1e-4)

    write_gguf(tmp_path / "m.gguf", byte_level(), tensors={"rope_freqs.weight": factors + 0.5})
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        open_source(tmp_path)

    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    write_gguf(tmp_path / "m.gguf", byte_level(), alter=yarn)
    assert open_source(tmp_path).config_dict["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
    }  # fmt: skip


def test_rebuilt_folder(tmp_path: Path, cache_dir: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def alter(writer: GGUFWriter) -> None:
        writer.add_uint32("tokenizer.ggml.eot_token_id", 4)
        writer.add_string("tokenizer.chat_template.tool_use", "TOOLS")

    write_gguf(model / "m.gguf", byte_level(), alter=alter)
    (model / "LICENSE").write_text("free")
    source = open_source(model)
    folder = Path(source.directory)
    assert folder.parent == cache_dir / "gguf"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    names = [file.name for file in source.files()]
    assert names == [
        "chat_template.jinja", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "LICENSE",
    ]  # fmt: skip
    tokenizer = tokenizer_of(source)
    assert tokenizer.config.eos_token_id_list == [2, 4]
    assert tokenizer.hf_render_chat_template([], tools=[{}]) == "TOOLS"
    # Reused when whole, made again when not, another one for another file.
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    open_source(model)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    (folder / "tokenizer.json").unlink()
    open_source(model)
    assert (folder / "tokenizer.json").is_file()
    write_gguf(model / "m.gguf", byte_level("qwen2"))
    other = open_source(model)
    assert other.directory != source.directory
    assert other.fingerprint() != source.fingerprint()


def test_unknown_pre_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "m.gguf", byte_level("novel"))
    with caplog.at_level(logging.WARNING):
        open_source(tmp_path)
    assert "'novel'" in caplog.text


def test_several_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", byte_level())
    write_gguf(tmp_path / "b.gguf", byte_level())
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        open_source(tmp_path)
    assert open_source(tmp_path / "b.gguf").config_dict["hidden_size"] == HIDDEN


UNSUPPORTED: dict[str, Any] = {
    "gptneox": lambda path: write_gguf(path, byte_level(), arch="gptneox"),
    "attn_qkv": lambda path: write_gguf(
        path, byte_level(), tensors={"blk.0.attn_qkv.weight": torch.ones(2, 2)}
    ),
    "expert": lambda path: write_gguf(
        path, byte_level(), alter=lambda writer: writer.add_expert_count(8)
    ),
    "bert": lambda path: write_gguf(path, Vocabulary("bert", ["a", "b", "c"], [1, 1, 1])),
    "split": lambda path: write_gguf(
        path, byte_level(), alter=lambda writer: writer.add_uint16("split.count", 3)
    ),
    "one size": lambda path: write_gguf(
        path, byte_level(), alter=lambda writer: writer.add_key_length(HEAD_DIM * 2)
    ),
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_unsupported(tmp_path: Path, words: str) -> None:
    UNSUPPORTED[words](tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match=words):
        open_source(tmp_path)


def patched(content: bytes, at: int, code: str, value: int) -> bytes:
    return content[:at] + struct.pack(code, value) + content[at + struct.calcsize(code) :]


# After the magic: version at 4, tensor count at 8, key count at 16, first key from 24 on.
DAMAGE: dict[str, Any] = {
    "magic": lambda c: b"GGML" + c[4:],
    "empty": lambda c: b"",
    "short": lambda c: c[:20],
    "cut in the keys": lambda c: c[:500],
    "cut in the data": lambda c: c[:-40],
    "tensor count": lambda c: patched(c, 8, "<Q", 2**60),
    "more tensors": lambda c: patched(c, 8, "<Q", 2),
    "key count": lambda c: patched(c, 16, "<Q", 2**63),
    "more keys": lambda c: patched(c, 16, "<Q", 100),
    "key length": lambda c: patched(c, 24, "<Q", 2**62),
    "long key": lambda c: patched(c, 24, "<Q", 70_000),
    "text": lambda c: c.replace(b"general.architecture", b"general.\xff\xffchitecture", 1),
    "key twice": lambda c: c.replace(b"ggml.eos_token_id", b"ggml.bos_token_id"),
    "bos id": lambda c: c.replace(
        b"bos_token_id" + struct.pack("<II", 4, 1), b"bos_token_id" + struct.pack("<II", 4, 10**6)
    ),
    "layers": lambda c: c.replace(
        b"count" + struct.pack("<II", 4, LAYERS), b"count" + struct.pack("<II", 4, 2**31)
    ),
    "head count": lambda c: c.replace(
        b"head_count" + struct.pack("<II", 4, HEADS), b"head_count" + struct.pack("<II", 4, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged(tmp_path: Path, name: str, cache_dir: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level())
    content = path.read_bytes()
    damaged = DAMAGE[name](content)
    assert damaged != content
    path.write_bytes(damaged)
    with pytest.raises(FormatError, match=r"m\.gguf"):
        open_source(path)
    left = list(cache_dir.rglob("*")) if cache_dir.exists() else []
    assert not [p for p in left if p.is_file()]


def test_versions(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level())
    content = path.read_bytes()
    for version, words in ((1, "version 1"), (3 << 24, "big-endian")):
        path.write_bytes(patched(content, 4, "<I", version))
        with pytest.raises(UnsupportedError, match=words):
            open_source(path)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[ONE_FOLDER])
@given(data=st.data())
def test_any_damage_is_an_error_of_ours(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    if not (tmp_path / "whole").exists():
        vocabulary = Vocabulary("gpt2", ["a", "b", "ab"], [3, 1, 1], merges=["a b"])
        write_gguf(tmp_path / "whole", vocabulary)
    content = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        source = open_source(path)
        for key in source.stc.keys():  # noqa: SIM118
            source.stc.get(key)
    except Exl3Error:
        pass


@pytest.mark.slow
def test_demo_model_against_transformers(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """The fetched model: every tensor against the gguf package, tokens against Transformers."""
    monkeypatch.delenv("EXL3_CACHE_DIR")
    exl3_settings.settings.cache_clear()
    path = fetch_demo_model()
    monkeypatch.setenv("EXL3_CACHE_DIR", str(cache_dir))
    exl3_settings.settings.cache_clear()
    source = open_source(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = tokenizer_of(source)
    for text in [*SAMPLES, Path(__file__).read_text()]:
        assert ours.encode(text).tolist() == [theirs(text, add_special_tokens=False).input_ids]
    by_name = {hugging_face_name(t.name): t for t in gguf.GGUFReader(path).tensors}
    assert set(by_name) == set(source.stc.keys())
    for key, tensor in by_name.items():
        if "q_proj" not in key and "k_proj" not in key:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(source.stc.get(key).numpy(), expected)


def test_reader_class_directly(tmp_path: Path) -> None:
    tensors = GgufTensors(write_gguf(tmp_path / "m.gguf", byte_level()), "python")
    assert tensors.has("model.embed_tokens.weight")
    tensors.get("model.embed_tokens.weight")
    assert tensors.metrics.tensors == 1
    assert tensors.fingerprint() == tensors.fingerprint()
    with pytest.raises(ConfigError, match=r"no tensor 'lm_head\.weight'"):
        tensors.get("lm_head.weight")
    assert _rebuilt_folder(tensors) == _rebuilt_folder(tensors)
    tensors.close()
