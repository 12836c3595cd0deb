"""Tiny random models of every family, written by Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exl3 import Config, Model
from exl3.loader.base import ModelSource, TensorInfo, TensorSource
from exl3.modules import Embedding, Linear, RMSNorm

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = FIXTURES / "configs"
GOLDEN = FIXTURES / "golden"
FAMILIES = sorted(path.stem for path in CONFIGS.glob("*.json"))


class Tiny:
    """One written model: its directory and the Transformers model it came from."""

    def __init__(self, directory: Path, reference: Any) -> None:
        self.directory, self.reference = directory, reference

    def load(self, **options: Any) -> Model:
        model = Model.from_config(Config.from_directory(str(self.directory), **options))
        model.load()
        return model

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(ids).logits


def make_tiny(root: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Tiny:
    """Write a family's model with random weights, some keys of its configuration replaced."""
    transformers = pytest.importorskip("transformers")
    fields = {**json.loads((CONFIGS / f"{family}.json").read_text()), **changes}
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn_like(tensor) * (0.15 if tensor.dim() == 2 else 0.3)
            tensor.copy_(1 + noise if "norm" in key else noise)
    model.to(dtype).save_pretrained(root)
    if dtype != torch.float32:
        # The written weights in float32; `model.float()` would keep rounded RoPE frequencies.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            root, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return Tiny(root, model)


def write_random_exl3(root: Path, fields: dict[str, Any], bits: int = 4, seed: int = 0) -> None:
    """Write an EXL3 model of random bits: any trellis is a valid weight.

    Plain tensors are float16; scales keep activations near 1.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(fields))
    # The builder lists the layers; a source that has no tensors serves as its index.
    source = ModelSource(fields, Nothing(), str(root), str(root / "config.json"), str(root))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module in Model.from_config(Config(source)):
        if isinstance(module, Linear):
            tensors.update(random_linear(module, bits, generator))
        elif isinstance(module, RMSNorm):
            tensors[f"{module.key}.weight"] = torch.ones(module.dim, dtype=torch.float16)
        elif isinstance(module, Embedding):
            table = torch.randn(module.vocab, module.hidden, generator=generator)
            tensors[f"{module.key}.weight"] = table.to(torch.float16)
    save_file(tensors, root / "model.safetensors")


def random_linear(layer: Linear, bits: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of one EXL3 layer with the `mul1` codebook and, if it has one, a bias."""
    k, n = (-(-size // 128) * 128 for size in (layer.in_features, layer.out_features))

    def signs(size: int) -> torch.Tensor:
        return torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1

    tensors = {
        "trellis": torch.randint(
            -(2**15), 2**15, (k // 16, n // 16, 16 * bits), generator=generator
        ).to(torch.int16),
        "suh": signs(k).to(torch.float16),
        "svh": (signs(n) * layer.in_features**-0.5).to(torch.float16),
        "mul1": torch.tensor(0x83DCD12D - 2**32, dtype=torch.int32),
    }
    if layer.has_bias:
        bias = torch.randn(layer.out_features, generator=generator) * 0.1
        tensors["bias"] = bias.to(torch.float16)
    return {f"{layer.key}.{name}": tensor for name, tensor in tensors.items()}


class Nothing(TensorSource):
    """A source without tensors."""

    def keys(self) -> list[str]:
        return []

    def info(self, key: str) -> TensorInfo:
        raise self._missing(key, "nothing")

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise self._missing(key, "nothing")

    def fingerprint(self) -> str:
        return ""


def random_ids(bsz: int, length: int, vocab: int = 300, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (bsz, length), generator=generator)
