"""EXL3 model directories with random weights: speed at any size, without a download.

Any trellis bits are valid weights; scales are chosen so that activations stay of order one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl3 import Config
from exl3.loader.base import TensorInfo, TensorSource
from exl3.ops.codebook import Codebook


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-like decoder."""

    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def config(self) -> dict[str, object]:
        """The Hugging Face configuration."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """Key suffix inside a layer -> (in, out)."""
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, q),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (q, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }


SMOLLM2_135M = Shape(576, 1536, 30, 9, 3, 64, 49152, tied=True)
LLAMA_3_1_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256)


def random_linear(key: str, k: int, n: int, bits: int, codebook: Codebook) -> dict[str, Tensor]:
    """Tensors of one quantised layer with random trellis and signs."""
    kp, np_ = -(-k // 128) * 128, -(-n // 128) * 128
    signs_in = torch.randint(0, 2, (kp,)) * 2 - 1
    signs_out = torch.randint(0, 2, (np_,)) * 2 - 1
    tensors = {
        f"{key}.trellis": torch.randint(
            -(2**15), 2**15, (kp // 16, np_ // 16, 16 * bits), dtype=torch.int16
        ),
        f"{key}.suh": signs_in.half(),
        f"{key}.svh": (signs_out / (k**0.5 * codebook.std)).half(),
    }
    if codebook is Codebook.MUL1:
        tensors[f"{key}.mul1"] = torch.tensor(0x83DCD12D - 2**32, dtype=torch.int32)
    if codebook is Codebook.MCG:
        tensors[f"{key}.mcg"] = torch.tensor(0xCBAC1FED - 2**32, dtype=torch.int32)
    return tensors


def random_tensors(
    shape: Shape, *, bits: int, head_bits: int, codebook: Codebook
) -> dict[str, Tensor]:
    """All tensors of a model, on torch's default device."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden).half(),
        "model.norm.weight": torch.ones(shape.hidden).half(),
        **random_linear("lm_head", shape.hidden, shape.vocab, head_bits, codebook),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(shape.hidden).half()
        for name, (k, n) in shape.linears().items():
            tensors |= random_linear(f"{prefix}.{name}", k, n, bits, codebook)
    return tensors


def write_config(
    directory: Path, shape: Shape, *, bits: int, head_bits: int, codebook: Codebook
) -> None:
    """Write config.json alone."""
    quantization = {
        "quant_method": "exl3",
        "version": "0",
        "bits": bits,
        "head_bits": head_bits,
        "codebook": codebook.label,
    }
    config = shape.config() | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def write_random_model(
    directory: Path,
    shape: Shape,
    *,
    bits: int = 4,
    head_bits: int = 6,
    codebook: Codebook = Codebook.MUL1,
) -> Path:
    """Write a model directory (no tokenizer); the same seed gives the same model.

    Returns:
        `directory`.
    """
    from safetensors.torch import save_file

    torch.manual_seed(0)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(shape, bits=bits, head_bits=head_bits, codebook=codebook)
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, shape, bits=bits, head_bits=head_bits, codebook=codebook)
    return directory


class TensorDict(TensorSource):
    """Tensors in memory, on any device."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def keys(self) -> Sequence[str]:
        return list(self.tensors)

    def info(self, key: str) -> TensorInfo:
        if key not in self.tensors:
            raise self._missing(key, "memory")
        t = self.tensors[key]
        return TensorInfo(key, tuple(t.shape), t.dtype, t.numel() * t.element_size(), "memory")

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        t = self.tensors[key]
        return t if dtype is None else t.to(dtype)

    def fingerprint(self) -> str:
        return "memory"


def random_config(
    directory: Path, shape: Shape, *, device: str, bits: int = 4, head_bits: int = 6
) -> Config:
    """A configuration whose tensors are made on `device` and never written: for large models."""
    from safetensors.torch import save_file

    options = {"bits": bits, "head_bits": head_bits, "codebook": Codebook.MUL1}
    write_config(directory, shape, **options)
    save_file({"unused": torch.zeros(1)}, directory / "model.safetensors")
    config = Config.from_directory(str(directory))
    torch.manual_seed(0)
    with torch.device(device):
        config.stc = TensorDict(random_tensors(shape, **options))
    return config
