"""A tiny Llama on disk, conversions of it, and a stand-in for the encoder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from exl3.conversion import convert_model
from exl3.loader import save_tensors
from exl3.ops.codebook import Codebook

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 128, 128, 2, 512
KV_DIM = 64


def tiny_tensors(*, tied: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """A random Llama of 2 layers whose activations have some structure."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (0.08 * torch.randn(*shape, generator=generator)).to(torch.float16)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN) * 8}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_DIM, HIDDEN),
            "self_attn.v_proj": (KV_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + normal(HIDDEN)
    tensors["model.norm.weight"] = 1 + normal(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = normal(VOCAB, HIDDEN)
    return tensors


def write_source(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A Hugging Face directory of these tensors."""
    folder.mkdir(parents=True)
    save_tensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(GOLDEN / name, folder / name)
    (folder / "LICENSE").write_text("free for all\n")
    (folder / "pytorch_model.bin").write_bytes(b"never copied")
    return folder


def fake_encode(
    tiles: Tensor, *, bits: int, codebook: Codebook, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Stands in for the trellis search where only the pipeline is tested: rounds to a grid."""
    step = 3.6 * codebook.std * 2.0**-bits
    steps = (tiles / step).round().clamp(-100, 100)
    words = steps.to(torch.int16)[:, : 16 * bits]
    words = torch.nn.functional.pad(words, (0, 16 * bits - words.shape[1]))
    return words, steps * step


def digests(folder: Path) -> dict[str, str]:
    """File name -> digest of its bytes, hidden files included."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def convert(argv: list[str]) -> int:
    """`convert.py` in this process: its exit status."""
    return convert_model.run(argv)
